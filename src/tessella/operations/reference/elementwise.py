"""Element-wise operations in plain torch; those of one tensor alone are torch's, named in the rows.

In the binary ones ``other`` is a tensor, or None when it is the number ``scalar``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tessella.operations.operation import Attributes, Operation, Shape, Shapes, row, shown

Tensor = torch.Tensor
Number = int | float


def _right(other: Tensor | None, scalar: Number | None) -> Tensor | Number:
    if other is not None:
        return other
    if scalar is None:
        raise TypeError("a binary operation needs a tensor or a scalar on its right")
    return scalar


def add(
    input: Tensor, other: Tensor | None = None, *, scalar: Number | None = None, alpha: Number = 1
) -> Tensor:
    """``input + alpha · other``."""
    return torch.add(input, _right(other, scalar), alpha=alpha)


def sub(
    input: Tensor, other: Tensor | None = None, *, scalar: Number | None = None, alpha: Number = 1
) -> Tensor:
    """``input − alpha · other``."""
    return torch.sub(input, _right(other, scalar), alpha=alpha)


def mul(input: Tensor, other: Tensor | None = None, *, scalar: Number | None = None) -> Tensor:
    return torch.mul(input, _right(other, scalar))


def div(input: Tensor, other: Tensor | None = None, *, scalar: Number | None = None) -> Tensor:
    """True division: integers give floating point."""
    return torch.div(input, _right(other, scalar))


def pow(input: Tensor, other: Tensor | None = None, *, scalar: Number | None = None) -> Tensor:
    """``input`` to the power ``other``."""
    return torch.pow(input, _right(other, scalar))


def maximum(input: Tensor, other: Tensor | None = None, *, scalar: Number | None = None) -> Tensor:
    return torch.maximum(input, _like(input, _right(other, scalar)))


def minimum(input: Tensor, other: Tensor | None = None, *, scalar: Number | None = None) -> Tensor:
    return torch.minimum(input, _like(input, _right(other, scalar)))


def _like(input: Tensor, other: Tensor | Number) -> Tensor:
    if isinstance(other, torch.Tensor):
        return other
    return torch.full((), other, dtype=input.dtype, device=input.device)


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(input, approximate=approximate)


def leaky_relu(input: Tensor, *, negative_slope: float) -> Tensor:
    return F.leaky_relu(input, negative_slope)


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """weight [1] or [C]."""
    return F.prelu(input, weight)


def elu(input: Tensor, *, alpha: float, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    """``scale · x`` where x > 0, else ``scale · alpha · (exp(input_scale · x) − 1)``."""
    return torch.where(input > 0, scale * input, scale * alpha * torch.expm1(input_scale * input))


def softplus(input: Tensor, *, beta: float, threshold: float) -> Tensor:
    return F.softplus(input, beta, threshold)


def clamp(input: Tensor, *, min: Number | None, max: Number | None) -> Tensor:
    return torch.clamp(input, min, max)


def _slope(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    """The slope of ``prelu`` is one number, or one a channel."""
    x, weight = shapes["input"], shapes["weight"]
    if math.prod(weight) == 1 or (len(x) > 1 and weight == (x[1],)):
        return None
    return f"weight has the shape {shown(weight)} for an input {shown(x)}"


def _unary(reference: Callable[..., Tensor], attributes: str = "") -> Operation:
    overload = f"{reference.__name__}.default"
    return row(reference, "input", attributes, aten=overload, elementwise=True)


def _of_torch(function: Callable[..., Tensor]) -> Operation:
    """A function of one tensor, without what else torch's takes, such as ``inplace``."""

    def reference(input: Tensor) -> Tensor:
        return function(input)

    reference.__name__ = function.__name__
    return _unary(reference)


def _binary(reference: Callable[..., Tensor], attributes: str = "") -> Operation:
    """``other`` is left out where it is the number ``scalar``."""
    return row(reference, "input other?", f"scalar {attributes}", elementwise=True)


_OF_TORCH: tuple[Callable[..., Tensor], ...] = (
    F.relu, F.relu6, torch.sigmoid, torch.tanh, F.silu, F.hardswish, F.hardsigmoid, F.mish,
    torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.neg, torch.abs,
    torch.erf, torch.sin, torch.cos,
)  # fmt: skip

ROWS = (
    *map(_of_torch, _OF_TORCH),
    _unary(gelu, "approximate"),
    _unary(leaky_relu, "negative_slope"),
    _unary(elu, "alpha scale input_scale"),
    _unary(softplus, "beta threshold"),
    _unary(clamp, "min max"),
    row(prelu, "input weight", aten="prelu.default", rule=_slope),
    _binary(add, "alpha"),
    _binary(sub, "alpha"),
    *map(_binary, (mul, div, pow, maximum, minimum)),
)
