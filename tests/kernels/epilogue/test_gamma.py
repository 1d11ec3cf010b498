"""The factor behind the activation: every kernel of a layer multiplies by it, or refuses it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.device.cuda import CudaKernel
from tessella.device.launch import launch
from tessella.kernels import catalog
from tessella.kernels.sparse import wgmma as sparse
from tessella.kernels.sparse.two_four import TWO_FOUR, prune_two_four
from tessella.operations import problems
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import Format, TensorMeta

OPS = ("linear", "matmul", "conv1d", "conv2d", "conv3d")
GAMMA = 3.25  # no other number of these problems is this one
CPU = torch.device("cpu")


def product(op: str, dtype: str, out: str, m: int = 48) -> Problem:
    weight = TensorMeta(shape=(64, 128), dtype=dtype)
    make = problems.linear if op == "linear" else problems.matmul
    turned = {} if op == "linear" else {"transpose_b": True}
    return make(TensorMeta(shape=(m, 128), dtype=dtype), weight, out_dtype=out, constant=(1,),
                activation="gelu", gamma=GAMMA, **turned)  # fmt: skip


def image(axes: int, dtype: str, channels: int = 64, taps: int = 3) -> Problem:
    format: Format = "channels_last" if axes > 1 else "contiguous"
    x = TensorMeta(shape=(2, channels, *[8] * axes), dtype=dtype, format=format)
    weight = TensorMeta(shape=(64, channels, *[taps] * axes), dtype=dtype, format=format)
    return problems.conv(x, weight, padding=taps // 2, out_dtype=dtype, constant=(1,),
                         activation="silu", gamma=GAMMA)  # fmt: skip


def asked(row: catalog.Kernel) -> Problem:
    """Something that a kernel takes."""
    if row.id == "linear.sparse.sm90":
        made = product("linear", "int8", "int8")
        return replace(made, attrs={**made.attrs, "sparsity": TWO_FOUR})
    if row.id == "conv2d.sparse.sm90":
        made = image(2, "int8", taps=1)
        return replace(made, attrs={**made.attrs, "sparsity": TWO_FOUR})
    if row.algorithm == "fma":
        return product(row.op, "float32", "float32")
    if row.id.endswith("skinny.sm90"):
        return product(row.op, "float16", "int8", m=4)
    if row.op in ("linear", "matmul"):
        return product(row.op, "int8", "int8", m=4 if row.algorithm == "skinny" else 48)
    if row.id == "conv2d.direct.sm90":
        return image(2, "int8", channels=3)
    if row.id == "conv2d.direct.sm80":
        return image(2, "float16", channels=4)
    dtype = "float16" if row.algorithm == "direct" else "int8"
    return image(int(row.op[4]), dtype, taps=1 if row.algorithm == "pointwise" else 3)


ROWS = [row for row in catalog.KERNELS if row.op in OPS]
KNOW = [row for row in ROWS if row.gamma]


def test_these_know_it() -> None:
    """Their numbers are compared with float64 in the tests of each; see also tests/gpu."""
    assert {row.id for row in KNOW} == {
        *(f"{op}.{by}" for op in ("linear", "matmul") for by in (
            "wgmma.sm90", "skinny.sm90", "skinny", "tiled", "fma.sm90",
        )),
        *(f"conv{n}d.{by}" for n in (1, 2, 3) for by in (
            "direct", "gemm", "implicit_gemm", "implicit_precomp_gemm",
        )),
        "conv2d.avx2", "conv2d.avx512",
        *(f"{op}.{by}_int8" for op in ("conv2d", "linear") for by in (
            "avx2", "avx2_vnni", "avx512_vnni", "amx",
        )),
        "conv2d.implicit_gemm.sm90", "conv3d.implicit_gemm.sm90", "conv2d.pointwise.sm90",
        "conv2d.direct.sm90",
        "conv2d.implicit_gemm.sm80", "conv2d.direct.sm80",
        "linear.sparse.sm90", "conv2d.sparse.sm90", "linear.cusparselt", "conv2d.cusparselt",
    }  # fmt: skip


@pytest.mark.parametrize("row", [r for r in ROWS if r not in KNOW], ids=lambda r: r.id)
def test_all_others_refuse_it(row: catalog.Kernel) -> None:
    for dtype, out in (("float32", "float32"), ("float16", "float16"), ("int8", "int8")):
        if row.op in ("linear", "matmul"):
            problem = product(row.op, dtype, out)
        else:
            problem = image(int(row.op[4]), dtype, taps=1)
        assert "gamma" in (row.refusal(problem) or ""), row.id


def test_a_chain_has_none_and_no_floor() -> None:
    first = image(2, "int8", taps=1)
    plain = replace(first, attrs={k: v for k, v in first.attrs.items() if k != "gamma"})
    floored = replace(plain, attrs={**plain.attrs, "activation": "relu", "floor": 0.5})
    assert problems.unchainable(plain, plain) is None
    for other in (first, floored):
        found = {problems.unchainable(other, plain), problems.unchainable(plain, other)}
        assert found == {"neither alpha nor gamma nor a floor"}


BY_LAUNCH = [
    row for row in KNOW if "gpu" in row.targets and row.algorithm not in ("cusparselt", "sparse")
]


def flat(arguments: Iterable[Any]) -> list[Any]:
    """Arguments with those that go in groups, one behind another."""
    parts = (flat(a) if isinstance(a, tuple) else [a] for a in arguments)
    return [argument for part in parts for argument in part]


@pytest.mark.parametrize("row", BY_LAUNCH, ids=lambda r: r.id)
def test_the_number_reaches_the_gpu(row: catalog.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every configuration a launch has it; without it, none."""
    launches: list[list[Any]] = []

    def watch(kernel: Any, grid: Any, *args: Any, **named: Any) -> None:
        launches.append(flat([*args, *named.values()]))

    def watch_cuda(self: Any, grid: Any, block: Any, args: Any, **named: Any) -> None:
        launches.append(flat(args))

    monkeypatch.setattr(CudaKernel, "launch", watch_cuda)
    for other in KNOW:  # one kernel may call another
        other.load()
    for name, module in list(sys.modules.items()):
        if name.startswith("tessella.kernels") and getattr(module, "launch", None) is launch:
            monkeypatch.setattr(module, "launch", watch)
    problem = asked(row)
    assert row.refusal(problem) is None
    plain = replace(problem, attrs={k: v for k, v in problem.attrs.items() if k != "gamma"})
    for config in row.configs(problem):
        for made in (problem, plain):
            launches.clear()
            _call(row, made, config)
            found = [isinstance(a, float) and a == GAMMA for args in launches for a in args]
            assert any(found) == (made is problem), (row.id, config)


