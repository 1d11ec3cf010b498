"""Convolution as a matrix product of columns that are written out first (im2col).

cuDNN's GEMM. The columns, all values that every pixel reads, lie in the workspace: as many times
the input as the filter has taps. What is multiplied then is a plain matrix, with neither indices to
compute nor borders to look after. Columns of more than a gibibyte are made and used in parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.dtype import FLOATS, SIXTEEN_BIT
from tessella.core.integers import round_up
from tessella.device.launch import launch
from tessella.device.overlap import await_earlier
from tessella.kernels.catalog import Call
from tessella.kernels.conv import tiles
from tessella.kernels.conv.tiles import Geometry
from tessella.kernels.conv.tiles_device import (
    first_input,
    is_inside,
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
MOST_BYTES = 2**30
ALIGNED = 256  # pixels of a part, and a multiple of every tile


def fits(problem: Problem) -> str | None:
    refused = tiles.refusal(problem, (*FLOATS, "int8"))
    if refused is None and problem["input"].format == "strided":
        return "offsets into a view of any strides may need 64 bits"
    if refused is None and _column_bytes(problem) * ALIGNED > MOST_BYTES:
        return "the columns of 256 pixels take more than a gibibyte"
    return refused


def outclassed(problem: Problem) -> str | None:
    if len(problem["input"].shape) == 5 and problem["input"].dtype in SIXTEEN_BIT:
        return "volumes of 16 bits: 1.02 to 18 times the fastest's time in 18 problems"
    return None


def workspace_bytes(problem: Problem, **config: Any) -> int:
    columns = _column_bytes(problem) * _pixels_at_once(problem)
    return tiles.Product.dense(problem, config, {}).nbytes + columns


def _depth(geometry: Geometry) -> int:
    """The depth of one group's columns, padded so that every column begins aligned."""
    return round_up(geometry.depth, 16)


def _column_bytes(problem: Problem) -> int:
    geometry = Geometry.of(problem)
    size = problem["input"].itemsize
    return size * geometry.groups * _depth(geometry)


