"""A product and the norm of its rows as one Hopper kernel: compiled, and played on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton

from tessella.kernels.gemm import normed as kernel
from tessella.kernels.gemm import wgmma
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tests.kernels import compile_only, gluon_roles

FP8 = "float8_e4m3fn"
EPS = 1e-5


def meta(dtype: str, *shape: int) -> TensorMeta:
    return TensorMeta(shape=shape, dtype=dtype)


def problem_of(
    m: int,
    n: int,
    k: int,
    *results: str,
    dtype: str = "float16",
    half: str = "float16",
    codes: str = FP8,
    residual: bool = True,
    bias: bool = True,
    vectors: str | None = None,
    lead: tuple[int, ...] = (),
    **attrs: Any,
) -> Problem:
    """As ``problems.linear_norm`` makes it; ``vectors``: the type of the norm's."""
    of_results = {"norm": half, "sum": half, "codes": codes}
    scaled = dtype != half
    attrs |= {"eps": EPS, "results": results}
    if scaled:
        attrs |= {"dtype": half, "fast_accumulation": dtype == FP8}
    inputs = (
        meta(dtype, *lead, m, k),
        meta(dtype, n, k),
        meta("float32", n) if bias else None,
        meta(half, *lead, m, n) if residual else None,
        meta("float32", n) if scaled else None,
        meta(vectors or half, n),
        meta(vectors or half, n),
        meta("float32") if "codes" in results else None,
    )
    return Problem(
        op="linear_norm",
        inputs=inputs,
        outputs=tuple(meta(of_results[name], *lead, m, n) for name in results),
        attrs=attrs,
        constant=tuple(i for i in (1, 2, 4, 5, 6, 7) if inputs[i] is not None),
    )


CASES: dict[str, Problem] = {
    "BERT fp8": problem_of(1000, 1024, 1024, "codes", "norm", dtype=FP8),
    "BERT": problem_of(1000, 1024, 1024, "norm"),
    "ViT": problem_of(1000, 768, 768, "norm", "sum"),
    "ViT fp8": problem_of(1000, 768, 768, "codes", "sum", dtype=FP8),
    "alone": problem_of(1000, 128, 256, "norm", half="bfloat16", dtype="bfloat16", residual=False),
    "int8": problem_of(1000, 512, 256, "codes", "norm", dtype="int8", codes="int8"),
}


