"""Sparse layers for Hopper: what they take and refuse, how weights are packed, how they compile.

What tensor cores would multiply is read back from the packed weight as the PTX manual says.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tessella import kernels
from tessella.device import launch
from tessella.kernels import catalog
from tessella.kernels.sparse import cusparselt, wgmma, wgmma_device
from tessella.kernels.sparse.two_four import TWO_FOUR, prune_two_four
from tessella.kernels.sparse.wgmma_device import Tiling, depth
from tessella.operations.epilogue import ACTIVATIONS, Epilogue, finish, store
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tests.support.emulators.sparse_on_cpu import linear
from tests.support.kernels.compile_only import compile_all
from tests.support.problems.products import Case, assert_right, draw, run

LAYER = Case(m=1000, n=1024, k=1536, sparsity=TWO_FOUR)
CASES = {
    "float16": LAYER,
    "bfloat16": replace(LAYER, dtype="bfloat16", bias="bfloat16", activation="gelu"),
    "to float32": replace(LAYER, out="float32", bias="float32", residual="float16"),
    "int8 to int8": replace(
        LAYER, dtype="int8", out="int8", scale=True, bias="float32", residual="int8", beta=0.3,
        activation="relu",
    ),
    "int8, gelu, int8": replace(
        LAYER, dtype="int8", out="int8", scale=True, bias="float32", activation="gelu", gamma=40.0
    ),
    "int8 to float16": replace(LAYER, dtype="int8", out="float16", scale=True),
    "int8 to int32": replace(LAYER, dtype="int8", out="int32"),
    "few rows": replace(LAYER, m=16),
}  # fmt: skip
COMPILED = {
    "float16": (0, 1, 7),
    "bfloat16": (2,),
    "int8 to int8": (0, 6),
    "int8, gelu, int8": (1,),
}
BOTH = {"wgmma": wgmma, "cusparselt": cusparselt}


def problem(case: Case) -> Problem:
    return replace(draw(replace(case, m=min(case.m, 1024)))[0], constant=(1,))


def convolution(**changes: Any) -> Problem:
    """A 1×1 convolution on NHWC, 64 → 128 channels."""

    def image(channels: int) -> TensorMeta:
        return TensorMeta(shape=(4, channels, 8, 8), dtype="float16", format="channels_last")

    attrs = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    return Problem(
        op="conv2d",
        inputs=(image(64), TensorMeta(shape=(128, 64, 1, 1), dtype="float16")),
        outputs=(image(128),),
        attrs={**attrs, "activation": "relu", "sparsity": TWO_FOUR, **changes},
        constant=(1,),
    )


@pytest.mark.parametrize("name", CASES)
def test_ours_takes(name: str) -> None:
    assert wgmma.fits(problem(CASES[name])) is None


@pytest.mark.parametrize("kernel", BOTH.values(), ids=list(BOTH))
def test_both_take_convolutions_by_pixels(kernel: Any) -> None:
    assert kernel.fits(convolution()) is None
    assert "stride" in kernel.fits(convolution(stride=(2, 2)))
    assert "not 2:4" in kernel.fits(convolution(sparsity=None))


@pytest.mark.parametrize("kernel", BOTH.values(), ids=list(BOTH))
@pytest.mark.parametrize(("changes", "reason"), [
    ({"sparsity": None}, "not 2:4"),
    ({"dtype": "float32"}, "float32"),
    ({"k": 1528}, "multiple of 16, not 1528"),
    ({"k": 1552, "dtype": "int8", "out": "int32"}, "multiple of 32, not 1552"),
    ({"n": 1022}, "output channels"),
    ({"out": "float8_e4m3fn"}, "float8_e4m3fn"),
    ({"m": 0}, "reduction"),
])  # fmt: skip
def test_both_refuse(kernel: Any, changes: dict[str, Any], reason: str) -> None:
    assert reason in (kernel.fits(problem(replace(LAYER, **changes))) or "")


def test_a_weight_that_may_change_is_refused() -> None:
    for kernel in BOTH.values():
        assert "known in advance" in kernel.fits(replace(problem(LAYER), constant=()))


def test_the_library_refuses_what_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tall = convolution()
    x, out = (replace(m, shape=(128, m.shape[1], 56, 56)) for m in (tall.inputs[0], tall.output))
    tall = replace(tall, inputs=(x, tall.inputs[1]), outputs=(out,))
    assert "breaks the context" in (cusparselt.fits(tall) or "")
    assert wgmma.fits(tall) is None
    assert "multiple of 8" in (cusparselt.fits(problem(replace(LAYER, m=999))) or "")
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    assert "without cuSPARSELt" in (cusparselt.fits(problem(LAYER)) or "")


@pytest.mark.parametrize("case", [
    Case(m=16, n=32, k=64, sparsity=TWO_FOUR, bias="float16", residual="float16"),
    Case(m=16, n=32, k=64, sparsity=TWO_FOUR, batch=(2,), bias="float16", alpha=0.5, scale=True),
    Case(m=16, n=32, k=64, sparsity=TWO_FOUR, dtype="int8", out="int32"),
    Case(m=16, n=32, k=64, sparsity=TWO_FOUR, dtype="int8", out="int8", scale=True,
         bias="float32", residual="int8", beta=0.5, activation="relu"),
], ids=repr)  # fmt: skip
def test_what_follows_the_library_s_product(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuSPARSELt is replaced by what torch says that it computes."""

    def multiply(
        weight: torch.Tensor, x: torch.Tensor, *, bias: torch.Tensor | None,
        out_dtype: torch.dtype | None, transpose_result: bool, alg_id: int,
    ) -> torch.Tensor:  # fmt: skip
        assert (transpose_result, alg_id) == (True, 3)
        made = (weight.double() @ x.double()).T
        return (made if bias is None else made + bias).to(out_dtype or x.dtype)

    monkeypatch.setattr(torch, "_cslt_compress", lambda weight: weight.clone())
    monkeypatch.setattr(torch, "_cslt_sparse_mm", multiply)
    made, right = run(cusparselt, case, constant=(1,), config={"alg_id": 3})
    assert_right(made, right, case)


