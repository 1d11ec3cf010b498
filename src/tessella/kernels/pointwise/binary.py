"""Two operands, element by element with broadcasting: torch's, written into the given buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    function = _function(problem.op, problem.attrs.get("alpha", 1))
    if problem.get("other") is None:
        scalar = problem.attrs["scalar"]
        return lambda x, *, out: function(x, scalar, out=out)
    if 0 in constants:
        left = constants[0]
        return lambda y, *, out: function(left, y, out=out)
    if 1 in constants:
        right = constants[1]
        return lambda x, *, out: function(x, right, out=out)
    return function


def _function(op: str, alpha: float) -> Callable[..., Any]:
    if alpha == 1:
        functions: dict[str, Callable[..., Any]] = {
            "add": torch.add,
            "sub": torch.sub,
            "mul": torch.mul,
            "div": torch.div,
            "pow": torch.pow,
        }
        return functions[op]
    plain = {"add": torch.add, "sub": torch.sub}[op]
    return lambda x, y, *, out: plain(x, y, alpha=alpha, out=out)
