"""A kernel of the catalog: softmax over the last axis in three operations on the result's memory.

docs/add-a-kernel.md explains it; tests/examples/test_adding.py runs it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call, Kernel
from tessella.operations.problem import Problem

# The row in kernels/catalog.py.
ROW = Kernel(
    id="softmax.three_steps",
    op="softmax",
    module="examples.adding.kernel",
    targets=("cpu",),
    source="tessella",
)


def fits(problem: Problem) -> str | None:
    x, y = problem["input"], problem.output
    if (x.dtype, y.dtype) != ("float32", "float32"):
        return f"makes float32 of float32, not {y.dtype} of {x.dtype}"
    if (x.format, y.format) != ("contiguous", "contiguous"):
        return "reads and makes contiguous tensors"
    if problem.attrs["dim"] not in (-1, len(x.shape) - 1):
        return f"works along the last axis, not along {problem.attrs['dim']}"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    def run(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        torch.sub(x, x.amax(-1, keepdim=True), out=out)
        return out.exp_().div_(out.sum(-1, keepdim=True))

    return run
