"""Convolution as a matrix product whose input indices are computed as it goes: no workspace.

cuDNN's IMPLICIT_GEMM. Every step of the product takes ``depth`` values of one tap (or of several,
where the channels do not fill a step), and computes from the tap where each pixel reads and whether
that is inside the image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.dtype import FLOATS, FP8
from tessella.device.overlap import await_earlier
from tessella.kernels.catalog import Call
from tessella.kernels.conv import tiles
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


def fits(problem: Problem) -> str | None:
    return tiles.refusal(problem, (*FLOATS, *FP8, "int8"))


def workspace_bytes(problem: Problem, **config: Any) -> int:
    return tiles.Product.of(problem, config, {}).nbytes


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    product = tiles.Product.of(problem, config, constants)

    def convolve(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        return product.launch(implicit_gemm, inputs, out, workspace)

    return convolve


@triton.jit
def implicit_gemm(
    x, w, y, bias, scale, residual, parts, pixels, filters, image, out, strides, factors,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, ENDING: tl.constexpr,
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
    UNIFORM: tl.constexpr = WINDOW.C % DEPTH == 0  # one tap a step
    EXACT: tl.constexpr = BLOCK.SPLITS * BLOCK.STEPS * DEPTH == WINDOW.C * TAPS
    m, k, group, part = tile_of_program(filters, BLOCK.PIXELS, BLOCK.FILTERS, BLOCK.SPLITS)
    n, o, p, q = split_pixel(m.to(tl.int64) if ENDING.WIDE else m, out)
    d, h, v, m_at = first_input(n, o, p, q, strides[0], STRIDE, PADDING)
    x += group.to(tl.int64) * WINDOW.C * strides[0][1]
    w += group.to(tl.int64) * filters * strides[1][0]
    inside_m = m < pixels
    inside_k = k < filters
    acc = zeros(BLOCK.PIXELS, BLOCK.FILTERS, x.dtype.element_ty, PIXELS_LAST)
    for step in tl.range(
        part * BLOCK.STEPS, part * BLOCK.STEPS + BLOCK.STEPS, num_stages=BLOCK.STAGES
    ):
        first = tl.full((), 0, tl.int64 if ENDING.WIDE else tl.int32) + step * DEPTH
        depth = first + tl.arange(0, DEPTH)
        tap = first // WINDOW.C if UNIFORM else depth // WINDOW.C
        c = depth % WINDOW.C
        t, r, s = split_tap(tap, FILTER)
        dt, dr, ds = t * WINDOW.DILATION[0], r * WINDOW.DILATION[1], s * WINDOW.DILATION[2]
        tap_at = dt * strides[0][2] + dr * strides[0][3] + ds * strides[0][4]
        inside, inside_depth = place(inside_m, depth < WINDOW.C * TAPS, PIXELS_LAST)
        if UNIFORM:  # coordinates of pixels, and those of the one tap
            at = is_inside(inside_m, d + dt, h + dr, v + ds, image, PADDING)
            inside = place(at, depth, PIXELS_LAST)[0]
            x_m, x_c = place(m_at + tap_at, c * strides[0][1], PIXELS_LAST)
            if not EXACT:
                inside = inside & inside_depth
        else:
            h_m, dr_c = place(h, dr, PIXELS_LAST)
            v_m, ds_c = place(v, ds, PIXELS_LAST)
            d_m, dt_c = place(d, dt, PIXELS_LAST)
            inside = is_inside(
                inside & inside_depth, d_m + dt_c, h_m + dr_c, v_m + ds_c, image, PADDING
            )
            x_m, x_c = place(m_at, c * strides[0][1] + tap_at, PIXELS_LAST)
        inside_depth, inside_w = place(depth < WINDOW.C * TAPS, inside_k, PIXELS_LAST)
        if not EXACT:
            inside_w = inside_w & inside_depth
        x_tile = tl.load(x + (x_m + x_c), mask=inside, other=0.0)
        w_c, w_k = place(
            c * strides[1][1] + t * strides[1][2] + r * strides[1][3] + s * strides[1][4],
            k * strides[1][0],
            PIXELS_LAST,
        )
        w_tile = tl.load(w + (w_k + w_c), mask=inside_w, other=0.0)
        acc = multiply(x_tile, w_tile, acc, PIXELS_LAST, PRECISION, IMPRECISE)
    if BLOCK.SPLITS > 1:
        store_part(acc, parts, part, m, k, group, pixels, filters,
                   tl.num_programs(1) * filters, PIXELS_LAST)  # fmt: skip
    else:
        store(acc, y, bias, scale, residual, m, k, group, pixels, filters, out, strides[2],
              strides[3], factors, ENDING)  # fmt: skip
