"""Direct convolution: the sums as they are written, without a view as a matrix product.

For where there is next to nothing to share between filters: depthwise convolution (a filter reads
one channel), groups of few channels, images of few channels. cuDNN lists the name, and no kernel.
Two kernels: ``channelwise`` keeps a column of output rows in registers, so that an input value is
loaded once for all rows that read it; ``sums`` takes any convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.kernels.catalog import Call
from tessella.kernels.conv import tiles
from tessella.kernels.conv.tiles import HALVES, Geometry
from tessella.kernels.conv.tiles_device import first_input, is_inside, place, split_pixel, store
from tessella.kernels.launch import launch
from tessella.kernels.problem import Problem

WRITES_OUT = True
GAMMA = True

MOST_TAPS = 49  # of a channelwise filter: its code is unrolled


def fits(problem: Problem) -> str | None:
    refused = tiles.refusal(problem, (*tiles.FLOATS, "int8"))
    if refused is None and problem.inputs[0].dtype == "float32" and problem.math == "tf32":
        return None  # more precise than asked for
    return refused


def _is_channelwise(geometry: Geometry) -> bool:
    taps = geometry.filter[0] * geometry.filter[1] * geometry.filter[2]
    return geometry.channels == 1 and geometry.groups > 1 and taps <= MOST_TAPS


def outclassed(problem: Problem) -> str | None:
    x = problem.inputs[0]
    if problem.attrs["groups"] == 1 and x.dtype in HALVES and len(x.shape) == 4:
        return "16 bits on plain units: 3.9 times the fastest's time at best in over 250 problems"
    return None


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    """Channelwise: the more rows in a column, the fewer loads; not measured yet."""
    geometry = Geometry.of(problem)
    last = problem.output.format == "channels_last"
    if not _is_channelwise(geometry):
        shapes = ((64, 32), (128, 16), (32, 64)) if last else ((128, 32), (256, 16), (64, 32))
        return tuple({"pixels": p, "filters": f, "rows": 1, "warps": 4} for p, f in shapes)
    if last:  # eight values a thread: with more of them, or more rows, registers spill
        filters = min(64, triton.next_power_of_2(geometry.groups * geometry.filters))
        shapes = [(256 * warps // filters, filters, warps) for warps in (4, 2, 8)]
        columns = (4, 2) if max(geometry.filter) <= 3 else (2, 4)
    else:
        shapes = [(128, 1, 4), (64, 2, 4), (64, 1, 2)]
        columns = (4, 2, 8)
    fitting = [rows for rows in columns if rows < 2 * geometry.out[1]] or [1]
    return tuple(
        {"pixels": pixels, "filters": filters, "rows": rows, "warps": warps}
        for rows in fitting
        for pixels, filters, warps in shapes
    )


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    chosen = config or configs(problem)[0]
    geometry = Geometry.of(problem)
    channelwise = _is_channelwise(geometry)
    filters = geometry.filters * geometry.groups
    rows = chosen["rows"]
    held = tiles.with_packed_weight(constants, filters_last=True)
    # a block takes filters of one group, or whole groups, of any number
    spans = geometry.groups > 1
    columns = geometry.pixels // geometry.out[1] * triton.cdiv(geometry.out[1], rows)

    def convolve(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out.numel() == 0:
            return out
        x, weight, bias, residual, scale = tiles.operands(problem, held, inputs)
        items = columns if channelwise else geometry.pixels
        more = {"items": items, "ROWS": rows} if channelwise else {"SPANS": spans}
        launch(
            channelwise_sums if channelwise else sums,
            (triton.cdiv(items, chosen["pixels"]), triton.cdiv(filters, chosen["filters"])),
            x,
            weight,
            out,
            filters=filters,
            image=geometry.image,
            x_strides=tiles.strides(x),
            w_strides=tiles.strides(weight),
            EACH=geometry.filters,
            C=geometry.channels,
            FILTER=geometry.filter,
            STRIDE=geometry.stride,
            PADDING=geometry.padding,
            DILATION=geometry.dilation,
            PIXELS=chosen["pixels"],
            FILTERS=chosen["filters"],
            num_warps=chosen["warps"],
            **tiles.destination(problem, geometry, x, bias, residual, scale, out),
            **more,
        )
        return out

    return convolve


@triton.jit
def channelwise_sums(x, w, y, bias, scale, residual, items, pixels, filters, image, out, x_strides,
                     w_strides, y_strides, residual_strides, alpha, beta, gamma, EACH: tl.constexpr,
                     C: tl.constexpr, FILTER: tl.constexpr, STRIDE: tl.constexpr,
                     PADDING: tl.constexpr, DILATION: tl.constexpr, ACTIVATION: tl.constexpr,
                     PIXELS_LAST: tl.constexpr, WIDE: tl.constexpr, PIXELS: tl.constexpr,
                     FILTERS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """A tile: columns of ROWS output rows × filters, each of which reads one channel."""
    KIND: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    T: tl.constexpr = FILTER[0]
    R: tl.constexpr = FILTER[1]
    S: tl.constexpr = FILTER[2]
    READ: tl.constexpr = (ROWS - 1) * STRIDE[1] + (R - 1) * DILATION[1] + 1
    item = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    k = tl.program_id(1) * FILTERS + tl.arange(0, FILTERS)
    strips = tl.cdiv(out[1], ROWS)
    q = item % out[2]
    p = item // out[2] % strips * ROWS
    plane = item // out[2] // strips
    n, o = plane // out[0], plane % out[0]
    if WIDE:
        n, k = n.to(tl.int64), k.to(tl.int64)
    d, h, v, first = first_input(n, o, p, q, x_strides, STRIDE, PADDING)
    inside_k = place(item, k < filters, PIXELS_LAST)[1]
    x_m, x_k = place(first, k // EACH * x_strides[1], PIXELS_LAST)
    from_x = x + (x_m + x_k)
    w_k = place(first, k * w_strides[0], PIXELS_LAST)[1]
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros(from_x.shape, KIND),)  # noqa: RUF005
    for t in tl.static_range(T):
        for s in tl.static_range(S):
            taps = ()
            for r in tl.static_range(R):
                at = w + (w_k + (t * w_strides[2] + r * w_strides[3] + s * w_strides[4]))
                taps = taps + (tl.load(at, mask=inside_k, other=0.0).to(KIND),)  # noqa: RUF005
            for row in tl.static_range(READ):
                # which output rows read this one: those r taps above it
                inside = is_inside(
                    item < items, d + t * DILATION[0], h + row, v + s * DILATION[2], image, PADDING
                )
                # an axis without padding is left by the rows past the last one of a column
                inside = inside & (h + row < image[1])
                inside = place(inside, k, PIXELS_LAST)[0]
                at = from_x + (
                    t * DILATION[0] * x_strides[2]
                    + row * x_strides[3]
                    + s * DILATION[2] * x_strides[4]
                )
                if is_read(row, ROWS, R, STRIDE[1], DILATION[1]):
                    value = tl.load(at, mask=inside & inside_k, other=0.0).to(KIND)
                    added = ()
                    for i in tl.static_range(ROWS):
                        if is_tap(row - i * STRIDE[1], R, DILATION[1]):
                            tap = taps[(row - i * STRIDE[1]) // DILATION[1]]
                            added = added + (sums[i] + value * tap,)  # noqa: RUF005
                        else:
                            added = added + (sums[i],)  # noqa: RUF005
                    sums = added
    for i in tl.static_range(ROWS):
        # rows past the last one belong to no pixel
        m = tl.where(p + i < out[1], (plane * out[1] + p + i) * out[2] + q, pixels)
        m = tl.where(item < items, m, pixels)
        store(sums[i], y, bias, scale, residual, m, k, 0, pixels, filters, out, y_strides,
              residual_strides, alpha, beta, gamma, ACTIVATION, PIXELS_LAST, WIDE)  # fmt: skip


@triton.constexpr_function
def is_tap(distance, taps, dilation):
    """Whether a row at this distance below an output row's first one is under a tap."""
    return 0 <= distance <= (taps - 1) * dilation and distance % dilation == 0


