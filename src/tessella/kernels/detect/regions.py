"""``pyramid_roi_align`` on a GPU: some cells of a box and some channels a block, one point of the
cells after another.

A point's four pixels are rows of channels, which neighbours read, too, and the cache holds. In
plain Triton; all sums are in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from tessella.core.dtype import FLOATS
from tessella.device.launch import launch
from tessella.device.overlap import await_earlier, overlapping
from tessella.kernels.catalog import Call, Config
from tessella.kernels.detect.sampled import MAX_ELEMENTS, has_rows, strides_of
from tessella.kernels.epilogue.triton_device import cast
from tessella.operations.problem import Problem


@triton.jit
def _ends(at, length):
    """The pixels beside places of a row, and how much of each is seen: nothing where a place lies
    a pixel and more outside of the row, or is no number."""
    seen = (at >= -1.0) & (at <= length)
    at = tl.minimum(tl.maximum(tl.where(seen, at, 0.0), 0.0), length - 1.0)
    first = tl.floor(at)
    second = tl.minimum(first + 1.0, length - 1.0)
    share = tl.where(seen, at - first, 0.0)
    return first.to(tl.int32), second.to(tl.int32), seen.to(tl.float32) - share, share


@triton.jit
def regions_kernel(
    value,
    boxes,
    levels,
    out,
    places,
    strides,  # of images and rows of value
    CHANNELS: tl.constexpr,
    SIDE: tl.constexpr,
    SAMPLES: tl.constexpr,
    HEIGHTS: tl.constexpr,  # of each level, as the next three
    WIDTHS: tl.constexpr,
    STRIDES: tl.constexpr,
    STARTS: tl.constexpr,
    CELLS: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_earlier(OVERLAP)
    blocks: tl.constexpr = (SIDE * SIDE + CELLS - 1) // CELLS
    cell = (tl.program_id(0) % blocks) * CELLS + tl.arange(0, CELLS)
    lane = (tl.program_id(0) // blocks) * LANES + tl.arange(0, LANES)
    image = tl.program_id(2)
    box = image * places + tl.program_id(1)
    v_image, v_row = strides

    level = tl.load(levels + box)
    level = tl.minimum(tl.maximum(level, 0), len(STRIDES) - 1).to(tl.int32)
    height, width, stride, start = HEIGHTS[0], WIDTHS[0], STRIDES[0], STARTS[0]
    for other in tl.static_range(1, len(STRIDES)):
        height = tl.where(level == other, HEIGHTS[other], height)
        width = tl.where(level == other, WIDTHS[other], width)
        stride = tl.where(level == other, STRIDES[other], stride)
        start = tl.where(level == other, STARTS[other], start)
    scale = stride.to(tl.float32)
    x = tl.load(boxes + box * 4).to(tl.float32) / scale
    y = tl.load(boxes + box * 4 + 1).to(tl.float32) / scale
    wide = tl.load(boxes + box * 4 + 2).to(tl.float32) / scale - x
    tall = tl.load(boxes + box * 4 + 3).to(tl.float32) / scale - y
    wide = tl.where(wide < 1.0, 1.0, wide) / SIDE  # what is no number stays none
    tall = tl.where(tall < 1.0, 1.0, tall) / SIDE

    row, column = cell // SIDE, cell % SIDE
    known = (cell < SIDE * SIDE)[:, None] & (lane < CHANNELS)[None, :]
    map = value + image * v_image + start * v_row
    total = tl.zeros((CELLS, LANES), tl.float32)
    for point in range(SAMPLES * SAMPLES):
        down = (row * SAMPLES + point // SAMPLES).to(tl.float32) + 0.5
        across = (column * SAMPLES + point % SAMPLES).to(tl.float32) + 0.5
        top, bottom, above, below = _ends(y + tall * (down / SAMPLES), height.to(tl.float32))
        left, right, before, behind = _ends(x + wide * (across / SAMPLES), width.to(tl.float32))
        for low in tl.static_range(2):
            line = tl.where(low == 0, top, bottom) * width
            weight = tl.where(low == 0, above, below)
            for far in tl.static_range(2):
                at = (line + tl.where(far == 0, left, right)) * v_row
                part = weight * tl.where(far == 0, before, behind)
                seen = tl.load(map + at[:, None] + lane[None, :], mask=known, other=0)
                total += seen.to(tl.float32) * part[:, None]
    into = out + (box * CHANNELS + lane[None, :]) * (SIDE * SIDE) + cell[:, None]
    tl.store(into, cast(total / (SAMPLES * SAMPLES), out.dtype.element_ty), mask=known)


def fits(problem: Problem) -> str | None:
    if problem.constant:
        return "takes no constants"
    value, boxes, levels, made = (
        problem["value"], problem["boxes"], problem["levels"], problem.output
    )  # fmt: skip
    if odd := [m.dtype for m in (value, boxes, made) if m.dtype not in FLOATS]:
        return f"floating numbers of 16 and 32 bits, not {odd[0]}"
    if levels.dtype != "int64":
        return f"levels of 64 bits, not {levels.dtype}"
    if not all(m.format == "contiguous" for m in (boxes, levels, made)) or not has_rows(value):
        return "needs dense boxes and levels, and dense rows, which may lie apart"
    if 0 in made.shape or 0 in value.shape or max(made.shape[:2]) > 65535:
        return "nothing to see, or more than 65,535 images or boxes"
    if max(value.shape[0] * strides_of(value)[0], int(np.prod(made.shape))) > MAX_ELEMENTS:
        return "indices have 32 bits"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    shapes = ((16, 64, 4), (64, 32, 4), (32, 64, 4), (16, 128, 4), (8, 128, 4), (64, 64, 8))
    return tuple({"cells": cells, "lanes": lanes, "warps": warps} for cells, lanes, warps in shapes)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    attrs, channels = problem.attrs, problem["value"].shape[2]
    images, places = problem["boxes"].shape[:2]
    heights, widths = tuple(attrs["sizes"][::2]), tuple(attrs["sizes"][1::2])
    starts = np.cumsum([0, *(h * w for h, w in zip(heights, widths, strict=True))]).tolist()
    blocks = triton.cdiv(attrs["side"] ** 2, tile["cells"]) * triton.cdiv(channels, tile["lanes"])
    grid = (blocks, places, images)
    settings: dict[str, Any] = {
        "CHANNELS": channels, "SIDE": attrs["side"], "SAMPLES": attrs["samples"],
        "HEIGHTS": heights, "WIDTHS": widths, "STRIDES": tuple(attrs["strides"]),
        "STARTS": tuple(starts[:-1]), "CELLS": tile["cells"], "LANES": tile["lanes"],
        "num_warps": tile["warps"],
    }  # fmt: skip

    def run(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        strides = (inputs[0].stride(0), inputs[0].stride(1))
        launch(regions_kernel, grid, *inputs, out, places, strides, **overlapping(), **settings)
        return out

    return run
