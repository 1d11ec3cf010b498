"""Convolution as a matrix product whose input offsets are computed beforehand, into small tables.

cuDNN's IMPLICIT_PRECOMP_GEMM. One table has an entry for each step of the product: where its
channel and tap read, relative to a pixel's first tap, and which tap it is. Three more say for each
output depth, row and column, one bit a tap, which taps are inside the image. The product then needs
an addition and a shift where ``implicit_gemm`` computes and compares coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.dtype import FLOATS
from tessella.device.launch import launch
from tessella.device.overlap import await_earlier
from tessella.kernels.catalog import Call
from tessella.kernels.conv import tiles
from tessella.kernels.conv.tiles import Geometry
from tessella.kernels.conv.tiles_device import (
    first_input,
    multiply,
    place,
    split_pixel,
    split_tap,
    store,
    store_part,
    tile_of_program,
    zeros,
)
from tessella.operations.problem import Problem

configs = tiles.configs
MOST_TAPS = 32  # of one axis: bits of a mask


def fits(problem: Problem) -> str | None:
    refused = tiles.refusal(problem, (*FLOATS, "int8"))
    if refused is None and problem["input"].format == "strided":
        return "offsets into a view of any strides may need 64 bits"
    if refused is None and max(Geometry.of(problem).filter) > MOST_TAPS:
        return f"more than {MOST_TAPS} taps along one axis"
    return refused


def workspace_bytes(problem: Problem, **config: Any) -> int:
    return tiles.Product.dense(problem, config, {}).nbytes + 4 * _entries(Geometry.of(problem))


def _entries(geometry: Geometry) -> int:
    return 2 * geometry.depth + sum(geometry.out)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    product = tiles.Product.dense(problem, config, constants)
    geometry = product.geometry
    entries = _entries(geometry)

    def convolve(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out.numel() == 0:
            return out
        x, _, _ = problem.product_operands(product.constants, inputs)
        assert workspace is not None
        tables = workspace[product.nbytes : product.nbytes + 4 * entries].view(torch.int32)
        steps = (*tiles.strides(x)[2:], geometry.channels)
        aligned = x.stride(1) == 1 and all(step % 16 == 0 for step in steps)
        launch(
            precompute,
            (triton.cdiv(entries, 256),),
            tables,
            geometry.image,
            geometry.out,
            tiles.strides(x),
            WINDOW=geometry.window,
            SIZE=256,
            num_warps=4,
        )
        return product.launch(
            implicit_precomp_gemm,
            inputs,
            out,
            workspace,
            tables=tables,
            ALIGNED=aligned,
        )

    return convolve


@triton.jit
def precompute(tables, image, out, x_strides, WINDOW: tl.constexpr, SIZE: tl.constexpr):
    """Fill the tables: offsets [depth], taps [depth], masks of depths, rows and columns."""
    C: tl.constexpr = WINDOW.C
    FILTER: tl.constexpr = WINDOW.FILTER
    DILATION: tl.constexpr = WINDOW.DILATION
    length = C * FILTER[0] * FILTER[1] * FILTER[2]
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tap = i // C
    t, r, s = split_tap(tap, FILTER)
    offset = (
        i % C * x_strides[1]
        + t * DILATION[0] * x_strides[2]
        + r * DILATION[1] * x_strides[3]
        + s * DILATION[2] * x_strides[4]
    )
    tl.store(tables + i, offset, mask=i < length)
    tl.store(tables + length + i, t | (r << 8) | (s << 16), mask=i < length)
    first = 2 * length
    for axis in tl.static_range(3):
        mask = axis_mask(i - first, image[axis], WINDOW, axis)
        tl.store(tables + i, mask, mask=(i >= first) & (i < first + out[axis]))
        first += out[axis]


@triton.jit
def axis_mask(place, size, WINDOW: tl.constexpr, AXIS: tl.constexpr):
    """Bit i: tap i of a place of the output reads inside the image, along one axis."""
    TAPS: tl.constexpr = WINDOW.FILTER[AXIS]
    STRIDE: tl.constexpr = WINDOW.STRIDE[AXIS]
    PADDING: tl.constexpr = WINDOW.PADDING[AXIS]
    DILATION: tl.constexpr = WINDOW.DILATION[AXIS]
    mask = tl.zeros_like(place)
    for tap in tl.static_range(TAPS):
        read = place * STRIDE - PADDING + tap * DILATION
        mask |= ((read >= 0) & (read < size)).to(tl.int32) << tap
    return mask


@triton.jit
def offsets_of(tables, entry, end, ALIGNED: tl.constexpr):
    """Offsets from the table; aligned ones are known to be multiples of 16."""
    offset = tl.load(tables + entry, mask=entry < end, other=0)
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return offset


@triton.jit
def is_marked(depths, rows, columns, tap, FILTER: tl.constexpr):
    """Whether a tap is inside the image, by the masks of a pixel's depth, row and column."""
    mask = (rows >> (tap >> 8 & 255)) & (columns >> (tap >> 16))
    if FILTER[0] > 1:
        mask = mask & (depths >> (tap & 255))
    return (mask & 1) != 0


