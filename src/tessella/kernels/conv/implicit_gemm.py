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


def fits(problem: Problem) -> str | None:
    return tiles.refusal(problem, (*FLOATS, *FP8, "int8"))


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    return tiles.configs(problem)


def workspace_bytes(problem: Problem, **config: Any) -> int:
    return tiles.Product.of(problem, config, {}).nbytes


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    product = tiles.Product.of(problem, config, constants)

    def convolve(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        return product.launch(implicit_gemm, inputs, out, workspace) if out.numel() else out

    return convolve


@triton.jit
def implicit_gemm(x, w, y, bias, scale, residual, parts, pixels, filters, image, out, x_strides,
                  w_strides, y_strides, residual_strides, alpha, beta, gamma, C: tl.constexpr,
                  FILTER: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
                  DILATION: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
                  IMPRECISE: tl.constexpr, PIXELS_LAST: tl.constexpr, WIDE: tl.constexpr,
                  PIXELS: tl.constexpr, FILTERS: tl.constexpr, DEPTH: tl.constexpr,
                  SPLITS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
                  OVERLAP: tl.constexpr):  # fmt: skip
    await_earlier(OVERLAP)
    TAPS: tl.constexpr = FILTER[0] * FILTER[1] * FILTER[2]
    UNIFORM: tl.constexpr = C % DEPTH == 0  # one tap a step
    EXACT: tl.constexpr = SPLITS * STEPS * DEPTH == C * TAPS
    m, k, group, part = tile_of_program(filters, PIXELS, FILTERS, SPLITS)
    n, o, p, q = split_pixel(m.to(tl.int64) if WIDE else m, out)
    d, h, v, m_at = first_input(n, o, p, q, x_strides, STRIDE, PADDING)
    x += group.to(tl.int64) * C * x_strides[1]
    w += group.to(tl.int64) * filters * w_strides[0]
    inside_m = m < pixels
    inside_k = k < filters
    acc = zeros(PIXELS, FILTERS, x.dtype.element_ty, PIXELS_LAST)
    for step in tl.range(part * STEPS, part * STEPS + STEPS, num_stages=STAGES):
        first = tl.full((), 0, tl.int64 if WIDE else tl.int32) + step * DEPTH
        depth = first + tl.arange(0, DEPTH)
        tap = first // C if UNIFORM else depth // C
        c = depth % C
        t, r, s = split_tap(tap, FILTER)
        dt, dr, ds = t * DILATION[0], r * DILATION[1], s * DILATION[2]
        tap_at = dt * x_strides[2] + dr * x_strides[3] + ds * x_strides[4]
        inside, inside_depth = place(inside_m, depth < C * TAPS, PIXELS_LAST)
        if UNIFORM:  # coordinates of pixels, and those of the one tap
            at = is_inside(inside_m, d + dt, h + dr, v + ds, image, PADDING)
            inside = place(at, depth, PIXELS_LAST)[0]
            x_m, x_c = place(m_at + tap_at, c * x_strides[1], PIXELS_LAST)
            if not EXACT:
                inside = inside & inside_depth
        else:
            h_m, dr_c = place(h, dr, PIXELS_LAST)
            v_m, ds_c = place(v, ds, PIXELS_LAST)
            d_m, dt_c = place(d, dt, PIXELS_LAST)
            inside = is_inside(
                inside & inside_depth, d_m + dt_c, h_m + dr_c, v_m + ds_c, image, PADDING
            )
            x_m, x_c = place(m_at, c * x_strides[1] + tap_at, PIXELS_LAST)
        inside_depth, inside_w = place(depth < C * TAPS, inside_k, PIXELS_LAST)
        if not EXACT:
            inside_w = inside_w & inside_depth
        x_tile = tl.load(x + (x_m + x_c), mask=inside, other=0.0)
        w_c, w_k = place(
            c * w_strides[1] + t * w_strides[2] + r * w_strides[3] + s * w_strides[4],
            k * w_strides[0],
            PIXELS_LAST,
        )
        w_tile = tl.load(w + (w_k + w_c), mask=inside_w, other=0.0)
        acc = multiply(x_tile, w_tile, acc, PIXELS_LAST, PRECISION, IMPRECISE)
    if SPLITS > 1:
        store_part(acc, parts, part, m, k, group, pixels, filters,
                   tl.num_programs(1) * filters, PIXELS_LAST)  # fmt: skip
    else:
        store(acc, y, bias, scale, residual, m, k, group, pixels, filters, out, y_strides,
              residual_strides, alpha, beta, gamma, ACTIVATION, PIXELS_LAST, WIDE)  # fmt: skip
