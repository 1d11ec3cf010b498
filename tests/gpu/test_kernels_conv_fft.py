"""Convolution by Fourier transforms on a Hopper GPU: right on every shape it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessella.kernels import catalog
from tests.support.problems.convolutions import Case, draw, run
from tests.support.problems.fourier import BOTH, CASES, EPILOGUE, LAST, TILES, assert_right

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

SHAPES = {
    "layer": Case(x=(2, 64, 30, 33), w=(72, 64, 3, 3), padding=1, bias="float32"),
    "5x5": Case(x=(3, 40, 37, 35), w=(96, 40, 5, 5), padding=2, residual=True, activation="relu"),
    "11x11": Case(x=(1, 33, 67, 61), w=(64, 33, 11, 11), padding=5, activation="gelu", **EPILOGUE),
    "strided": Case(x=(20, 32, 41, 29), w=(40, 32, 7, 5), stride=2, padding=(3, 2), scale=True),
    "dilated": Case(x=(2, 48, 39, 40), w=(33, 48, 3, 5), dilation=(4, 3), padding=4),
    "table": Case(x=(1, 128, 128, 128), w=(128, 128, 11, 11), padding=5),
}


def typed(case: Case, dtype: str) -> Case:
    if dtype == "tf32":
        return replace(case, math="tf32")
    return replace(case, dtype=dtype)


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_cases_of_the_interpreter(row: catalog.Kernel, name: str) -> None:
    case = CASES[name]
    for integers in (False, True):
        config = row.configs(case.problem)[0]
        assert_right(row, case, config, "cuda", integers=integers)


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_configuration(row: catalog.Kernel, name: str, dtype: str) -> None:
    """Those that find would try, in both formats, of a constant weight and of an argument."""
    for layout, constant in (("contiguous", True), (LAST, False)):
        case = replace(typed(SHAPES[name], dtype), x_format=layout, constant=constant)
        for config in row.configs(case.problem)[:2]:
            assert_right(row, case, config, "cuda", integers=constant, seed=3)


@pytest.mark.parametrize("side", [1, 2, 3, 4, 7, 10, 16, 25, 31])
def test_every_tile(side: int) -> None:
    case = Case(x=(1, 16, 45, 50), w=(16, 16, side, side), padding=side // 2)
    for tile in range(max(8, side + side % 2), 33, 2):
        config = {"tile": tile, "block_k": 64, "block_m": 32}
        assert_right(TILES, case, config, "cuda")


@BOTH
def test_the_same_every_time(row: catalog.Kernel) -> None:
    case = SHAPES["5x5"]
    operands = draw(case, "cuda")
    first = run(row, case, operands)
    for _ in range(5):
        assert torch.equal(first, run(row, case, operands))


@BOTH
def test_runs_in_a_graph(row: catalog.Kernel) -> None:
    """Captured at once, with the weight as an argument, replayed on new values."""
    case = Case(x=(2, 9, 30, 31), w=(8, 9, 5, 5), padding=2, constant=False)
    problem = case.problem
    config = row.configs(problem)[0]
    x, w = (t for t in draw(case, "cuda") if t is not None)
    nbytes = row.workspace_bytes(problem, config)
    workspace = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    out = problem.output.empty(x.device)
    call = row.load().bind(problem, {}, **config)
    call(x, w, out=out, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(x, w, out=out, workspace=workspace)
    x.copy_(torch.randn_like(x))
    w.copy_(torch.randn_like(w))
    graph.replay()
    again = torch.conv2d(x.double(), w.double(), None, 1, 2)
    assert float((out - again).abs().max() / again.abs().max()) < 2e-6
