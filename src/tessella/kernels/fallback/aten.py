"""fallback.aten: a torch operator without an operation of ours, called through the dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem
from tessella.operations.torch_operators.arguments import arguments
from tessella.operations.torch_operators.operators import resolve, unfit


def fits(problem: Problem) -> str | None:
    if problem.op != "fallback":
        return "runs the operation fallback only"
    target, args, kwargs = (problem.attrs.get(name) for name in ("target", "args", "kwargs"))
    return unfit(str(target), args, kwargs, problem.inputs)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    """A function of the inputs that are not constant, in order."""
    target, args, kwargs = (problem.attrs[name] for name in ("target", "args", "kwargs"))
    function = resolve(target, args, kwargs, problem.inputs)

    def run(*tensors: torch.Tensor) -> Any:
        operands = problem.operands(constants, tensors)
        filled_args, filled_kwargs = arguments(args, kwargs, operands)
        return function(*filled_args, **filled_kwargs)

    return run
