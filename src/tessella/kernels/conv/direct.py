"""Direct convolution: the sums as they are written, without a view as a matrix product.

For where there is next to nothing to share between filters: depthwise convolution (a filter reads
one channel), groups of few channels, images of few channels. cuDNN lists the name, and no kernel.
Two kernels: ``channelwise_sums`` keeps some rows × columns of output pixels in registers, so that
an input value is loaded once for all of them; ``sums`` takes any convolution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.kernels.catalog import Call
from tessella.kernels.conv import tiles
from tessella.kernels.conv.tiles import HALVES, Geometry
from tessella.kernels.conv.tiles_device import first_input, is_inside, place, split_pixel, store
from tessella.kernels.launch import launch
from tessella.kernels.packing import packed
from tessella.kernels.problem import Problem

WRITES_OUT = True
GAMMA = True

MOST_TAPS = 49  # of a channelwise filter: its code is unrolled
# of an item: output rows × columns; 7 divides what networks halve 224 to
BLOCKINGS = ((2, 7), (2, 8), (4, 4), (4, 7), (2, 4), (1, 7), (1, 4))
MOST_PRODUCTS = 800  # of an item and a channel: Triton takes seconds, and quadratically more
MOST_REGISTERS = 210
MOST_CONFIGS = 5


def fits(problem: Problem) -> str | None:
    refused = tiles.refusal(problem, (*tiles.FLOATS, "int8"))
    if refused is None and problem.inputs[0].dtype == "float32" and problem.math == "tf32":
        return None  # more precise than asked for
    return refused


def _is_channelwise(geometry: Geometry) -> bool:
    few = math.prod(geometry.filter) <= MOST_TAPS
    return geometry.channels == 1 and geometry.groups > 1 and few


def outclassed(problem: Problem) -> str | None:
    x = problem.inputs[0]
    if problem.attrs["groups"] == 1 and x.dtype in HALVES and len(x.shape) == 4:
        return "16 bits on plain units: 3.9 times the fastest's time at best in over 250 problems"
    return None


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    """The most promising first: channelwise and channels last, by an estimate."""
    geometry = Geometry.of(problem)
    last = problem.output.format == "channels_last"
    if not _is_channelwise(geometry):
        shapes = ((64, 32, 4), (128, 16, 4), (32, 64, 4))
        if not last:
            shapes = ((128, 32, 4), (256, 16, 4), (64, 32, 4))
        blocks = [Block(items=items, filters=f, warps=warps) for items, f, warps in shapes]
    elif last:
        blocks = _blocks(problem, geometry)
    else:  # a row alone: neighbours are threads
        fitting = [rows for rows in (4, 2, 8) if rows < 2 * geometry.out[1]] or [1]
        blocks = [
            Block(items=items, filters=filters, rows=rows, warps=warps)
            for rows in fitting
            for items, filters, warps in ((128, 1, 4), (64, 2, 4), (64, 1, 2))
        ]
    return tuple(asdict(block) for block in blocks)


@dataclass(frozen=True, kw_only=True)
class Block:
    """What a block of threads makes: a configuration.

    Attributes:
        items, filters: of its tile.
        rows, columns: of the output pixels that are one item.
    """

    items: int
    filters: int
    rows: int = 1
    columns: int = 1
    warps: int = 4

    @property
    def values(self) -> int:
        """Channels of an item that a thread takes."""
        return self.items * self.filters // (32 * self.warps)

    def registers(self, geometry: Geometry) -> int:
        """Of a thread: the sums, the rows of the filter in use, a row of the input.

        ptxas takes up to 40 fewer for sm_90.
        """
        taps = (self.rows - 1) * geometry.stride[1] // geometry.dilation[1] + 1
        held = self.rows * self.columns + min(taps, geometry.filter[1]) * geometry.filter[2]
        return self.values * (held + _places(geometry, 2, self.columns)) + 32

    def instructions(self, geometry: Geometry, *, converts: bool) -> int:
        """Of a thread, roughly: products, loads with their masks and conversions, stores, rest."""
        taps, pixels = math.prod(geometry.filter), self.rows * self.columns
        read = _places(geometry, 1, self.rows) * _places(geometry, 2, self.columns)
        loads = geometry.filter[0] * read * (3 + self.values * converts) + 2 * taps
        return self.values * taps * pixels + loads + (2 * self.values + 6) * pixels + 150

    def time(self, geometry: Geometry, *, converts: bool) -> float:
        """In cycles, if nothing but issuing instructions takes time, and a warp waits for itself
        every second cycle."""
        tiles_of_items = triton.cdiv(_items(geometry, self.rows, self.columns), self.items)
        blocks = tiles_of_items * triton.cdiv(geometry.groups * geometry.filters, self.filters)
        each = triton.cdiv(blocks, tiles.MULTIPROCESSORS)
        together = max(1, 65536 // (32 * self.warps * self.registers(geometry)))
        waits = 2 * triton.cdiv(each, together)
        return max(each * self.warps / 4, waits) * self.instructions(geometry, converts=converts)


def _places(geometry: Geometry, axis: int, pixels: int) -> int:
    """Places of the input along an axis that a run of output pixels reads."""
    steps = range(geometry.filter[axis])
    stride, dilation = geometry.stride[axis], geometry.dilation[axis]
    return len({i * stride + tap * dilation for i in range(pixels) for tap in steps})


def _items(geometry: Geometry, rows: int, columns: int) -> int:
    depth, height, width = geometry.out
    return geometry.batch * depth * triton.cdiv(height, rows) * triton.cdiv(width, columns)


def _blocks(problem: Problem, geometry: Geometry) -> list[Block]:
    """For pixels whose channels are neighbours in memory."""
    converts = problem.inputs[0].dtype != "float32"
    filters, taps = geometry.groups * geometry.filters, math.prod(geometry.filter)
    widths = {min(width, triton.next_power_of_2(filters)) for width in (16, 32, 64)}
    # erf branches, and LLVM moves a sum behind the branches of those that are stored before it
    branches = problem.attr("activation") == "gelu"
    best: dict[Block, float] = {}
    for rows, columns in BLOCKINGS:
        if rows * columns * taps > MOST_PRODUCTS or (branches and rows * columns > 8):
            continue
        for values in (2, 1) if branches else (4, 2, 1):
            fitting = [
                Block(items=128 * values // width, filters=width, rows=rows, columns=columns)
                for width in widths
            ]
            times = {block: block.time(geometry, converts=converts) for block in fitting}
            # of equal ones: 32 channels, so that a block has neighbours on all sides
            block = min(times, key=lambda b: (times[b], abs(b.filters - 32)))
            if block.registers(geometry) <= MOST_REGISTERS:
                best[block] = times[block]
    return sorted(best, key=best.__getitem__)[:MOST_CONFIGS]


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    block = Block(**(config or configs(problem)[0]))
    geometry = Geometry.of(problem)
    channelwise = _is_channelwise(geometry)
    filters = geometry.filters * geometry.groups
    items = _items(geometry, block.rows, block.columns)
    held = _with_weight(constants, channelwise)
    more: dict[str, Any] = {"SPANS": geometry.groups > 1}  # filters of one group, or whole groups
    if channelwise:
        more = {"items": items, "ROWS": block.rows, "COLUMNS": block.columns}
        more["WHOLE"] = filters % block.filters == 0

    def convolve(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out.numel() == 0:
            return out
        x, weight, bias, residual, scale = tiles.operands(problem, held, inputs)
        launch(
            channelwise_sums if channelwise else sums,
            (triton.cdiv(items, block.items), triton.cdiv(filters, block.filters)),
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
            PIXELS=block.items,
            FILTERS=block.filters,
            num_warps=block.warps,
            **tiles.destination(problem, geometry, x, bias, residual, scale, out),
            **more,
        )
        return out

    return convolve


def _with_weight(
    constants: Mapping[int, torch.Tensor], channelwise: bool
) -> dict[int, torch.Tensor]:
    """The constants, the weight among them packed; channelwise in float32, as it is used."""
    if not channelwise or 1 not in constants:
        return tiles.with_packed_weight(constants, filters_last=True)

    def convert(weight: torch.Tensor) -> torch.Tensor:
        return tiles.pack(weight.float(), filters_last=True)

    return {**constants, 1: packed(constants[1], ("conv.direct.channelwise",), convert)}


@triton.jit
def channelwise_sums(x, w, y, bias, scale, residual, items, pixels, alpha, beta, gamma,
                     filters: tl.constexpr, image: tl.constexpr, out: tl.constexpr,
                     x_strides: tl.constexpr, w_strides: tl.constexpr, y_strides: tl.constexpr,
                     residual_strides: tl.constexpr, EACH: tl.constexpr, C: tl.constexpr,
                     FILTER: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
                     DILATION: tl.constexpr, ACTIVATION: tl.constexpr, PIXELS_LAST: tl.constexpr,
                     WIDE: tl.constexpr, PIXELS: tl.constexpr, FILTERS: tl.constexpr,
                     ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """A tile: items × filters, each of which reads one channel. An item are ROWS × COLUMNS pixels.

    Rows of the input pass by, from the first to the last that an item reads, and rows of the filter
    with them. A value, loaded once, goes into all sums of the item that it is part of: in float32,
    for which there are twice the units of int32, and MOST_TAPS products of int8 are exact in it.

    Args:
        items: ROWS × COLUMNS pixels each, of all images.
        filters, image, out, x_strides, w_strides, y_strides, residual_strides: known when
            compiling: what they add to an address is part of the instruction that loads, and four
            channels are loaded at once also where there are 72, not a multiple of 16.
        WHOLE: FILTERS divides the filters.
    """
    T: tl.constexpr = FILTER[0]
    R: tl.constexpr = FILTER[1]
    S: tl.constexpr = FILTER[2]
    READ: tl.constexpr = (ROWS - 1) * STRIDE[1] + (R - 1) * DILATION[1] + 1
    WIDTH: tl.constexpr = (COLUMNS - 1) * STRIDE[2] + (S - 1) * DILATION[2] + 1
    item = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    k = tl.program_id(1) * FILTERS + tl.arange(0, FILTERS)
    strips, across = tl.cdiv(out[1], ROWS), tl.cdiv(out[2], COLUMNS)
    q = item % across * COLUMNS
    p = item // across % strips * ROWS
    plane = item // across // strips
    n, o = plane // out[0], plane % out[0]
    if WIDE:
        n, k = n.to(tl.int64), k.to(tl.int64)
    d, h, v, first = first_input(n, o, p, q, x_strides, STRIDE, PADDING)
    inside_k = place(item, k < filters, PIXELS_LAST)[1]
    x_m, x_k = place(first, k // EACH * x_strides[1], PIXELS_LAST)
    w_k = place(first, k * w_strides[0], PIXELS_LAST)[1]
    from_x = x + (x_m + x_k)
    first_column = place(v, k, PIXELS_LAST)[0]
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (no_sums(from_x, COLUMNS),)  # noqa: RUF005
    for t in tl.static_range(T):
        inside = item < items
        if PADDING[0] > 0:
            inside = inside & (d + t * DILATION[0] >= 0) & (d + t * DILATION[0] < image[0])
        height = tl.where(inside, image[1], 0)
        taps = ()
        for row in tl.static_range(READ):
            if is_tap(row, R, DILATION[1]):
                at = w + (w_k + (t * w_strides[2] + row // DILATION[1] * w_strides[3]))
                taps = taps + (load_taps(at, inside_k, S, w_strides[4], WHOLE),)  # noqa: RUF005
            width = place(tl.where(is_below(h + row, height), image[2], 0), k, PIXELS_LAST)[0]
            values = load_values(
                from_x + (t * DILATION[0] * x_strides[2] + row * x_strides[3]),
                first_column, width, inside_k, WIDTH, x_strides[4], WHOLE,
            )  # fmt: skip
            added = ()
            for i in tl.static_range(ROWS):
                if is_tap(row - i * STRIDE[1], R, DILATION[1]):
                    tap = taps[(row - i * STRIDE[1]) // DILATION[1]]
                    more = add_products(sums[i], values, tap, COLUMNS, S, STRIDE[2],
                                        DILATION[2])  # fmt: skip
                    added = added + (more,)  # noqa: RUF005
                else:
                    added = added + (sums[i],)  # noqa: RUF005
            sums = added
    # all pixels of an item are stored as its first one, at an address moved on
    m = tl.where(item < items, (plane * out[1] + p) * out[2] + q, 0)
    height = tl.where(item < items, out[1], 0)
    for i in tl.static_range(ROWS):
        for j in tl.static_range(COLUMNS):
            end = tl.where((p + i < height) & (q + j < out[2]), pixels, 0)
            to, added = y + (i * y_strides[3] + j * y_strides[4]), residual
            if residual is not None:
                added = residual + (i * residual_strides[3] + j * residual_strides[4])
            # The same number, but not to LLVM: it pairs what an activation compares, and with it
            # the sums, which it then moves behind all loads: thousands of bytes are spilled.
            made = tl.clamp(sums[i][j], -float("inf"), float("inf"), tl.PropagateNan.ALL)
            store(made, to, bias, scale, added, m, k, 0, end, filters, out, y_strides,
                  residual_strides, alpha, beta, gamma, ACTIVATION, PIXELS_LAST, WIDE)  # fmt: skip


@triton.constexpr_function
def is_tap(distance, taps, dilation):
    """Whether a row at this distance below an output row's first one is under a tap."""
    return 0 <= distance <= (taps - 1) * dilation and distance % dilation == 0


