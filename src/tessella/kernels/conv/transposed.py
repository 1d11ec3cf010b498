"""Transposed convolutions whose windows do not overlap: each pixel becomes a block of pixels.

That is a product of pixels by taps and channels, stored where each tap's pixel lies. In plain
Triton, of channels_last tensors; the result may be part of a concatenation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.dtype import FLOATS
from tessella.core.integers import ceil_div, power_of_two
from tessella.device.launch import launch
from tessella.device.overlap import await_earlier, overlapping
from tessella.device.packing import with_packed
from tessella.kernels.catalog import Call, Config
from tessella.kernels.epilogue.triton_device import cast
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

MAX_ELEMENTS = 2**31 - 1  # offsets have 32 bits


def fits(problem: Problem) -> str | None:
    x, weight, attrs, out = problem["input"], problem["weight"], problem.attrs, problem.output
    if tuple(attrs["stride"]) != weight.shape[2:]:
        return "windows overlap, or leave gaps"
    if any(attrs["padding"]) or any(attrs["output_padding"]) or attrs["groups"] != 1:
        return "no padding, and one group"
    if any(step != 1 and taps > 1 for step, taps in zip(attrs["dilation"], weight.shape[2:])):
        return "no dilation"
    if x.dtype not in FLOATS or {x.dtype, weight.dtype} != {out.dtype}:
        return "one element type of 16 or 32 bits"
    if not problem.is_constant("weight"):
        return "the weight must be a constant: it is packed once"
    if not x.has("channels_last") or not _lies_by_pixels(out):
        return "needs channels_last"
    if 0 in (*x.shape, *out.shape):
        return "empty"
    if max(math.prod(x.shape), out.extent // out.itemsize) > MAX_ELEMENTS:
        return "indices have 32 bits"
    return None


def _lies_by_pixels(out: TensorMeta) -> bool:
    """Whether it is channels_last, or a slice of the channels of such a tensor."""
    if out.has("channels_last"):
        return True
    return out.strides is not None and out.strides[1] == 1


def configs(problem: Problem) -> tuple[Config, ...]:
    """Pixels, and taps by channels, of a tile; channels of a step."""
    x, weight = problem["input"], problem["weight"]
    columns = max(16, power_of_two(math.prod(weight.shape[1:])))
    depth = max(16, min(64, power_of_two(x.shape[1])))
    depth = min(depth, 32) if x.itemsize == 4 else depth
    found: tuple[tuple[int, int, int], ...]
    found = ((128, 128, 4), (128, 256, 8), (64, 128, 4), (128, 64, 4), (64, 64, 4))
    if x.dtype == "float32" and problem.math == "ieee":  # sums of larger tiles spill
        found = ((64, 64, 4), (128, 64, 8), (64, 64, 8))
    tiles = [(p, min(c, columns), w) for p, c, w in found]
    return tuple({"pixels": p, "columns": c, "depth": depth, "warps": w}
                 for p, c, w in dict.fromkeys(tiles))  # fmt: skip


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    x, weight = problem["input"], problem["weight"]
    images, channels = x.shape[:2]
    sides, taps = _three(x.shape[2:]), _three(weight.shape[2:])
    pixels, columns = images * math.prod(sides), math.prod(weight.shape[1:])
    held = with_packed(constants, ("conv_transpose.spread",), _taps_innermost)
    grid = (ceil_div(pixels, tile["pixels"]) * ceil_div(columns, tile["columns"]),)

    def spread(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        x, weight, bias = (*problem.operands(held, inputs), None)[:3]
        first, *rest = out.stride(0), *out.stride()[2:]
        launch(
            spread_kernel, grid,
            x, weight, out, bias, pixels, columns,
            SIDES=sides, TAPS=taps, STRIDES=(first, *(0,) * (3 - len(rest)), *rest),
            CHANNELS=channels, FILTERS=problem["weight"].shape[1],
            PIXELS=tile["pixels"], COLUMNS=tile["columns"], DEPTH=tile["depth"],
            PRECISION=problem.math if problem["input"].dtype == "float32" else "ieee",
            num_warps=tile["warps"], num_stages=3, **overlapping(),
        )  # fmt: skip
        return out

    return spread


def _three(values: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * (3 - len(values)) + tuple(values)


def _taps_innermost(weight: torch.Tensor) -> torch.Tensor:
    """[C, K, …] → [C, taps · K]: a pixel's channels lie together in the result."""
    channels, filters = weight.shape[:2]
    return weight.reshape(channels, filters, -1).transpose(1, 2).reshape(channels, -1).contiguous()


@triton.jit
def spread_kernel(
    x_pointer, weight_pointer, out_pointer, bias_pointer, pixels, columns,
    SIDES: tl.constexpr, TAPS: tl.constexpr, STRIDES: tl.constexpr,
    CHANNELS: tl.constexpr, FILTERS: tl.constexpr,
    PIXELS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some pixels [pixels, CHANNELS] by some columns of the weight [CHANNELS, columns].

    Args:
        columns: taps · FILTERS.
        SIDES: of the image, TAPS of the window: depth, height, width.
        STRIDES: of the result, from image to image, and along the three.
    """
    await_earlier(OVERLAP)
    across = tl.cdiv(columns, COLUMNS)
    pixel = (tl.program_id(0) // across) * PIXELS + tl.arange(0, PIXELS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros([PIXELS, COLUMNS], tl.float32)
    for first in range(0, CHANNELS, DEPTH):
        channel = first + depth
        x = tl.load(
            x_pointer + pixel[:, None] * CHANNELS + channel[None, :],
            mask=(pixel < pixels)[:, None] & (channel < CHANNELS)[None, :], other=0.0,
        )  # fmt: skip
        weight = tl.load(
            weight_pointer + channel[:, None] * columns + column[None, :],
            mask=(channel < CHANNELS)[:, None] & (column < columns)[None, :], other=0.0,
        )  # fmt: skip
        sums = tl.dot(x, weight, sums, input_precision=PRECISION)
    tap, filter = column // FILTERS, column % FILTERS
    if bias_pointer is not None:
        bias = tl.load(bias_pointer + filter, mask=column < columns, other=0.0)
        sums += bias.to(tl.float32)[None, :]
    w, rest = pixel % SIDES[2], pixel // SIDES[2]
    h, rest = rest % SIDES[1], rest // SIDES[1]
    row = (
        rest // SIDES[0] * STRIDES[0] + rest % SIDES[0] * (TAPS[0] * STRIDES[1])
        + h * (TAPS[1] * STRIDES[2]) + w * (TAPS[2] * STRIDES[3])
    )  # fmt: skip
    at = (
        tap // (TAPS[1] * TAPS[2]) * STRIDES[1] + tap // TAPS[2] % TAPS[1] * STRIDES[2]
        + tap % TAPS[2] * STRIDES[3] + filter
    )  # fmt: skip
    made = cast(sums, out_pointer.dtype.element_ty)
    there = (pixel < pixels)[:, None] & (column < columns)[None, :]
    tl.store(out_pointer + row[:, None] + at[None, :], made, mask=there)
