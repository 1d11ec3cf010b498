"""A product and the norm of its rows as one Hopper kernel: compiled, and played on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from tessella.kernels.gemm import normed as kernel
from tessella.operations.problem import Problem
from tests.support.emulators import gluon_roles
from tests.support.kernels import compile_only
from tests.support.problems.normed_products import (
    CASES,
    FP8,
    exact,
    meta,
    operands_of,
    problem_of,
    results,
)


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
    monkeypatch.setattr(kernel, "multiprocessors", lambda: 7)
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
    "codes": problem_of(390, 256, 128, "codes", "norm", dtype="int8", quantized="int8"),
    "three tiles a row": problem_of(
        300, 384, 72, "norm", "sum", alpha=2.0, gamma=0.25, activation="gelu", vectors="float32"
    ),
    "six, and axes before": problem_of(50, 768, 40, "norm", lead=(3,)),
    "codes and sum": problem_of(300, 512, 128, "codes", "sum", dtype="int8", quantized="int8"),
}


@pytest.mark.parametrize("case", PLAYED)
@pytest.mark.parametrize("seed", range(3))
def test_roles_in_any_order_make_the_norm(
    case: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows beyond the last, several rounds of the blocks, one to four tiles to a row."""
    operands = operands_of(PLAYED[case], seed)
    assert_right(PLAYED[case], operands, ran(PLAYED[case], operands, monkeypatch, seed))


def test_a_residual_that_counts_for_nothing_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(200, 128, 128, "norm", beta=0.0)
    operands = operands_of(problem, 0)
    residual = operands[3]
    assert residual is not None
    unread = [*operands[:3], torch.full_like(residual, torch.nan), *operands[4:]]
    assert_right(problem, operands, ran(problem, unread, monkeypatch, 0))


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
    monkeypatch.setattr(kernel, "multiprocessors", lambda: multiprocessors)
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
    return compile_only.compile_all("tests.kernels.gemm.test_linear_norm_sm90:cases")


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
        ({"results": ("codes",), "residual": False}, "quantized values alone"),
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