@triton.jit
def is_below(number, limit):
    """Whether 0 ≤ number < limit, by one comparison."""
    return number.to(tl.uint32) < limit.to(tl.uint32)


@triton.jit
def no_sums(like, COLUMNS: tl.constexpr):
    """A row of COLUMNS accumulators."""
    sums = ()
    for _ in tl.static_range(COLUMNS):
        sums = sums + (tl.zeros(like.shape, tl.float32),)  # noqa: RUF005
    return sums


@triton.jit
def load_taps(at, inside_k, COUNT: tl.constexpr, PITCH: tl.constexpr, WHOLE: tl.constexpr):
    """A row of the filter."""
    taps = ()
    for s in tl.static_range(COUNT):
        if WHOLE:
            tap = tl.load(at + s * PITCH)
        else:
            tap = tl.load(at + s * PITCH, mask=inside_k, other=0.0)
        taps = taps + (tap.to(tl.float32),)  # noqa: RUF005
    return taps


@triton.jit
def load_values(at, v, width, inside_k, COUNT: tl.constexpr, PITCH: tl.constexpr,
                WHOLE: tl.constexpr):  # fmt: skip
    """A row of the input from column v on; zero beside the image, which is ``width`` wide."""
    values = ()
    for j in tl.static_range(COUNT):
        inside = is_below(v + j, width)
        if not WHOLE:
            inside = inside & inside_k
        value = tl.load(at + j * PITCH, mask=inside, other=0.0)
        values = values + (value.to(tl.float32),)  # noqa: RUF005
    return values


@triton.jit
def add_products(sums, values, taps, COLUMNS: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr,
                 DILATION: tl.constexpr):  # fmt: skip
    """A row of accumulators, and the products of a row of the input and one of the filter."""
    for s in tl.static_range(S):
        added = ()
        for j in tl.static_range(COLUMNS):
            value = values[j * STRIDE + s * DILATION]
            added = added + (tl.fma(value, taps[s], sums[j]),)  # noqa: RUF005
        sums = added
    return sums


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