def _pixels_at_once(problem: Problem) -> int:
    pixels = round_up(Geometry.of(problem).pixels, 16)
    return min(pixels, MOST_BYTES // _column_bytes(problem) // ALIGNED * ALIGNED)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    product = tiles.Product.dense(problem, config, constants)
    geometry = product.geometry
    depth, at_once = _depth(geometry), _pixels_at_once(problem)
    nbytes = _column_bytes(problem) * at_once

    def convolve(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out.numel() == 0:
            return out
        x, _, _ = problem.product_operands(product.constants, inputs)
        assert workspace is not None
        columns = workspace[product.nbytes : product.nbytes + nbytes].view(x.dtype)
        pixels_last = tiles.are_pixels_last(out)
        m_stride, d_stride = (1, at_once) if pixels_last else (geometry.groups * depth, 1)
        across, down = (256, 16) if pixels_last else (32, 64)
        for begin in range(0, geometry.pixels, at_once):
            end = min(begin + at_once, geometry.pixels)
            launch(
                write_columns,
                (triton.cdiv(at_once, across), triton.cdiv(depth, down), geometry.groups),
                x,
                columns,
                begin,
                geometry.pixels,
                at_once,
                depth,
                geometry.image,
                geometry.out,
                tiles.strides(x),
                m_stride,
                d_stride,
                WINDOW=geometry.window,
                PIXELS_LAST=pixels_last,
                WIDE=tiles.is_wide(x) or geometry.groups * depth * at_once > tiles.LARGEST_INT32,
                PIXELS=across,
                DEPTH=down,
                num_warps=4,
            )
            product.launch(
                multiply_columns,
                inputs,
                out,
                workspace,
                begin,
                end,
                columns=(columns, begin, at_once, m_stride, d_stride),
                LENGTH=depth,
            )
        return out

    return convolve


@triton.jit
def write_columns(x, columns, begin, pixels, at_once, length, image, out, x_strides, m_stride,
                  d_stride, WINDOW: tl.constexpr, PIXELS_LAST: tl.constexpr, WIDE: tl.constexpr,
                  PIXELS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Columns [groups, length, at_once], or [at_once, groups, length] where pixels are first."""
    C: tl.constexpr = WINDOW.C
    FILTER: tl.constexpr = WINDOW.FILTER
    PADDING: tl.constexpr = WINDOW.PADDING
    DILATION: tl.constexpr = WINDOW.DILATION
    local = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    depth = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    group = tl.program_id(2).to(tl.int64)
    m = (local.to(tl.int64) if WIDE else local) + begin
    n, o, p, q = split_pixel(m, out)
    STRIDE: tl.constexpr = WINDOW.STRIDE
    d, h, v, m_at = first_input(n, o, p, q, x_strides, STRIDE, PADDING)
    t, r, s = split_tap(depth // C, FILTER)
    t, r, s = t * DILATION[0], r * DILATION[1], s * DILATION[2]
    depth_at = depth % C * x_strides[1] + t * x_strides[2] + r * x_strides[3] + s * x_strides[4]
    x_m, x_d = place(m_at, depth_at, PIXELS_LAST)
    d_m, t_d = place(d, t, PIXELS_LAST)
    h_m, r_d = place(h, r, PIXELS_LAST)
    v_m, s_d = place(v, s, PIXELS_LAST)
    taken, used = place(m < pixels, depth < C * FILTER[0] * FILTER[1] * FILTER[2], PIXELS_LAST)
    inside = is_inside(taken & used, d_m + t_d, h_m + r_d, v_m + s_d, image, PADDING)
    x += group * C * x_strides[1]
    values = tl.load(x + (x_m + x_d), mask=inside, other=0.0)
    to_m, to_d = place((local.to(tl.int64) if WIDE else local) * m_stride,
                       (depth.to(tl.int64) if WIDE else depth) * d_stride, PIXELS_LAST)  # fmt: skip
    taken, used = place(local < at_once, depth < length, PIXELS_LAST)
    tl.store(columns + group * length * d_stride + (to_m + to_d), values, mask=taken & used)


@triton.jit
def multiply_columns(
    x, w, y, bias, scale, residual, parts, columns, pixels, filters, image, out, strides, factors,
    LENGTH: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, ENDING: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """``columns``: where they lie, their first pixel, their number, strides of pixels and depth."""
    PRECISION: tl.constexpr = BLOCK.PRECISION
    IMPRECISE: tl.constexpr = BLOCK.IMPRECISE
    columns, start, at_once, m_stride, d_stride = columns
    await_earlier(OVERLAP)
    PIXELS_LAST: tl.constexpr = ENDING.PIXELS_LAST
    DEPTH: tl.constexpr = BLOCK.DEPTH
    TAPS: tl.constexpr = WINDOW.FILTER[0] * WINDOW.FILTER[1] * WINDOW.FILTER[2]
    local, k, group, part = tile_of_program(filters, BLOCK.PIXELS, BLOCK.FILTERS, BLOCK.SPLITS)
    columns += group.to(tl.int64) * LENGTH * d_stride
    w += group.to(tl.int64) * filters * strides[1][0]
    inside_k = k < filters
    acc = zeros(BLOCK.PIXELS, BLOCK.FILTERS, x.dtype.element_ty, PIXELS_LAST)
    begin = part * (BLOCK.STEPS * DEPTH)
    within = begin + tl.arange(0, DEPTH)
    at_m, at_d = place(local.to(tl.int64) * m_stride, within.to(tl.int64) * d_stride, PIXELS_LAST)
    from_columns = columns + (at_m + at_d)
    at_d, at_k = place(within * strides[1][1], k * strides[1][0], PIXELS_LAST)
    from_w = w + (at_d + at_k)
    for step in tl.range(0, BLOCK.STEPS, num_stages=BLOCK.STAGES):
        depth = begin + step * DEPTH + tl.arange(0, DEPTH)
        inside_m, inside_d = place(local < at_once, depth < LENGTH, PIXELS_LAST)
        used, inside_w = place(depth < WINDOW.C * TAPS, inside_k, PIXELS_LAST)
        if BLOCK.SPLITS * BLOCK.STEPS * DEPTH > LENGTH:
            inside_m = inside_m & inside_d
        if BLOCK.SPLITS * BLOCK.STEPS * DEPTH > WINDOW.C * TAPS:
            inside_w = inside_w & used
        values = tl.load(from_columns, mask=inside_m, other=0.0)
        w_tile = tl.load(from_w, mask=inside_w, other=0.0)
        from_columns += DEPTH * d_stride
        from_w += DEPTH * strides[1][1]
        acc = multiply(values, w_tile, acc, PIXELS_LAST, PRECISION, IMPRECISE)
    m = start + local
    if BLOCK.SPLITS > 1:
        store_part(acc, parts, part, m, k, group, pixels, filters,
                   tl.num_programs(1) * filters, PIXELS_LAST)  # fmt: skip
    else:
        store(acc, y, bias, scale, residual, m, k, group, pixels, filters, out, strides[2],
              strides[3], factors, ENDING)  # fmt: skip
