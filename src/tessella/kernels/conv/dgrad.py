"""Gradient of a convolution by its input in plain Triton: any layout, stride, dilation and groups.

A matrix product of pixels of dx × (tap, output channels) with the weight; a tap that a pixel of dx
has no part in, because of the stride or the border, adds zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.device.launch import launch
from tessella.kernels.catalog import Call, Config
from tessella.kernels.conv.backward import portable_refusal, window_of
from tessella.kernels.conv.tiles import is_wide, on_plain_units
from tessella.kernels.epilogue.triton_device import cast
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    return portable_refusal(problem, problem.output, problem["weight"], problem["grad"])


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles as large as the channels fill; smaller ones follow."""
    channels = problem["weight"].shape[1]
    depth = min(32, max(16, triton.next_power_of_2(_filters(problem))))
    plain = on_plain_units(problem, "grad")
    tiles = ((64, 64, 4), (32, 32, 4)) if plain else ((128, 128, 8), (128, 64, 4), (64, 32, 4))
    fitting = [tile for tile in tiles if tile[1] < 2 * channels or tile == tiles[-1]]
    return tuple(
        {"pixels": pixels, "channels": columns, "depth": depth, "warps": warps}
        for pixels, columns, warps in fitting
    )


def _filters(problem: Problem) -> int:
    """Output channels of one group."""
    groups: int = problem.attrs["groups"]
    return problem["weight"].shape[0] // groups


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    config, attrs, made = config or configs(problem)[0], problem.attrs, problem.output
    weight_shape, groups = problem["weight"].shape, attrs["groups"]
    pixels = made.shape[0] * math.prod(made.shape[2:])
    tiles = -(-pixels // config["pixels"]) * -(-weight_shape[1] // config["channels"])

    def call(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        dy, weight = problem.tensors(constants, inputs)
        launch(
            _dgrad,
            (tiles, groups),
            dy,
            weight,
            out,
            pixels,
            weight_shape[1],
            _filters(problem),
            tuple(made.shape[2:]),
            tuple(dy.shape[2:]),
            dy.stride(),
            weight.stride(),
            out.stride(),
            WINDOW=window_of(problem, weight_shape[2:]),
            STEPS=-(-_filters(problem) // config["depth"]),
            PRECISION=problem.math if dy.dtype == torch.float32 else "ieee",
            WIDE=is_wide(dy, out),
            PIXELS=config["pixels"],
            CHANNELS=config["channels"],
            DEPTH=config["depth"],
            num_warps=config["warps"],
        )
        return out

    return call


@triton.jit
def _dgrad(
    dy, weight, dx, pixels, channels, filters, image, out, dy_strides, w_strides, dx_strides,
    WINDOW: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(channels, CHANNELS)
    tile, group = tl.program_id(0), tl.program_id(1)
    m = tile // across * PIXELS + tl.arange(0, PIXELS)
    c = tile % across * CHANNELS + tl.arange(0, CHANNELS)
    if WIDE:
        m = m.to(tl.int64)
    n = m // (image[0] * image[1])
    h = m // image[1] % image[0]
    v = m % image[1]
    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for step in tl.range(0, WINDOW.TAPS[0] * WINDOW.TAPS[1] * STEPS):
        tap = step // STEPS
        k = step % STEPS * DEPTH + tl.arange(0, DEPTH)
        r = tap // WINDOW.TAPS[1]
        s = tap % WINDOW.TAPS[1]
        above = h + WINDOW.PADDING[0] - r * WINDOW.DILATION[0]
        left = v + WINDOW.PADDING[1] - s * WINDOW.DILATION[1]
        p = above // WINDOW.STRIDE[0]
        q = left // WINDOW.STRIDE[1]
        inside = (m < pixels) & (above >= 0) & (left >= 0) & (p < out[0]) & (q < out[1])
        inside = inside & (p * WINDOW.STRIDE[0] == above) & (q * WINDOW.STRIDE[1] == left)
        at = n * dy_strides[0] + p * dy_strides[2] + q * dy_strides[3]
        filter = group * filters + k
        here = inside[:, None] & (k < filters)[None, :]
        a = tl.load(dy + at[:, None] + (filter * dy_strides[1])[None, :], mask=here, other=0.0)
        here = (k < filters)[:, None] & (c < channels)[None, :]
        at_k = filter * w_strides[0] + r * w_strides[2] + s * w_strides[3]
        b = tl.load(weight + at_k[:, None] + (c * w_strides[1])[None, :], mask=here, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    at = n * dx_strides[0] + h * dx_strides[2] + v * dx_strides[3]
    channel = group * channels + c
    here = (m < pixels)[:, None] & (c < channels)[None, :]
    made = cast(acc, dx.dtype.element_ty)
    tl.store(dx + at[:, None] + (channel * dx_strides[1])[None, :], made, mask=here)
