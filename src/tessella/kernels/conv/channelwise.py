"""Convolution whose filters read one channel each: ``direct`` for depthwise layers.

What runs on the GPU is in ``channelwise_device``; here is how a layer is cut, by an estimate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tessella.core.integers import ceil_div
from tessella.device.launch import launch
from tessella.device.machine import gpu, multiprocessors
from tessella.device.packing import packed
from tessella.kernels.catalog import Call
from tessella.kernels.conv import tiles
from tessella.kernels.conv.channelwise_device import StripOfThread, channelwise_sums
from tessella.kernels.conv.tiles import Geometry
from tessella.operations.problem import Problem

MOST_TAPS = 49  # of a filter: its code is unrolled
# A thread's filters and columns, and the rows that it finishes in a step (0: a strip of one row).
# Each is a kernel, which all layers with this filter, stride and activation share.
SHAPES = {  # by the most taps
    9: ((4, 4, 1), (4, 2, 1), (2, 7, 1), (2, 4, 2), (2, 4, 1), (2, 4, 0), (1, 4, 0)),
    25: ((2, 4, 1), (2, 7, 1), (1, 7, 1), (2, 2, 1), (1, 4, 1), (2, 4, 0), (1, 4, 0)),
    49: ((1, 7, 1), (2, 4, 1), (1, 4, 1), (1, 4, 0)),
}
PIXELS_LAST_SHAPES = ((1, 1, 1), (1, 1, 0))  # neighbouring threads make neighbouring pixels
# With more taps a layer has a kernel of its own, which knows its channels: loads and stores need no
# instructions for addresses, a tenth of all.
SHARED_TAPS = 9
WARPS = 4
MOST_REGISTERS = 188  # estimated
MOST_LOADED = 24  # places of the input in a step: addresses take registers
MOST_LOADED_AT_ONCE = 72  # without steps: Triton takes seconds, and with twice as many minutes
MOST_HELD = 64  # numbers of a thread's filters that stay in registers
MOST_CONFIGS = 4
FAR = 1.35  # times the best estimate, and it is left out
LATENCY = 900  # clocks until what is loaded is there
BANDWIDTH = 18  # bytes that a multiprocessor moves in a clock: its share of the memory's
MOST_BLOCKS = 2**15  # along an axis of a grid
# elements between taps in a packed weight: one for all layers, and no power of two, or taps would
# meet in the cache
PITCH = 2080


def takes(geometry: Geometry) -> bool:
    """Whether filters read one channel each, and are small."""
    few = math.prod(geometry.filter) <= MOST_TAPS
    return geometry.channels == 1 and geometry.groups > 1 and few


@dataclass(frozen=True, kw_only=True)
class Strip:
    """What a thread makes: a configuration.

    Attributes:
        values: neighbouring filters.
        columns: of the output.
        lines: rows that are finished in a step; 0: one row, without steps.
        rows: of the output in a strip.
        vectors: of ``values`` filters, in a tile: neighbouring threads.
        warps: of a block.
    """

    values: int
    columns: int
    lines: int
    rows: int
    vectors: int
    warps: int = WARPS

    def holds(self, geometry: Geometry) -> bool:
        """Whether the filter stays in registers."""
        return math.prod(geometry.filter) * self.values <= MOST_HELD

    def loads(self, geometry: Geometry) -> int:
        """Places of the input that a step reads."""
        return _loads(geometry, self.columns, self.lines)

    def registers(self, geometry: Geometry, size: int) -> int:
        """Registers of a thread, roughly: sums, numbers, the filter, and what is being loaded.

        Args:
            size: bytes of a number of the input.
        """
        loads, taps = self.loads(geometry), 2 * geometry.filter[2]
        if self.lines == 0:
            return 32 + self.values * (self.columns + _places(geometry, self.columns) + taps)
        if self.holds(geometry):
            taps = math.prod(geometry.filter)
        rows = _lag(geometry) + self.lines
        held = self.values * (rows * self.columns + loads + taps)
        return held + loads * (1 + ceil_div(self.values * size, 4)) + 12

    def instructions(self, geometry: Geometry) -> float:
        """Instructions of a step, roughly: products, loads with conversions, addresses and masks,
        stores.
        """
        taps, lines = math.prod(geometry.filter), max(self.lines, 1)
        each = 5 if taps <= SHARED_TAPS else 2
        loads = self.loads(geometry) * (each + 1.5 * self.values)
        loads += 0 if self.holds(geometry) else taps
        stores = lines * self.columns * (each + 5 * self.values)
        return lines * taps * self.columns * self.values + loads + stores + 25

    def passes(self, geometry: Geometry, size: int) -> int:
        """Passes of a warp through the cache in a step, 128 bytes at a time."""
        loads = self.loads(geometry) * ceil_div(self.values * size, 4)
        return loads + (0 if self.holds(geometry) else math.prod(geometry.filter) * self.values)

    def nbytes(self, geometry: Geometry, size: int) -> int:
        """Bytes that a thread moves from and to memory in a step; what its neighbours read too
        counts once.
        """
        sums = max(self.lines, 1) * self.columns * self.values
        return sums * size * (math.prod(geometry.stride[1:]) + 1)

    def steps(self, geometry: Geometry) -> int:
        """Steps of the longest strip, without rows of the input beside the image."""
        if self.lines == 0:
            return 1
        stride, reach = geometry.stride[1], (geometry.filter[1] - 1) * geometry.dilation[1]
        read = 0
        for strip in (0, 1, geometry.out[1] // self.rows):
            first = strip * self.rows * stride - geometry.padding[1]
            end = min(geometry.image[1], first + (self.rows - 1) * stride + reach + 1)
            read = max(read, end - max(first, 0))
        return ceil_div(read, self.lines * stride)

    def across(self, geometry: Geometry) -> int:
        """Items of ``columns`` in a row of the output."""
        return ceil_div(geometry.out[2], self.columns)

    def grid(self, geometry: Geometry) -> tuple[int, int]:
        """Tiles of filters × strips of rows, and the blocks of threads of each."""
        threads = geometry.batch * geometry.out[0] * self.across(geometry) * self.vectors
        tiles_of_filters = geometry.groups * geometry.filters // (self.values * self.vectors)
        strips = ceil_div(geometry.out[1], self.rows)
        return tiles_of_filters * strips, ceil_div(threads, 32 * self.warps)

    def time(self, geometry: Geometry, size: int) -> float:
        """In clocks: of issuing instructions, of the cache, or of a warp that waits: for itself
        every second clock, and for what it loads."""
        each = ceil_div(math.prod(self.grid(geometry)), multiprocessors())
        together = max(1, gpu().registers // (32 * self.warps * self.registers(geometry, size)))
        instructions, passes = self.instructions(geometry), self.passes(geometry, size)
        nbytes = self.nbytes(geometry, size)

        def of(blocks: int) -> float:
            warps = blocks * self.warps
            issued = max(warps / 4, 2)
            memory = 32 * warps * nbytes / BANDWIDTH
            step = max(issued * instructions, warps * passes, memory, LATENCY)
            return 2 * LATENCY + 200 * issued + self.steps(geometry) * step

        full, rest = divmod(each, together)
        return full * of(together) + (of(rest) if rest else 0)


def _lag(geometry: Geometry) -> int:
    """Rows of sums that are begun, but not finished, between two steps."""
    return (geometry.filter[1] - 1) * geometry.dilation[1] // geometry.stride[1]


def _loads(geometry: Geometry, columns: int, lines: int) -> int:
    """Places of the input that a step reads, or a strip of one row."""
    rows = lines * geometry.stride[1] or geometry.filter[1]
    return geometry.filter[0] * rows * _places(geometry, columns)


@functools.lru_cache(maxsize=256)
def _places(geometry: Geometry, columns: int) -> int:
    """Places of the input in a row that a run of output pixels reads."""
    steps = range(geometry.filter[2])
    stride, dilation = geometry.stride[2], geometry.dilation[2]
    return len({i * stride + tap * dilation for i in range(columns) for tap in steps})


def configs(problem: Problem) -> list[Strip]:
    """Strips by estimated time: the best one of each shape, and another one of the best shape with
    far more or fewer rows, since that is no other kernel.
    """
    geometry = Geometry.of(problem)
    size = problem["input"].itemsize
    last = problem.output.format == "channels_last"
    shapes: tuple[tuple[int, int, int], ...] = PIXELS_LAST_SHAPES
    if last:
        taps = math.prod(geometry.filter)
        shapes = next(shapes for most, shapes in SHAPES.items() if taps <= most)
    ranked: dict[Strip, float] = {}
    for shape in shapes:
        ranked |= _strips(geometry, shape, size, last=last)
    order = sorted(ranked, key=ranked.__getitem__)
    best: dict[tuple[int, ...], Strip] = {}
    for strip in order:
        best.setdefault((strip.values, strip.columns, strip.lines), strip)
    first = order[0]
    near = [strip for strip in order if ranked[strip] <= FAR * ranked[first]]
    others = [
        strip
        for strip in near
        if replace(strip, rows=first.rows) == first and not 0.5 < strip.rows / first.rows < 2
    ]
    return [s for s in best.values() if s in near][:MOST_CONFIGS] + others[:1]


def _strips(
    geometry: Geometry, shape: tuple[int, int, int], size: int, *, last: bool
) -> dict[Strip, float]:
    """All strips of a shape, with their times; none if it takes too many registers."""
    most, columns, lines = shape
    while not lines and columns > 1 and _loads(geometry, columns, 0) > MOST_LOADED_AT_ONCE:
        columns //= 2
    filters, height = geometry.groups * geometry.filters, geometry.out[1]
    values, vectors = 1, filters
    if last:
        values = math.gcd(most, filters) if geometry.filters == 1 else 1
        vectors = _vectors(filters // values, values * size)
    heights = {ceil_div(height, n) for n in range(1, height + 1)} if lines else {1}
    strips = [
        Strip(values=values, columns=columns, lines=lines, rows=rows, vectors=vectors)
        for rows in sorted(heights, reverse=True)
    ]
    large = strips[0].registers(geometry, size) > MOST_REGISTERS
    if lines and (large or strips[0].loads(geometry) > MOST_LOADED):
        return {}
    return {strip: strip.time(geometry, size) for strip in strips}


def _vectors(vectors: int, nbytes: int) -> int:
    """Vectors of a tile: the fewest that divide all of them, fill whole sectors of 32 bytes, and
    are not too few.
    """
    for some in range(16, vectors):
        if vectors % some == 0 and some * nbytes % 32 == 0 and some * nbytes >= 64:
            return some
    return vectors


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], strip: Strip) -> Call:
    geometry = Geometry.of(problem)
    filters, across = geometry.groups * geometry.filters, strip.across(geometry)
    held = _packed(problem, constants)
    tiles_of_filters = filters // (strip.values * strip.vectors)
    cells, blocks = strip.grid(geometry)
    shared = math.prod(geometry.filter) <= SHARED_TAPS

    def convolve(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        x, weight, epilogue = problem.product_operands(held, inputs)
        bias, residual, scale = epilogue.bias, epilogue.residual, epilogue.scale
        ending = tiles.destination(problem, geometry, x, epilogue, out)
        whole = all(_is_whole(t, strip.values) for t in (x, out, residual) if t is not None)
        values = strip.values if whole else 1
        vectors = strip.vectors * strip.values // values
        steps = [_steps(t, values) for t in (x, out, residual)]
        axes = len(problem.output.shape) - 2
        depth = (geometry.image[0], geometry.out[0], geometry.padding[0], *(s[2] for s in steps))
        tap = tiles.strides(weight)
        launch(
            channelwise_sums,
            # for each value fewer, more threads
            _grid(cells, blocks * (strip.values // values)),
            x,
            weight,
            out,
            bias,
            scale,
            residual,
            (geometry.batch * geometry.out[0] * across * vectors, vectors, tiles_of_filters,
             across, strip.rows),
            (*geometry.image[1:], *geometry.out[1:]),
            tuple(geometry.padding[1:]),
            *(tuple(s[axis] for axis in (0, 1, 3, 4)) for s in steps),
            ending["factors"],
            WINDOW=(geometry.filter, geometry.stride, geometry.dilation),
            TAP=(tap[0], *tap[2:]),
            DEPTH=depth if axes == 3 else None,
            EACH=geometry.filters,
            STRIP=StripOfThread(
                THREADS=32 * strip.warps,
                VALUES=values,
                COLUMNS=strip.columns,
                LINES=strip.lines,
                HOLDS=strip.holds(geometry),
                X_COLUMN=None if shared else steps[0][4],
                Y_COLUMN=None if shared else steps[1][4],
            ),
            ENDING=ending["ENDING"],
            num_warps=strip.warps,
        )  # fmt: skip
        return out

    return convolve


def _grid(cells: int, blocks: int) -> tuple[int, int, int]:
    """Blocks of neighbouring tiles are neighbours; only the first axis may be long."""
    return cells, min(blocks, MOST_BLOCKS), ceil_div(blocks, MOST_BLOCKS)


def _is_whole(tensor: torch.Tensor, values: int) -> bool:
    """Whether neighbouring channels are neighbours in memory, ``values`` of them at a time."""
    others = [s for axis, s in enumerate(tensor.stride()) if axis != 1 and tensor.shape[axis] > 1]
    return values == 1 or (tensor.stride(1) == 1 and not any(s % values for s in others))


def _steps(tensor: torch.Tensor | None, values: int) -> list[int]:
    """Strides in units of ``values`` elements; the stride between channels in elements."""
    return [s if i == 1 else s // values for i, s in enumerate(tiles.strides(tensor))]


def _packed(problem: Problem, constants: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The constants as they are used: float32, and the weight's taps at a constant pitch."""

    def pack(weight: torch.Tensor) -> torch.Tensor:
        filters, _, *taps = weight.shape
        pitch = PITCH * ceil_div(filters, PITCH)
        made = weight.new_zeros((*taps, pitch), dtype=torch.float32)[..., :filters]
        made.copy_(weight[:, 0].movedim(0, -1))
        return made.movedim(-1, 0).unsqueeze(1)

    held = dict(constants)
    weight, bias, scale = problem.operation.positions(("weight", "bias", "scale"))
    for place, how in ((weight, pack), (bias, torch.Tensor.float), (scale, torch.Tensor.float)):
        given = constants.get(place)
        if given is not None and (place == weight or given.dtype != torch.float32):
            held[place] = packed(given, ("conv.channelwise",), how)
    return held