@triton.jit
def implicit_precomp_gemm(
    x, w, y, bias, scale, residual, parts, tables, pixels, filters, image, out, strides, factors,
    ALIGNED: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, ENDING: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    FILTER: tl.constexpr = WINDOW.FILTER
    STRIDE: tl.constexpr = WINDOW.STRIDE
    PADDING: tl.constexpr = WINDOW.PADDING
    PRECISION: tl.constexpr = BLOCK.PRECISION
    IMPRECISE: tl.constexpr = BLOCK.IMPRECISE
    await_earlier(OVERLAP)
    PIXELS_LAST: tl.constexpr = ENDING.PIXELS_LAST
    DEPTH: tl.constexpr = BLOCK.DEPTH
    TAPS: tl.constexpr = FILTER[0] * FILTER[1] * FILTER[2]
    EXACT: tl.constexpr = BLOCK.SPLITS * BLOCK.STEPS * DEPTH == WINDOW.C * TAPS
    UNIFORM: tl.constexpr = WINDOW.C % DEPTH == 0  # one tap a step
    m, k, group, part = tile_of_program(filters, BLOCK.PIXELS, BLOCK.FILTERS, BLOCK.SPLITS)
    inside_m = m < pixels
    inside_k = k < filters
    n, o, p, q = split_pixel(m.to(tl.int64) if ENDING.WIDE else m, out)
    m_at = first_input(n, o, p, q, strides[0], STRIDE, PADDING)[3]
    masks = tables + 2 * WINDOW.C * TAPS
    depths = tl.load(masks + o, mask=inside_m, other=0)
    rows = tl.load(masks + out[0] + p, mask=inside_m, other=0)
    columns = tl.load(masks + (out[0] + out[1]) + q, mask=inside_m, other=0)
    x += group.to(tl.int64) * WINDOW.C * strides[0][1]
    w += group.to(tl.int64) * filters * strides[1][0]
    entry = tl.full((), 0, tl.int32) if UNIFORM else tl.arange(0, DEPTH)
    end = WINDOW.C * TAPS
    first = part * BLOCK.STEPS * DEPTH + entry
    # a step's entries are loaded one step ahead: the load of x then does not wait for them
    next_offset = offsets_of(tables, first, end, UNIFORM and ALIGNED)
    next_tap = tl.load(tables + end + first, mask=first < end, other=0)
    acc = zeros(BLOCK.PIXELS, BLOCK.FILTERS, x.dtype.element_ty, PIXELS_LAST)
    for step in tl.range(
        part * BLOCK.STEPS, part * BLOCK.STEPS + BLOCK.STEPS, num_stages=BLOCK.STAGES
    ):
        offset, tap = next_offset, next_tap
        ahead = (step + 1) * DEPTH + entry
        next_offset = offsets_of(tables, ahead, end, UNIFORM and ALIGNED)
        next_tap = tl.load(tables + end + ahead, mask=ahead < end, other=0)
        depth = step * DEPTH + tl.arange(0, DEPTH)
        if UNIFORM:
            valid = inside_m & is_marked(depths, rows, columns, tap, FILTER)
            valid, inside_c = place(valid, depth < end, PIXELS_LAST)
            if not EXACT:
                valid = valid & inside_c
            x_m, x_c = place(m_at + offset, tl.arange(0, DEPTH) * strides[0][1], PIXELS_LAST)
        else:
            valid, inside_c = place(inside_m, depth < end, PIXELS_LAST)
            depths_m, tap_c = place(depths, tap, PIXELS_LAST)
            rows_m = place(rows, tap, PIXELS_LAST)[0]
            columns_m = place(columns, tap, PIXELS_LAST)[0]
            valid = valid & inside_c & is_marked(depths_m, rows_m, columns_m, tap_c, FILTER)
            x_m, x_c = place(m_at, offset, PIXELS_LAST)
        x_tile = tl.load(x + (x_m + x_c), mask=valid, other=0.0)
        inside_c, inside_w = place(depth < end, inside_k, PIXELS_LAST)
        if not EXACT:
            inside_w = inside_w & inside_c
        w_c, w_k = place(depth * strides[1][1], k * strides[1][0], PIXELS_LAST)
        w_tile = tl.load(w + (w_k + w_c), mask=inside_w, other=0.0)
        acc = multiply(x_tile, w_tile, acc, PIXELS_LAST, PRECISION, IMPRECISE)
    if BLOCK.SPLITS > 1:
        store_part(acc, parts, part, m, k, group, pixels, filters,
                   tl.num_programs(1) * filters, PIXELS_LAST)  # fmt: skip
    else:
        store(acc, y, bias, scale, residual, m, k, group, pixels, filters, out, strides[2],
              strides[3], factors, ENDING)  # fmt: skip