def test_find_shows_them_for_a_sparse_weight() -> None:
    """On a CPU the catalog has no row for them; what a GPU would be asked is in the problem."""
    x, weight = torch.randn(16, 64).half(), prune_two_four(torch.randn(32, 64)).half()
    sparse = kernels.find("linear", x, weight, constant_weight=True, budget_s=0.0).problem
    assert sparse.attr("sparsity") == TWO_FOUR
    dense = kernels.find("linear", x, weight + 1, constant_weight=True, budget_s=0.0).problem
    assert "sparsity" not in dense.attrs
    assert sparse.key != dense.key
    rows = [k for k in catalog.candidates("linear", "sm_90") if k.sparse]
    assert {k.algorithm for k in rows} >= {"sparse", "cusparselt"}
    assert {k.id: k.refusal(sparse) for k in rows if k.algorithm == "sparse"} == {
        "linear.sparse.sm90": None
    }


# Multiplied as the registers say: PTX manual, wgmma.mma_async.sp, sparse matrix storage.


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize("shape", [(128, 256), (300, 352), (64, 64)])
def test_packed_weights_multiply_as_the_dense_ones(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = prune_two_four(torch.randint(-9, 10, shape).to(dtype))
    values, places = wgmma._packed(weight)
    blocks, steps, threads, _ = places.shape
    assert (threads, steps) == (128, math.ceil(shape[1] / depth(dtype.itemsize)))
    assert blocks * 64 >= -(-shape[0] // 256) * 256
    assert places.is_contiguous()
    thread, inner = torch.arange(128), 64 // dtype.itemsize  # columns of one instruction
    warp, quad, within = thread // 32, thread % 32 // 4, thread % 4
    read = torch.zeros(blocks * 64, steps * depth(dtype.itemsize))
    padded = torch.zeros(blocks * 64, steps * depth(dtype.itemsize) // 2)
    padded[: shape[0], : values.shape[1]] = values.float()
    for block, step, multiplied in (
        (b, s, m) for b in range(blocks) for s in range(steps) for m in range(4)
    ):
        if dtype == torch.float16:  # the selector says which two threads of four
            register = places[block, step, :, multiplied // 2].long() & 0xFFFFFFFF
            asked = within // 2 == multiplied % 2
            parts = [(8 * h, 16 * (within % 2), register >> 16 * h, 4) for h in (0, 1)]
        else:
            register = places[block, step, :, multiplied].long() & 0xFFFFFFFF
            asked = torch.ones(128, dtype=torch.bool)
            parts = [(8 * (within % 2), 32 * (within // 2), register, 8)]
        for down, right, bits, fours in parts:
            row = block * 64 + 16 * warp + quad + down
            for four in range(fours):
                k = step * depth(dtype.itemsize) + multiplied * inner + right + 4 * four
                for one in (0, 1):
                    place = bits >> 4 * four + 2 * one & 3
                    k_of_value = torch.as_tensor(k) // 2 + one
                    read[row[asked], (k + place)[asked]] = padded[row, k_of_value][asked]
    assert torch.equal(read[: shape[0], : shape[1]], weight.float())
    assert not read[shape[0] :].any()


def test_configurations() -> None:
    for case in CASES.values():
        made = problem(case)
        configs = wgmma.configs(made)
        assert len({repr(c) for c in configs}) == len(configs) == wgmma.TRIED
        for config in configs:
            tiling = Tiling(**config)
            itemsize = getattr(torch, case.dtype).itemsize
            assert tiling.shared_bytes(itemsize) <= 227 * 1024
    assert wgmma.configs(problem(CASES["few rows"]))[0]["rows"] <= 64


def test_every_tiling_fits() -> None:
    for tiling in wgmma.TILINGS:
        assert tiling.channels % (64 * tiling.groups) == 0
        assert tiling.channels <= wgmma.CHANNELS
        assert max(tiling.channels, tiling.rows) <= 256  # of a TMA box
        for itemsize in (1, 2):
            assert tiling.shared_bytes(itemsize) <= 227 * 1024


def compiled() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Some cases, in these tilings."""
    tilings = [{"channels": t.channels, "rows": t.rows, "stages": t.stages} for t in wgmma.TILINGS]
    for name, tried in COMPILED.items():
        case = CASES[name]
        made, inputs, out = draw(replace(case, m=16, n=64, k=256))
        made = replace(made, constant=(1,))
        given = [t for i, t in enumerate(inputs) if t is not None and i != 1]
        for config in (tilings[i] for i in tried):
            call = wgmma.bind(made, {1: inputs[1]}, **config)
            yield f"{name}|{json.dumps(config)}", functools.partial(call, *given, out=out)


@pytest.fixture(scope="module")
def compiled_kernels() -> dict[str, list[dict[str, Any]]]:
    return compile_all("tests.kernels.sparse.test_sm90:compiled")


@pytest.mark.parametrize("name", COMPILED)
def test_compiles(compiled_kernels: dict[str, list[dict[str, Any]]], name: str) -> None:
    case = CASES[name]
    launches = {key: made for key, made in compiled_kernels.items() if key.startswith(f"{name}|")}
    assert launches
    for key, (one,) in launches.items():
        opcodes, tiling = one["opcodes"], Tiling(**json.loads(key.split("|")[1]))
        assert one["spilled_bytes"] == 0, key
        assert one["threads"] == tiling.threads, key
        assert one["shared_bytes"] <= 227 * 1024, key
        # four instructions a stage for each 64 channels of a group, all of them sparse
        products = 4 * (tiling.channels // 64 // tiling.groups)
        assert opcodes["IGMMA" if case.dtype == "int8" else "HGMMA"] == products, key
        assert opcodes["SP"] == products, key
        assert opcodes["UTMALDG"] == 3, key
        assert not {"LDL", "STL"} & set(opcodes), key


def test_a_convolution_launches_the_same_kernel() -> None:
    made, weight = convolution(), prune_two_four(torch.randn(128, 64, 1, 1)).half()
    x, out = (meta.empty(torch.device("cpu")) for meta in (made.inputs[0], made.output))
    call = wgmma.bind(made, {1: weight})
    with launch.preparing(), launch.watching() as launches:
        call(x, out=out)
    (one,) = launches
    tiling = Tiling(**wgmma.configs(made)[0])
    assert one.grid == (-(-128 // tiling.channels) * -(-256 // tiling.rows), 1, 1)
    assert one.resources().kernel == "sparse_linear"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("gamma", [1.0, 0.25])
@pytest.mark.parametrize(("tiling", "dtype", "shape"), [
    # a ring that wraps, edges everywhere, and more tiles of channels than one band has
    (Tiling(channels=64, rows=32, stages=2), torch.float16, (40, 1092, 272)),
    (Tiling(channels=256, rows=32, stages=2), torch.int8, (40, 260, 544)),
], ids=["float16", "int8"])  # fmt: skip
def test_the_source_on_a_processor_is_exact(
    tiling: Tiling, dtype: torch.dtype, shape: tuple[int, int, int], gamma: float, tmp_path: Path
) -> None:
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator)

    x, weight = whole(m, k).to(dtype), prune_two_four(whole(n, k).to(dtype))
    bias, residual, scale = whole(n).float(), whole(m, n).to(dtype), 0.5 ** whole(n).abs().float()
    out = torch.full((m, n), 77, dtype=dtype)
    numbers = {"activation": "relu", "alpha": 0.5, "beta": -2.0, "gamma": gamma}
    linear(tiling, x, weight, out, tmp_path, bias=bias, residual=residual, scale=scale, **numbers)
    product = x.double() @ weight.double().T
    wide = {"bias": bias.double(), "residual": residual.double(), "scale": scale.double()}
    right = finish(product, Epilogue(**wide, **numbers))
    assert torch.equal(out, store(right, dtype))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_activations_are_the_epilogue_s(tmp_path: Path) -> None:
    functions = "".join(
        f'extern "C" float of_{name}(float x) {{ return {text}; }}\n'
        for name, text in wgmma_device.ACTIVATIONS.items()
    )
    code = f"#include <cmath>\n#define __expf expf\n{functions}"
    command = ["g++", "-O1", "-shared", "-fPIC", "-x", "c++", "-", "-o", tmp_path / "a.so"]
    subprocess.run(command, input=code, text=True, check=True)
    library, x = ctypes.CDLL(tmp_path / "a.so"), torch.linspace(-9, 9, 91)
    assert set(wgmma_device.ACTIVATIONS) == {None, *ACTIVATIONS}
    for name, activation in ACTIVATIONS.items():
        made = getattr(library, f"of_{name}")
        made.restype, made.argtypes = ctypes.c_float, [ctypes.c_float]
        found = torch.tensor([made(float(v)) for v in x])
        torch.testing.assert_close(found.double(), activation(x.double()), rtol=2e-6, atol=2e-6)
        assert math.isnan(made(math.nan)), name
