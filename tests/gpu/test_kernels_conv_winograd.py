"""Winograd convolution on a GPU, against float64: every configuration, odd shapes, both formats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.kernels import catalog
from tests.support.problems.convolutions import Case, draw, right, run
from tests.support.problems.winograd import CASES, FUSED, LAST, PLAIN, STEPS, WHOLE, assert_right

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TYPES: dict[str, dict[str, Any]] = {
    "float32": {}, "tf32": {"math": "tf32"}, "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
}  # fmt: skip
SHAPES = {
    "square": Case(x=(1, 64, 30, 30), w=(96, 64, 3, 3), padding=1),
    "odd": Case(x=(3, 37, 17, 23), w=(41, 37, 3, 3), padding=(0, 2), bias="float32"),
    "deep": Case(x=(2, 300, 7, 7), w=(130, 300, 3, 3), padding=1, constant=False),
    "thin": Case(x=(2, 3, 40, 5), w=(20, 3, 3, 3), padding=1, activation="gelu", **WHOLE),
}
ROWS = pytest.mark.parametrize("row", [FUSED, STEPS], ids=lambda row: row.algorithm)


def some(row: catalog.Kernel, case: Case) -> list[dict[str, Any]]:
    """Two configurations, others for other problems: each costs compilations."""
    configs = row.configs(case.problem)
    first = sum(case.x) + sum(case.w)
    return [configs[(first + 3 * i) % len(configs)] for i in range(min(2, len(configs)))]


@ROWS
@pytest.mark.parametrize("x_format", ["contiguous", LAST])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_float64(row: catalog.Kernel, shape: str, dtype: str, x_format: Any) -> None:
    case = replace(SHAPES[shape], x_format=x_format, **TYPES[dtype])
    for seed, config in enumerate(some(row, case)):
        assert_right(row, case, config, "cuda", seed)


@ROWS
@pytest.mark.parametrize("name", CASES)
def test_small_cases(row: catalog.Kernel, name: str) -> None:
    case = CASES[name]
    assert_right(row, case, row.configs(case.problem)[0], "cuda")


@pytest.mark.parametrize("dtype", ["float32", "tf32", "float16"])
@pytest.mark.parametrize("x_format", ["contiguous", LAST])
def test_small_integers_are_exact_in_f23(dtype: str, x_format: Any) -> None:
    case = replace(SHAPES["square"], x_format=x_format, out="float32", **TYPES[dtype])
    operands = draw(case, "cuda", integers=True)
    expected = right(case, operands)
    exact = [(FUSED, config) for config in FUSED.configs(case.problem)]
    exact += [(STEPS, c) for c in STEPS.configs(case.problem) if c["tile"] == 2]
    for row, config in exact:
        assert torch.equal(run(row, case, operands, config).double(), expected), config


@ROWS
def test_repeats_bit_for_bit_in_a_graph(row: catalog.Kernel) -> None:
    case = replace(SHAPES["square"], constant=False)
    problem, operands = case.problem, draw(case, "cuda")
    config = row.configs(problem)[0]
    inputs = [t for t in operands if t is not None]
    out = problem.output.empty(torch.device("cuda"))
    nbytes = row.workspace_bytes(problem, config)
    workspace = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    call = row.load().bind(problem, {}, **config)
    call(*inputs, out=out, workspace=workspace)
    first = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(*inputs, out=out, workspace=workspace)
    for _ in range(5):
        out.fill_(float("nan"))
        workspace.fill_(255)
        graph.replay()
        assert torch.equal(out, first)


def test_large_numbers_stay_finite_in_float16() -> None:
    # a tenth of the largest number, times the transform's gain below ten
    case = replace(PLAIN, dtype="float16", out="float32")
    for row in (FUSED, STEPS):
        operands = draw(case, "cuda")
        operands[0].clamp_(-1, 1).mul_(6500)
        for config in row.configs(case.problem):
            assert torch.isfinite(run(row, case, operands, config)).all(), config
