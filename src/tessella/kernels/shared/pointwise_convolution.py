"""A 1×1 convolution as the matrix product that it is: pixels × channels times channels × filters.

In channels_last nothing moves: the product's operands are views of the convolution's.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta


def refusal(problem: Problem) -> str | None:
    """Why a convolution is no matrix product of its tensors as they lie, or None."""
    x, weight = problem["input"], problem["weight"]
    if why := window_refusal(problem):
        return why
    pixels = (x, problem.output, problem.epilogue.residual)
    if not all(meta is None or meta.has("channels_last") for meta in pixels):
        return "input, output and residual must be channels_last"
    if weight.format == "strided":
        return "the weight must be dense"
    return "empty" if 0 in x.shape else None


def window_refusal(problem: Problem) -> str | None:
    """Why a result's pixel is not made of the one pixel at the same place, or None."""
    a = problem.attrs
    if len(problem["input"].shape) != 4 or problem["weight"].shape[2:] != (1, 1):
        return "1×1 filters only"
    if tuple(a["stride"]) != (1, 1) or tuple(a["padding"]) != (0, 0) or a["groups"] != 1:
        return "no stride, padding or groups: they are no part of a matrix product"
    return None


def linear_of(problem: Problem) -> Problem:
    """The same numbers as ``linear``: [pixels, C] × [K, C] → [pixels, K]."""
    weight, epilogue = problem["weight"], problem.epilogue
    keep = ("activation", "alpha", "beta", "gamma", "floor", "fast_accumulation", "sparsity")
    return Problem(
        op="linear",
        inputs=(
            _rows_of(problem["input"]),
            TensorMeta(shape=weight.shape[:2], dtype=weight.dtype),
            epilogue.bias,
            None if epilogue.residual is None else _rows_of(epilogue.residual),
            epilogue.scale,
        ),
        outputs=(_rows_of(problem.output),),
        attrs={name: value for name, value in problem.attrs.items() if name in keep},
        constant=problem.constant,
        math=problem.math,
    )


def _rows_of(meta: TensorMeta) -> TensorMeta:
    """The pixels of an image as rows of a matrix."""
    n, channels, *spatial = meta.shape
    return replace(meta, shape=(n * math.prod(spatial), channels), format="contiguous")


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """The view [pixels, C] of an image or [K, C] of a weight; a vector stays as it is."""
    if tensor.dim() != 4:
        return tensor
    return tensor.permute(0, 2, 3, 1).reshape(-1, tensor.shape[1])
