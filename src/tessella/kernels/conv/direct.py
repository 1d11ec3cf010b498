"""Direct convolution: the sums as they are written, without a view as a matrix product.

For where there is next to nothing to share between filters: depthwise convolution (a filter reads
one channel), groups of few channels, images of few channels. cuDNN lists the name, and no kernel.
Filters of one channel go to ``channelwise``; ``sums`` takes any convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.dtype import FLOATS, SIXTEEN_BIT
from tessella.device.launch import launch
from tessella.kernels.catalog import Call
from tessella.kernels.conv import channelwise, tiles
from tessella.kernels.conv.tiles import Geometry
from tessella.kernels.conv.tiles_device import first_input, is_inside, place, split_pixel, store
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    refused = tiles.refusal(problem, (*FLOATS, "int8"))
    if refused is None and problem["input"].dtype == "float32" and problem.math == "tf32":
        return None  # more precise than asked for
    return refused


def outclassed(problem: Problem) -> str | None:
    x = problem["input"]
    if problem.attrs["groups"] == 1 and x.dtype in SIXTEEN_BIT and len(x.shape) > 3:
        return "16 bits on plain units: 3.9 times the fastest's time at best in over 250 problems"
    return None


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    geometry = Geometry.of(problem)
    if channelwise.takes(geometry):
        return tuple(asdict(strip) for strip in channelwise.configs(problem))
    shapes = ((64, 32, 4), (128, 16, 4), (32, 64, 4))
    if problem.output.format != "channels_last":
        shapes = ((128, 32, 4), (256, 16, 4), (64, 32, 4))
    return tuple(asdict(Block(items=i, filters=f, warps=warps)) for i, f, warps in shapes)


@dataclass(frozen=True, kw_only=True)
class Block:
    """What a block of threads makes: a configuration; ``items``: pixels of its tile."""

    items: int
    filters: int
    warps: int = 4


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    chosen = config or configs(problem)[0]
    geometry = Geometry.of(problem)
    if channelwise.takes(geometry):
        return channelwise.bind(problem, constants, channelwise.Strip(**chosen))
    block = Block(**chosen)
    filters = geometry.filters * geometry.groups
    held = tiles.with_packed_weight(constants, filters_last=True)

    def convolve(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        x, weight, epilogue = problem.product_operands(held, inputs)
        ending = tiles.destination(problem, geometry, x, epilogue, out)
        ending["strides"] = (tiles.strides(x), tiles.strides(weight), *ending["strides"])
        launch(
            sums,
            (triton.cdiv(geometry.pixels, block.items), triton.cdiv(filters, block.filters)),
            x,
            weight,
            out,
            filters=filters,
            image=geometry.image,
            EACH=geometry.filters,
            WINDOW=geometry.window,
            PIXELS=block.items,
            FILTERS=block.filters,
            SPANS=geometry.groups > 1,  # filters of one group, or whole groups
            num_warps=block.warps,
            **ending,
        )
        return out

    return convolve


@triton.jit
def sums(
    x, w, y, bias, scale, residual, pixels, filters, image, out, strides, factors,
    EACH: tl.constexpr, WINDOW: tl.constexpr, ENDING: tl.constexpr, PIXELS: tl.constexpr,
    FILTERS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """A tile of pixels × filters: under each tap, a value of every channel times its weights."""
    STRIDE: tl.constexpr = WINDOW.STRIDE
    PADDING: tl.constexpr = WINDOW.PADDING
    PIXELS_LAST: tl.constexpr = ENDING.PIXELS_LAST
    KIND: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    T: tl.constexpr = WINDOW.FILTER[0]
    m = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    k = tl.program_id(1) * FILTERS + tl.arange(0, FILTERS)
    n, o, p, q = split_pixel(m.to(tl.int64) if ENDING.WIDE else m, out)
    d, h, v, first = first_input(n, o, p, q, strides[0], STRIDE, PADDING)
    channel = k // EACH * WINDOW.C if SPANS else k * 0
    if ENDING.WIDE:
        channel = channel.to(tl.int64)
    inside_m, inside_k = place(m < pixels, k < filters, PIXELS_LAST)
    x_m, x_k = place(first, channel * strides[0][1], PIXELS_LAST)
    from_x = x + (x_m + x_k) if SPANS else x + x_m
    w_k = place(first, k * strides[1][0], PIXELS_LAST)[1]
    acc = tl.zeros((inside_m & inside_k).shape, KIND)
    for t in tl.static_range(T):
        for r in range(WINDOW.FILTER[1]):
            for s in range(WINDOW.FILTER[2]):
                inside = is_inside(
                    m < pixels, d + t * WINDOW.DILATION[0], h + r * WINDOW.DILATION[1],
                    v + s * WINDOW.DILATION[2], image, PADDING,
                )  # fmt: skip
                inside = place(inside, k, PIXELS_LAST)[0]
                if SPANS:
                    inside = inside & inside_k
                at = (
                    t * (WINDOW.DILATION[0] * strides[0][2])
                    + r * (WINDOW.DILATION[1] * strides[0][3])
                    + s * (WINDOW.DILATION[2] * strides[0][4])
                )
                w_at = t * strides[1][2] + r * strides[1][3] + s * strides[1][4]
                for c in tl.range(0, WINDOW.C, loop_unroll_factor=4):
                    value = tl.load(from_x + (at + c * strides[0][1]), mask=inside, other=0.0)
                    tap = tl.load(w + (w_k + (w_at + c * strides[1][1])), mask=inside_k, other=0.0)
                    acc += value.to(KIND) * tap.to(KIND)
    store(acc, y, bias, scale, residual, m, k, 0, pixels, filters, out, strides[2],
          strides[3], factors, ENDING)  # fmt: skip
