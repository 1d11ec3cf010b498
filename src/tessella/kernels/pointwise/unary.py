"""One tensor in, one out, element by element: torch's, written into the given buffer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.operations.epilogue import OUT
from tessella.operations.problem import Problem

aten = torch.ops.aten


def fits(problem: Problem) -> str | None:
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
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
