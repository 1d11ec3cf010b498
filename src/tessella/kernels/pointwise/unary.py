"""One tensor in, one out, element by element: torch's, written into the given buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tessella.kernels.catalog import Call
from tessella.kernels.problem import Problem

WRITES_OUT = True
SLICED_OUT = True
IN_PLACE = True

aten = torch.ops.aten

# operation → function(x, *, out); the ones with settings are in ``bind``.
# torch.clamp_min for relu: aten::relu.out computes elsewhere and copies.
OUT: dict[str, Callable[..., Any]] = {
    "relu": lambda x, *, out: torch.clamp_min(x, 0, out=out),
    "relu6": lambda x, *, out: torch.clamp(x, 0, 6, out=out),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": aten.silu.out,
    "gelu": aten.gelu.out,
    "gelu_tanh": lambda x, *, out: aten.gelu.out(x, approximate="tanh", out=out),
    "hardswish": aten.hardswish.out,
    "hardsigmoid": aten.hardsigmoid.out,
    "mish": aten.mish.out,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "neg": torch.neg,
    "abs": torch.abs,
    "erf": torch.erf,
}


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
