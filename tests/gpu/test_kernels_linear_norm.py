"""A product and the norm of its rows as one kernel, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from tessella.device.streams import capturing
from tessella.kernels.gemm import normed as kernel
from tessella.operations.problem import Problem
from tests.support.problems.normed_products import (
    CASES,
    FP8,
    exact,
    operands_of,
    problem_of,
    results,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

SHAPES: dict[str, Problem] = {
    **CASES,
    "one row": problem_of(1, 1024, 1024, "norm"),
    "many rounds": problem_of(12288, 1024, 1024, "codes", "norm", dtype=FP8),
    "sixteen tiles a row": problem_of(3000, 2048, 512, "norm", "sum"),
}
# of the largest value; quantized values in steps
TOLERANCE = {"float16": 3e-3, "bfloat16": 2e-2, "int8": 0.52, FP8: 0.08}


def bound(problem: Problem):  # type: ignore[no-untyped-def]
    operands = [None if t is None else t.cuda() for t in operands_of(problem, 0)]
    constants = {i: t for i, t in enumerate(operands) if i in problem.constant and t is not None}
    rest = [t for i, t in enumerate(operands) if i not in constants and t is not None]
    call = kernel.bind(problem, constants)
    size = kernel.workspace_bytes(problem)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")  # NaN
    return operands, lambda: results(call(*rest, workspace=workspace))


@pytest.mark.parametrize("case", SHAPES)
def test_against_float64_and_itself(case: str) -> None:
    problem = SHAPES[case]
    operands, run = bound(problem)
    first = run()
    right = exact(problem, operands)
    for name, meta, made in zip(problem.attrs["results"], problem.outputs, first, strict=True):
        off = float((made.double() - right[name]).abs().max())
        allowed = TOLERANCE[meta.dtype]
        if meta.dtype != "int8":
            allowed *= float(right[name].abs().max())
        assert off <= allowed, (name, off, allowed)
    for _ in range(20):
        for one, again in zip(first, run(), strict=True):
            assert torch.equal(one.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.timeout(60)
def test_two_streams_at_a_time() -> None:
    """Both kernels' blocks want all multiprocessors, and wait for blocks of their own."""
    pairs = [bound(SHAPES["many rounds"]) for _ in range(2)]
    right = [[t.clone() for t in run()] for _, run in pairs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in pairs]
    made: list[list[tuple[torch.Tensor, ...]]] = [[], []]
    for _ in range(30):
        for kept, stream, (_, run) in zip(made, streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                kept.append(run())
    torch.cuda.synchronize()
    for kept, same in zip(made, right, strict=True):
        for result in kept:
            for one, expected in zip(result, same, strict=True):
                assert torch.equal(one.view(torch.uint8), expected.view(torch.uint8))


def test_one_after_another_in_a_graph() -> None:
    """Launches that share counters and workspace, each told to start early."""
    _, run = bound(SHAPES["BERT fp8"])
    right = [t.clone() for t in run()]
    with torch.inference_mode(), capturing() as graph:
        made = [run() for _ in range(5)]
    for _ in range(20):
        for result in made:
            for one in result:
                one.view(torch.uint8).fill_(0x7F)
        graph.replay()
        for result in made:
            for one, expected in zip(result, right, strict=True):
                assert torch.equal(one.view(torch.uint8), expected.view(torch.uint8))
