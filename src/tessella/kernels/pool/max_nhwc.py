"""Max pooling over NHWC in plain Triton, of floating numbers and of int8, which torch's has not.

A block takes some output pixels times some channels, which are neighbours in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tessella.kernels.catalog import Call
from tessella.kernels.launch import launch
from tessella.kernels.problem import Problem

WRITES_OUT = True

LEAST = {
    "int8": -128, "float16": float("-inf"), "bfloat16": float("-inf"), "float32": float("-inf")
}  # fmt: skip
TILE = 4096  # elements of a block


def fits(problem: Problem) -> str | None:
    x, out = problem.inputs[0], problem.output
    if x.dtype not in LEAST or out.dtype != x.dtype:
        return f"no maximum of {x.dtype}"
    if len(x.shape) != 4 or not (x.has("channels_last") and out.has("channels_last")):
        return "needs channels_last"
    if 0 in out.shape or max(x.nbytes, out.nbytes) >= 2**31:
        return "empty, or 2 GiB and more"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    a = problem.attrs
    _, channels, height, width = problem.inputs[0].shape
    images, _, p, q = problem.output.shape
    wide = min(128, triton.next_power_of_2(channels))
    pixels = images * p * q
    tall = max(1, TILE // wide)
    grid = (triton.cdiv(pixels, tall), triton.cdiv(channels, wide))

    def call(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        launch(
            _max_pool, grid, x, out, pixels, channels, height, width, p, q,
            R=a["kernel_size"][0], S=a["kernel_size"][1],
            STRIDE_H=a["stride"][0], STRIDE_W=a["stride"][1],
            PAD_H=a["padding"][0], PAD_W=a["padding"][1],
            DILATION_H=a["dilation"][0], DILATION_W=a["dilation"][1],
            LEAST=LEAST[problem.output.dtype], TALL=tall, WIDE=wide, num_warps=8,
        )  # fmt: skip
        return out

    return call


@triton.jit
def _max_pool(x, out, pixels, C, H, W, P, Q, R: tl.constexpr, S: tl.constexpr,
              STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr,
              PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
              LEAST: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    m = tl.program_id(0) * TALL + tl.arange(0, TALL)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    row = m // Q
    top = row % P * STRIDE_H - PAD_H
    left = m % Q * STRIDE_W - PAD_W
    first = row // P * H
    inside = (m < pixels)[:, None] & (c < C)[None, :]
    best = tl.full((TALL, WIDE), LEAST, x.dtype.element_ty)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            h = top + r * DILATION_H
            w = left + s * DILATION_W
            there = (h >= 0) & (h < H) & (w >= 0) & (w < W)
            at = ((first + h) * W + w)[:, None] * C + c[None, :]
            tap = tl.load(x + at, mask=inside & there[:, None], other=LEAST)
            best = tl.maximum(best, tap, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + m[:, None] * C + c[None, :], best, mask=inside)
