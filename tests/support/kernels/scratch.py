"""A kernel with everything that a kernel may have: configurations, a workspace, an out buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tessella.kernels.catalog import Call, Config, Kernel
from tessella.operations.epilogue import finish_
from tessella.operations.problem import Problem

ROW = Kernel(id="linear.scratch", op="linear", module=__name__, targets=("cpu",), source="tessella")


def fits(problem: Problem) -> str | None:
    return None if problem.inputs[0].dtype == "float32" else "float32 only"


def configs(problem: Problem) -> tuple[Config, ...]:
    return ({"pieces": 1}, {"pieces": 2}, {"pieces": 3})


def workspace_bytes(problem: Problem, *, pieces: int) -> int:
    return 4 * pieces * problem.output.shape[0] * problem.output.shape[1]


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], *, pieces: int) -> Call:
    """Sums of products over ``pieces`` parts of K, each in the workspace, then added up."""
    if pieces == 3:
        raise ValueError("three is one too many")

    def linear(*inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor) -> Any:
        x, weight, bias, residual = [*problem.operands(constants, inputs), None, None][:4]
        parts = workspace.view(torch.float32).view(pieces, *out.shape)
        for part, xs, ws in zip(parts, x.chunk(pieces, 1), weight.chunk(pieces, 1), strict=True):
            torch.mm(xs, ws.t(), out=part)
        torch.sum(parts, 0, out=out)
        return finish_(out, problem.epilogue.of(bias, residual))

    return linear
