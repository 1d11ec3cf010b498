"""Quantization in plain torch, as ONNX defines it.

The scale is one number, or one for each position on ``axis``; so is the zero point, which fp8 does
not have.
"""

from __future__ import annotations

import math

import torch

from tessella.operations.epilogue import store
from tessella.operations.operation import Attributes, Shape, Shapes, row, shown

Tensor = torch.Tensor


def quantize(
    input: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int, dtype: str
) -> Tensor:
    """``store(input / scale + zero_point)``: half to even before the zero point, then saturated."""
    stored = getattr(torch, dtype)
    if input.is_meta:
        return _shaped(input, scale, zero_point, axis, stored)
    scaled = input.to(scale.dtype) / along(scale, input, axis)
    if stored.is_floating_point:
        return store(scaled, stored)
    scaled = scaled.round()
    if zero_point is not None:
        scaled = scaled + along(zero_point, input, axis).to(scaled.dtype)
    return store(scaled, stored)


def dequantize(
    input: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int, dtype: str
) -> Tensor:
    """``(input − zero_point) · scale`` as ``dtype``."""
    if input.is_meta:
        return _shaped(input, scale, zero_point, axis, getattr(torch, dtype))
    numbers = input.to(scale.dtype)
    if zero_point is not None:
        numbers = numbers - along(zero_point, input, axis).to(scale.dtype)
    return (numbers * along(scale, input, axis)).to(getattr(torch, dtype))


def quantize_weight(weight: Tensor, *, dtype: str, limit: float) -> tuple[Tensor, Tensor]:
    """A weight [K, …] quantized, and the scale of each of its K output channels, float32.

    Compiling and quantization-aware training round weights by this one function.

    Args:
        limit: the magnitude that the largest weight of a channel becomes.
    """
    weight = weight.detach()
    largest = weight.flatten(1).abs().amax(1).double()
    scale = (largest / limit).float()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return quantize(weight, scale, axis=0, dtype=dtype), scale


def _shaped(
    input: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, dtype: torch.dtype
) -> Tensor:
    """The result without numbers. One of the vectors may be a single number, the other not."""
    for vector in (scale, zero_point):
        if vector is not None and tuple(vector.shape) not in ((), (1,), (input.shape[axis],)):
            raise ValueError(f"{tuple(vector.shape)} numbers for axis {axis} of {input.shape}")
    return torch.empty(input.shape, dtype=dtype, device="meta")


def along(vector: Tensor, x: Tensor, axis: int) -> Tensor:
    """A vector as a view that broadcasts along ``axis`` of ``x``; one number as it is."""
    if vector.numel() == 1:
        return vector.reshape(())
    return vector.view(-1, *(1,) * (x.dim() - 1 - axis % x.dim()))


def _vectors(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    """A scale and a zero point: one number each, or one for each place on ``axis``."""
    x, axis = shapes["input"], attrs.get("axis", 0)
    for name in ("scale", "zero_point"):
        if name not in shapes or math.prod(shapes[name]) == 1:
            continue
        if type(axis) is not int or not -len(x) <= axis < len(x) or shapes[name] != (x[axis],):
            return f"{name} has the shape {shown(shapes[name])} along axis {axis} of {shown(x)}"
    return None


ROWS = (
    row(quantize, "input scale zero_point?", "axis dtype", rule=_vectors),
    row(dequantize, "input scale zero_point?", "axis dtype", rule=_vectors),
)