def _call(row: catalog.Kernel, problem: Problem, config: dict[str, Any]) -> None:
    tensors = [None if m is None else m.empty(CPU).zero_() for m in problem.inputs]
    constants = {i: tensors[i] for i in problem.constant}
    rest = [t for i, t in enumerate(tensors) if t is not None and i not in constants]
    needed = row.workspace_bytes(problem, config)
    space = {"workspace": torch.empty(needed, dtype=torch.uint8)} if needed else {}
    call = row.load().bind(problem, constants, **config)
    call(*rest, out=problem.output.empty(CPU), **space)


@pytest.mark.parametrize("id", ["linear.sparse.sm90", "conv2d.sparse.sm90"])
def test_the_sparse_kernel_gets_it_last(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    class Kernel:
        def launch(self, grid: Any, block: Any, args: tuple[Any, ...], **_: Any) -> None:
            seen.append(args)

    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(sparse, "_kernel", lambda *_, **named: compiled.append(named) or Kernel())
    monkeypatch.setattr(sparse, "_map", lambda *_: None)
    monkeypatch.setattr(sparse, "record", lambda *_: None)
    row = catalog.kernel(id)
    problem = asked(row)
    assert row.refusal(problem) is None
    x, weight = (m.empty(CPU).zero_() for m in problem.inputs)
    call = row.load().bind(problem, {1: prune_two_four(weight.flatten(1)).view_as(weight)})
    call(x, out=problem.output.empty(CPU))
    assert seen[0][-1] == GAMMA
    assert compiled[0]["rescaled"]
