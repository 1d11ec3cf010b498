"""user.operator: a step of a plan that runs an operator of a user's own, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem
from tessella.operations.torch_operators.arguments import arguments
from tessella.operations.user_operators import named


def fits(problem: Problem) -> str | None:
    if problem.op != "user":
        return "runs the operation user only"
    named(problem.attrs["target"])
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    """A function of the inputs that are not constant, in order."""
    operator = named(problem.attrs["target"])
    args = problem.attrs["args"]

    def run(*tensors: torch.Tensor) -> Any:
        return operator.run(*arguments(args, {}, problem.operands(constants, tensors))[0])

    return run