@triton.constexpr_function
def is_read(row, rows, taps, stride, dilation):
    """Whether one of the output rows of a column reads the row."""
    return any(
        0 <= row - i * stride <= (taps - 1) * dilation and (row - i * stride) % dilation == 0
        for i in range(rows)
    )


@triton.jit
def sums(x, w, y, bias, scale, residual, pixels, filters, image, out, x_strides, w_strides,
         y_strides, residual_strides, alpha, beta, gamma, EACH: tl.constexpr, C: tl.constexpr,
         FILTER: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr,
         ACTIVATION: tl.constexpr, PIXELS_LAST: tl.constexpr, WIDE: tl.constexpr,
         PIXELS: tl.constexpr, FILTERS: tl.constexpr, SPANS: tl.constexpr):  # fmt: skip
    """A tile of pixels × filters: under each tap, a value of every channel times its weights."""
    KIND: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    T: tl.constexpr = FILTER[0]
    m = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    k = tl.program_id(1) * FILTERS + tl.arange(0, FILTERS)
    n, o, p, q = split_pixel(m.to(tl.int64) if WIDE else m, out)
    d, h, v, first = first_input(n, o, p, q, x_strides, STRIDE, PADDING)
    channel = k // EACH * C if SPANS else k * 0
    if WIDE:
        channel = channel.to(tl.int64)
    inside_m, inside_k = place(m < pixels, k < filters, PIXELS_LAST)
    x_m, x_k = place(first, channel * x_strides[1], PIXELS_LAST)
    from_x = x + (x_m + x_k) if SPANS else x + x_m
    w_k = place(first, k * w_strides[0], PIXELS_LAST)[1]
    acc = tl.zeros((inside_m & inside_k).shape, KIND)
    for t in tl.static_range(T):
        for r in range(FILTER[1]):
            for s in range(FILTER[2]):
                inside = is_inside(m < pixels, d + t * DILATION[0], h + r * DILATION[1],
                                   v + s * DILATION[2], image, PADDING)  # fmt: skip
                inside = place(inside, k, PIXELS_LAST)[0]
                if SPANS:
                    inside = inside & inside_k
                at = (
                    t * (DILATION[0] * x_strides[2])
                    + r * (DILATION[1] * x_strides[3])
                    + s * (DILATION[2] * x_strides[4])
                )
                w_at = t * w_strides[2] + r * w_strides[3] + s * w_strides[4]
                for c in tl.range(0, C, loop_unroll_factor=4):
                    value = tl.load(from_x + (at + c * x_strides[1]), mask=inside, other=0.0)
                    tap = tl.load(w + (w_k + (w_at + c * w_strides[1])), mask=inside_k, other=0.0)
                    acc += value.to(KIND) * tap.to(KIND)
    store(acc, y, bias, scale, residual, m, k, 0, pixels, filters, out, y_strides,
          residual_strides, alpha, beta, gamma, ACTIVATION, PIXELS_LAST, WIDE)  # fmt: skip
