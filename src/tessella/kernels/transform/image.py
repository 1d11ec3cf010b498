"""Bytes of images to a network's input, in one pass: 16 bytes a thread, scaled, cast, stored.

In channels_last both sides have one order. Product and sum are rounded apart (no fused operation):
the same bits as on the host.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tessella.core.dtype import FLOATS
from tessella.device.launch import launch
from tessella.device.overlap import await_earlier, overlapping
from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem

BLOCK = 2048  # values in channels_last, else pixels: 16 for each of 128 threads


@triton.jit
def _same_order_kernel(
    x, gain, offset, out, count, C: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    await_earlier(OVERLAP)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    inside = lanes < count - start
    channel = ((start % C).to(tl.int32) + lanes) % C
    pixel = tl.load(x + start + lanes, mask=inside, other=0).to(tl.float32)
    made = pixel * tl.load(gain + channel) + tl.load(offset + channel)
    tl.store(out + start + lanes, made.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _planes_kernel(
    x, gain, offset, out, pixels, C: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    await_earlier(OVERLAP)
    image = tl.program_id(1).to(tl.int64) * pixels * C
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pixels
    for c in range(C):
        pixel = tl.load(x + image + at * C + c, mask=inside, other=0).to(tl.float32)
        made = pixel * tl.load(gain + c) + tl.load(offset + c)
        tl.store(out + image + c * pixels + at, made.to(out.dtype.element_ty), mask=inside)


def fits(problem: Problem) -> str | None:
    x, out = problem["input"], problem.output
    if problem.constant:
        return "takes no constants"
    if x.dtype != "uint8" or x.format != "contiguous":
        return f"takes dense uint8, not {x.format} {x.dtype}"
    if out.dtype not in FLOATS:
        return f"makes floating numbers of 16 and 32 bits, not {out.dtype}"
    if x.shape[0] > 65535 or x.nbytes // max(1, x.shape[0]) >= 1 << 31:
        return "more than 65,535 images, or one of 2 GB"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    n, height, width, channels = problem["input"].shape
    pixels = height * width
    gain, offset = (
        torch.tensor(problem.attrs[name], dtype=torch.float32) for name in ("gain", "offset")
    )
    on_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
    same_order = problem.output.has("channels_last")

    def convert(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if x.device not in on_device:  # in the run before a graph is captured
            on_device[x.device] = gain.to(x.device), offset.to(x.device)
        a, b = on_device[x.device]
        if same_order:
            count = n * pixels * channels
            grid: tuple[int, ...] = (triton.cdiv(count, BLOCK),)
            launch(_same_order_kernel, grid, x, a, b, out, count, C=channels, BLOCK=BLOCK,
                   num_warps=4, fuse=False, **overlapping())  # fmt: skip
        else:
            grid = (triton.cdiv(pixels, BLOCK), n)
            launch(_planes_kernel, grid, x, a, b, out, pixels, C=channels, BLOCK=BLOCK,
                   num_warps=4, fuse=False, **overlapping())  # fmt: skip
        return out

    return convert
