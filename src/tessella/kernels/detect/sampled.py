"""``deformable_attention`` on a GPU: some queries of a head a block, one point after another.

A point's four pixels are rows of the head's channels, which neighbours read, too, and the cache
holds. In plain Triton; all sums are in float32.
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
from tessella.kernels.epilogue.triton_device import cast
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

MAX_ELEMENTS = 2**31 - 1  # offsets have 32 bits
MAX_POINTS = 256
MAX_DEPTH = 256


@triton.jit
def _seen(value, row, column, height, width, stride, lanes, known):
    """A pixel's channels, and zeros outside of its map."""
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    at = (row * width + column).to(tl.int32) * stride
    mask = inside[:, None] & known[None, :]
    return tl.load(value + at[:, None] + lanes[None, :], mask=mask, other=0).to(tl.float32)


@triton.jit
def sampled_kernel(
    value,
    boxes,
    offsets,
    scores,
    out,
    queries,
    strides,  # of images and rows of value, offsets and scores
    SPREAD: tl.constexpr,
    HEADS: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    TOTAL: tl.constexpr,
    PADDED: tl.constexpr,
    POINTS: tl.constexpr,  # of each level, as the next three
    HEIGHTS: tl.constexpr,
    WIDTHS: tl.constexpr,
    STARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_earlier(OVERLAP)
    head, image = tl.program_id(1), tl.program_id(2)
    query = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = query < queries
    row = image * queries + query
    v_image, v_row, o_image, o_row, s_image, s_row = strides
    scores += image * s_image + query * s_row + head * TOTAL  # of the head's first point
    offsets += image * o_image + query * o_row + head * (TOTAL * 2)

    points = tl.arange(0, PADDED)
    asked = inside[:, None] & (points < TOTAL)[None, :]
    told = tl.load(scores[:, None] + points[None, :], mask=asked, other=0).to(tl.float32)
    told = tl.where((points < TOTAL)[None, :], told, float("-inf"))
    highest = tl.max(told, 1)
    whole = tl.sum(tl.exp(told - highest[:, None]), 1)

    x_middle = tl.load(boxes + row * 4, mask=inside, other=0).to(tl.float32)
    y_middle = tl.load(boxes + row * 4 + 1, mask=inside, other=0).to(tl.float32)
    wide = tl.load(boxes + row * 4 + 2, mask=inside, other=0).to(tl.float32)
    tall = tl.load(boxes + row * 4 + 3, mask=inside, other=0).to(tl.float32)

    lanes = tl.arange(0, LANES)
    known = lanes < DEPTH
    total = tl.zeros((BLOCK, LANES), tl.float32)
    for level in tl.static_range(len(POINTS)):
        height = HEIGHTS[level]
        width = WIDTHS[level]
        share = SPREAD / POINTS[level]
        map = value + image * v_image + STARTS[level] * v_row + head * DEPTH
        for _ in range(POINTS[level]):  # unrolled, a kernel took 5 s to compile
            dx = tl.load(offsets, mask=inside, other=0).to(tl.float32)
            dy = tl.load(offsets + 1, mask=inside, other=0).to(tl.float32)
            score = tl.load(scores, mask=inside, other=0).to(tl.float32)
            x = (x_middle + dx * share * wide) * width - 0.5
            y = (y_middle + dy * share * tall) * height - 0.5
            x0, y0 = tl.floor(x), tl.floor(y)
            right, low = x - x0, y - y0
            weight = tl.exp(score - highest) / whole
            a = _seen(map, y0, x0, height, width, v_row, lanes, known)
            b = _seen(map, y0, x0 + 1, height, width, v_row, lanes, known)
            c = _seen(map, y0 + 1, x0, height, width, v_row, lanes, known)
            d = _seen(map, y0 + 1, x0 + 1, height, width, v_row, lanes, known)
            above = a * (1 - right)[:, None] + b * right[:, None]
            below = c * (1 - right)[:, None] + d * right[:, None]
            mean = above * (1 - low)[:, None] + below * low[:, None]
            total += mean * weight[:, None]
            scores += 1
            offsets += 2
    into = out + (row[:, None] * HEADS + head) * DEPTH + lanes[None, :]
    tl.store(into, cast(total, out.dtype.element_ty), mask=inside[:, None] & known[None, :])


def fits(problem: Problem) -> str | None:
    if problem.constant:
        return "takes no constants"
    tensors = (*problem.given, problem.output)
    if odd := [m.dtype for m in tensors if m.dtype not in FLOATS]:
        return f"floating numbers of 16 and 32 bits, not {odd[0]}"
    if not all(m.format == "contiguous" for m in (problem["boxes"], problem.output)):
        return "needs dense boxes, and makes dense rows"
    if not all(has_rows(m) for m in tensors):
        return "needs dense rows, which may lie apart"
    images, _, channels = problem.output.shape
    heads, points = problem.attrs["heads"], sum(problem.attrs["points"])
    if 0 in problem.output.shape or max(images, heads) > 65535:
        return "nothing to see, or more than 65,535 images or heads"
    if points > MAX_POINTS or channels // heads > MAX_DEPTH:
        return f"{points} points, or {channels // heads} channels a head"
    if max(m.shape[0] * strides_of(m)[0] for m in tensors) > MAX_ELEMENTS:
        return "indices have 32 bits"
    return None


def has_rows(meta: TensorMeta) -> bool:
    """Whether the strides are known, and a row's numbers lie side by side."""
    return meta.format == "contiguous" or (meta.strides is not None and meta.strides[-1] == 1)


def strides_of(meta: TensorMeta) -> tuple[int, ...]:
    return meta.strides or meta.dense_strides


def configs(problem: Problem) -> tuple[Config, ...]:
    """Blocks of some queries; with few, a GPU has more blocks than multiprocessors."""
    shapes = ((16, 4), (8, 2), (32, 4), (4, 1), (16, 2), (64, 8))
    return tuple({"queries": queries, "warps": warps} for queries, warps in shapes)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    attrs = problem.attrs
    images, _, channels = problem["value"].shape
    queries, heads = problem["boxes"].shape[1], attrs["heads"]
    heights, widths = tuple(attrs["sizes"][::2]), tuple(attrs["sizes"][1::2])
    starts = np.cumsum([0, *(h * w for h, w in zip(heights, widths, strict=True))]).tolist()
    total, depth = sum(attrs["points"]), channels // heads
    grid = (triton.cdiv(queries, tile["queries"]), heads, images)
    settings: dict[str, Any] = {
        "SPREAD": attrs["spread"], "HEADS": heads, "DEPTH": depth,
        "LANES": triton.next_power_of_2(depth), "TOTAL": total,
        "PADDED": triton.next_power_of_2(total), "POINTS": tuple(attrs["points"]),
        "HEIGHTS": heights, "WIDTHS": widths, "STARTS": tuple(starts[:-1]),
        "BLOCK": tile["queries"], "num_warps": tile["warps"],
    }  # fmt: skip

    def run(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        value, _, offsets, scores = inputs
        strides = tuple(t.stride(axis) for t in (value, offsets, scores) for axis in (0, 1))
        launch(sampled_kernel, grid, *inputs, out, queries, strides, **overlapping(), **settings)
        return out

    return run
