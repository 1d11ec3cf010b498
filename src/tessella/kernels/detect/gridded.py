"""``aten::grid_sampler_2d`` on a GPU, bilinear: places of a result a block, channel by channel.

In plain Triton; places and sums are in float32, also where torch's own kernel has them in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.dtype import FLOATS
from tessella.device.launch import launch
from tessella.device.overlap import await_earlier, overlapping
from tessella.kernels.catalog import Call, Config
from tessella.kernels.epilogue.triton_device import cast
from tessella.operations.problem import Problem

MAX_ELEMENTS = 2**31 - 1  # offsets have 32 bits
TARGETS = ("aten::grid_sampler_2d", "aten::grid_sampler")
BILINEAR, ZEROS, BORDER = 0, 0, 1  # torch's numbers of its modes


@triton.jit
def _place(told, length, BORDER: tl.constexpr, ALIGN: tl.constexpr):
    """Where a number from -1 to 1 lies among so many pixels."""
    at = (told + 1.0) / 2.0 * (length - 1.0) if ALIGN else ((told + 1.0) * length - 1.0) / 2.0
    return tl.minimum(tl.maximum(at, 0.0), length - 1.0) if BORDER else at


@triton.jit
def grid_kernel(
    x, grid, out, places, height, width, channels, strides,
    BORDER: tl.constexpr, ALIGN: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """``strides`` are x's, of images, channels, rows and columns."""
    await_earlier(OVERLAP)
    image = tl.program_id(2)
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    inside = place < places
    told = grid + (image * places + place) * 2
    wide, tall = width.to(tl.float32), height.to(tl.float32)
    column = _place(tl.load(told, mask=inside, other=0).to(tl.float32), wide, BORDER, ALIGN)
    row = _place(tl.load(told + 1, mask=inside, other=0).to(tl.float32), tall, BORDER, ALIGN)
    left, top = tl.floor(column), tl.floor(row)
    right, low = column - left, row - top
    s_image, s_channel, s_row, s_column = strides
    first = tl.program_id(1) * CHANNELS
    for channel in range(first, tl.minimum(first + CHANNELS, channels)):
        map = x + image * s_image + channel * s_channel
        total = tl.zeros((PLACES,), tl.float32)
        for down in tl.static_range(2):
            for across in tl.static_range(2):
                r, c = top + down, left + across
                known = inside & (r >= 0) & (r < tall) & (c >= 0) & (c < wide)
                at = tl.where(known, r, 0.0).to(tl.int32) * s_row
                at += tl.where(known, c, 0.0).to(tl.int32) * s_column
                share = (low if down else 1.0 - low) * (right if across else 1.0 - right)
                seen = tl.load(map + at, mask=known, other=0).to(tl.float32)
                total += tl.where(known, seen * share, 0.0)
        into = out + (image * channels + channel) * places + place
        tl.store(into, cast(total, out.dtype.element_ty), mask=inside)


def fits(problem: Problem) -> str | None:
    if problem.attrs.get("target") not in TARGETS:
        return "only the operator aten::grid_sampler_2d"
    if problem.constant or len(problem.inputs) != 2:
        return "what is looked at, and where, is computed"
    x, grid = problem.given[:2]
    if len(x.shape) != 4 or len(grid.shape) != 4 or _modes(problem) is None:
        return "pictures, bilinear, with zeros or the edge outside"
    if any(m.dtype not in FLOATS for m in (x, grid)) or problem.output.dtype != x.dtype:
        return f"floating numbers of 16 and 32 bits, not {x.dtype} and {grid.dtype}"
    if x.format not in ("contiguous", "channels_last") or grid.format != "contiguous":
        return "needs dense pictures, and dense places"
    if problem.output.strides is not None or problem.output.format != "contiguous":
        return "makes dense pictures"
    sizes = [math.prod(m.shape) for m in (x, grid, problem.output)]
    if 0 in sizes or x.shape[0] > 65535:
        return "nothing to see, or more than 65,535 pictures"
    return "indices have 32 bits" if max(sizes) > MAX_ELEMENTS else None


def _modes(problem: Problem) -> tuple[bool, bool] | None:
    """Whether the edge goes on outside, and whether −1 and 1 are the middles of the outermost
    pixels; None where the operator's arguments are others."""
    args, kwargs = problem.attrs.get("args"), problem.attrs.get("kwargs")
    if kwargs or not isinstance(args, list | tuple) or len(args) != 5:
        return None
    x, grid, interpolation, padding, align = args
    if x != {"input": 0} or grid != {"input": 1} or type(align) is not bool:
        return None
    known = interpolation == BILINEAR and padding in (ZEROS, BORDER)
    return (padding == BORDER, align) if known else None


def configs(problem: Problem) -> tuple[Config, ...]:
    return tuple(
        {"places": places, "channels": channels, "warps": warps}
        for places, channels, warps in ((128, 8, 4), (256, 16, 4), (128, 32, 4), (64, 4, 2))
    )


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    modes, made = _modes(problem), problem.output
    assert modes is not None, "asked for in spite of fits()"
    border, align = modes
    images, channels, height, width = problem.given[0].shape
    places = made.shape[2] * made.shape[3]
    blocks = triton.cdiv(places, tile["places"]), triton.cdiv(channels, tile["channels"])

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        x, grid = tensors
        out = made.empty(x.device)
        launch(
            grid_kernel, (*blocks, images), x, grid, out, places, height, width, channels,
            x.stride(), BORDER=border, ALIGN=align, PLACES=tile["places"],
            CHANNELS=tile["channels"], num_warps=tile["warps"], **overlapping(),
        )  # fmt: skip
        return out

    return run