def operands_of(problem: Problem, seed: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(i: int, given: TensorMeta | None) -> torch.Tensor | None:
        if given is None:
            return None
        if i == kernel.CODE_SCALE:
            return torch.tensor(0.03)
        values = torch.randn(given.shape, generator=generator)
        if given.dtype == "int8":
            values = (20 * values).round().clamp(-127, 127)
        if i == wgmma.SCALE:
            values = values.abs() * 1e-3
        if i == 2:
            values += 3  # a mean far from zero
        return values.to(getattr(torch, given.dtype))

    return [drawn(i, given) for i, given in enumerate(problem.inputs)]


def exact(problem: Problem, operands: list[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """All results in float64; codes limited, but not rounded."""
    x, w, bias, residual, scale, weight, offset, quantum = (
        None if t is None else t.double() for t in operands
    )
    assert x is not None
    assert w is not None
    y = x @ w.T * problem.attr("alpha")
    if scale is not None:
        y = y * scale
    if bias is not None:
        y = y + bias
    if residual is not None:
        y = y + problem.attr("beta") * residual
    activation = problem.attr("activation")
    y = problem.attr("gamma") * (ACTIVATIONS[activation](y) if activation else y)
    made = F.layer_norm(y, y.shape[-1:], weight, offset, EPS)
    codes = made if quantum is None else made / quantum
    if "codes" in problem.attrs["results"]:
        of_codes = problem.outputs[problem.attrs["results"].index("codes")].dtype
        codes = codes.clamp(-128, 127) if of_codes == "int8" else codes.clamp(-448, 448)
    return {"sum": y, "norm": made, "codes": codes}


def ran(
    problem: Problem,
    operands: list[torch.Tensor | None],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> tuple[torch.Tensor, ...]:
    """All blocks at the same time, on four multiprocessors; twice, as counters are kept."""
    monkeypatch.setattr(
        kernel, "launch", functools.partial(gluon_roles.run, seed=seed, together=True)
    )
    monkeypatch.setattr(wgmma, "multiprocessors", lambda: 7)
    constants = {i: t for i, t in enumerate(operands) if i in problem.constant and t is not None}
    rest = [t for i, t in enumerate(operands) if i not in constants and t is not None]
    call = kernel.bind(problem, constants, **kernel.configs(problem)[0])
    size = kernel.workspace_bytes(problem)
    first, again = (
        results(call(*rest, workspace=torch.full((size,), 0x7F, dtype=torch.uint8)))
        for _ in range(2)
    )
    assert all(map(torch.equal, first, again))
    return again


def results(made: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """One result is no tuple."""
    return (made,) if isinstance(made, torch.Tensor) else made


def assert_right(
    problem: Problem, operands: list[torch.Tensor | None], made: tuple[torch.Tensor, ...]
) -> None:
    right = exact(problem, operands)
    for name, one in zip(problem.attrs["results"], made, strict=True):
        off = (one.double() - right[name]).abs().max()
        assert off <= (0.52 if name == "codes" else 4e-3 * right[name].abs().max()), name


PLAYED = {
    "norm": problem_of(300, 256, 128, "norm"),
    "norm and sum": problem_of(520, 256, 64, "norm", "sum", beta=0.5),
    "without a residual": problem_of(200, 128, 128, "norm", residual=False, activation="relu"),
    "codes": problem_of(390, 256, 128, "codes", "norm", dtype="int8", codes="int8"),
    "three tiles a row": problem_of(
        300, 384, 72, "norm", "sum", alpha=2.0, gamma=0.25, activation="gelu", vectors="float32"
    ),
    "six, and axes before": problem_of(50, 768, 40, "norm", lead=(3,)),
    "codes and sum": problem_of(300, 512, 128, "codes", "sum", dtype="int8", codes="int8"),
}


@pytest.mark.parametrize("case", PLAYED)
@pytest.mark.parametrize("seed", range(3))
def test_roles_in_any_order_make_the_norm(
    case: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows beyond the last, several rounds of the blocks, one to four tiles to a row."""
    operands = operands_of(PLAYED[case], seed)
    assert_right(PLAYED[case], operands, ran(PLAYED[case], operands, monkeypatch, seed))


def test_a_large_mean_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deviations of 1 around 1,000: squares of sums would leave nothing of them in float32."""
    problem = problem_of(128, 256, 64, "norm", residual=False)
    operands = operands_of(problem, 0)
    assert operands[2] is not None
    operands[0], operands[2] = torch.zeros(128, 64).half(), 1000 + torch.randn(256)
    assert_right(problem, operands, ran(problem, operands, monkeypatch, 0))


def test_the_play_shows_tiles_that_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block's two consumers, of a row of four tiles: they would wait for ever."""
    problem = problem_of(128, 512, 64, "norm")
    run = functools.partial(gluon_roles.run, together=True)
    monkeypatch.setattr(kernel, "launch", lambda k, grid, *a, **c: run(k, (1,), *a, **c))
    operands = operands_of(problem, 0)
    constants = {i: operands[i] for i in problem.constant}
    call = kernel.bind(problem, constants)
    size = kernel.workspace_bytes(problem)
    with pytest.raises(gluon_roles.Deadlock):
        call(operands[0], operands[3], workspace=torch.zeros(size, dtype=torch.uint8))


@pytest.mark.parametrize("multiprocessors", [16, 78, 132])
@pytest.mark.parametrize(("m", "n"), [(1, 256), (1000, 768), (40000, 2048), (12288, 1024)])
def test_a_rows_tiles_are_the_same_blocks_in_every_round(
    m: int, n: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[int] = []
    monkeypatch.setattr(kernel, "launch", lambda kernel, grid, *a, **c: grids.append(*grid))
    monkeypatch.setattr(wgmma, "multiprocessors", lambda: multiprocessors)
    problem = problem_of(m, n, 64, "norm")
    if kernel.fits(problem) is not None:
        assert n // kernel.TILE > multiprocessors // kernel.LAUNCHES
        return
    operands = [
        None if t is None else torch.empty(t.shape, dtype=getattr(torch, t.dtype))
        for t in problem.inputs
    ]
    size = kernel.workspace_bytes(problem)
    constants = {i: operands[i] for i in problem.constant}
    call = kernel.bind(problem, constants)
    call(operands[0], operands[3], workspace=torch.empty(size, dtype=torch.uint8))
    (blocks,) = grids
    assert 0 < blocks <= multiprocessors
    assert blocks % (n // kernel.TILE) == 0


# --- compiled for a GPU that is not there ---------------------------------------------------------


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, problem in CASES.items():
        yield name, functools.partial(_compile, problem)


def _compile(problem: Problem) -> None:
    given = [
        None if m is None else torch.empty(m.shape, dtype=getattr(torch, m.dtype))
        for m in problem.inputs
    ]
    constants = {i: t for i, t in enumerate(given) if i in problem.constant and t is not None}
    call = kernel.bind(problem, constants)
    rest = [t for i, t in enumerate(given) if t is not None and i not in constants]
    size = kernel.workspace_bytes(problem)
    call(*rest, workspace=torch.empty(size, dtype=torch.uint8))


@functools.cache
def compiled() -> dict[str, list[dict[str, Any]]]:
    return compile_only.compile_all("tests.kernels.test_linear_norm_sm90:cases")


MULTIPLIES = {"float16": "HGMMA", "bfloat16": "HGMMA", "int8": "IGMMA", FP8: "QGMMA"}


@pytest.mark.parametrize("case", CASES)
def test_compiles_for_hopper(case: str) -> None:
    """Two consumers of four products each, one copy in for each factor and piece of a residual."""
    problem = CASES[case]
    (made,) = compiled()[case]
    per_step = 128 // 32  # of one consumer: a stage's 128 bytes along K
    copies_in = 2 + 2 * 2 * (problem.inputs[3] is not None)
    assert made["opcodes"][MULTIPLIES[problem.inputs[0].dtype]] == 2 * 2 * per_step
    assert made["opcodes"]["UTMALDG"] == copies_in
    assert made["opcodes"]["UTMASTG"] == 2 * 2 * len(problem.outputs)
    assert made["shared_bytes"] <= 227 * 1024
    # of two results Triton 3.9 spills some registers, once a tile
    later = tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6)
    assert made["spilled_bytes"] <= (128 if later and len(problem.outputs) > 1 else 0)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"n": 192}, "multiple of 128"),
        ({"n": 4096}, "up to 2048"),
        ({"dtype": "float32", "half": "float32"}, "16-bit"),
        ({"results": ("codes",), "residual": False}, "codes alone"),
        ({"half": "float32"}, "16-bit numbers"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], reason: str) -> None:
    case = {"n": 256, "results": ("norm",), **changed}
    problem = problem_of(64, case.pop("n"), 64, *case.pop("results"), **case)
    assert reason in (kernel.fits(problem) or "")


def test_fp8_that_is_summed_outside_the_tensor_cores_is_refused() -> None:
    problem = problem_of(64, 256, 64, "norm", dtype=FP8)
    slow = replace(problem, attrs={**problem.attrs, "fast_accumulation": False})
    assert kernel.fits(problem) is None
    assert "fast_accumulation" in (kernel.fits(slow) or "")


def test_results_that_lie_otherwise_are_refused() -> None:
    problem = problem_of(64, 256, 64, "norm", "sum")
    norm, total = problem.outputs
    for other in (replace(total, format="strided", strides=(512, 1)), meta("bfloat16", 64, 256)):
        assert "dense results" in (kernel.fits(replace(problem, outputs=(norm, other))) or "")


def test_every_case_fits() -> None:
    assert not [name for name, problem in {**CASES, **PLAYED}.items() if kernel.fits(problem)]
