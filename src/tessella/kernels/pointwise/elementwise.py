"""One operand or two, element by element with broadcasting: torch's, into the given buffer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tessella.kernels.catalog import Call
from tessella.operations.epilogue import OUT
from tessella.operations.problem import Problem

aten = torch.ops.aten

BINARY: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
}


def fits(problem: Problem) -> str | None:
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    return _of_two(problem, constants) if problem.op in BINARY else _of_one(problem)


def _of_one(problem: Problem) -> Call:
    a = problem.attrs
    if problem.op == "gelu" and a.get("approximate", "none") == "tanh":
        return OUT["gelu_tanh"]
    if problem.op == "leaky_relu":
        slope = a["negative_slope"]
        return lambda x, *, out: aten.leaky_relu.out(x, slope, out=out)
    if problem.op == "elu":
        alpha, scale, input_scale = a["alpha"], a.get("scale", 1.0), a.get("input_scale", 1.0)
        return lambda x, *, out: aten.elu.out(x, alpha, scale, input_scale, out=out)
    if problem.op == "clamp":
        low, high = a["min"], a["max"]
        return lambda x, *, out: torch.clamp(x, low, high, out=out)
    return OUT[problem.op]


def _of_two(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    function = BINARY[problem.op]
    if (alpha := problem.attrs.get("alpha", 1)) != 1:
        function = functools.partial(function, alpha=alpha)
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
