"""Tiles of a result that wait in registers: what all machine code of convolutions shares.

A table says for each item that a thread takes where its pixels and panels lie, another for each
place of the filter where a tile's pixels read; beside the image that one points to zeros. Every
address that the tables hold is checked before the code may run.

Source: the second is the indirection buffer of Dukhan, "The Indirect Convolution Algorithm" (2019).
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from tessella.device.packing import packed
from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2, AVX512, Assembler, At, InstructionSet
from tessella.kernels.epilogue.x86 import Constants
from tessella.kernels.shared.x86_shares import cut, edges
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

WORD = 4  # bytes: one channel of float32, two of bfloat16
# pixels of a tile, by its vectors: as many as registers allow
PIXELS = {AVX512: {4: 6, 3: 8, 2: 9, 1: 9}, AVX2: {3: 4, 2: 6, 1: 9}}
BLOCK_PIXELS = 96  # that one thread takes at a time, at least
# of what these read, where all panels meet them before the next ones: of a core's second cache half
BLOCK_IMAGE_BYTES = {AVX512: 2**20, AVX2: 2**18}
BLOCK_WEIGHT_BYTES = 2**18  # of the weight: they stay in a core's second cache
FEW_ITEMS = 8
# of an image: less is found near when it is read again
FAR_BYTES = {AVX512: 2**21, AVX2: 2**22}


@dataclass(frozen=True, kw_only=True)
class Panels:
    """How channels are cut into panels, which begin earlier where too few are left.

    Attributes:
        channels: of the result.
        vectors: of a panel.
        groups: that each read their own part of the image's channels; a group has as many channels
            as a vector has lanes at least, and a panel is of one group.
    """

    channels: int
    vectors: int
    lanes: int
    groups: int = 1

    @property
    def own(self) -> int:
        """The channels of a group."""
        return self.channels // self.groups

    @cached_property
    def span(self) -> int:
        """The channels from a panel's first to its last."""
        return min(self.vectors * self.lanes, self.own)

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """The first channel of each panel."""
        ends = range(self.own, self.channels + 1, self.own)
        inside = range(0, self.own, self.span)
        return tuple(end - max(self.own - i, self.span) for end in ends for i in inside)

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """The first channel of each vector, from the panel's on."""
        return tuple(min(v * self.lanes, self.span - self.lanes) for v in range(self.vectors))

    @property
    def computed(self) -> int:
        """Channels, those counted again that are computed again."""
        return len(self.begins) * self.vectors * self.lanes

    @property
    def overlap(self) -> bool:
        return self.computed > self.channels

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's rows, one a channel, in the order in which panels have them."""
        if not self.overlap:
            return tensor
        steps = (self.begins, self.columns, range(self.lanes))
        begins, columns, lanes = (torch.tensor(list(step)) for step in steps)
        return tensor[(begins[:, None, None] + columns[:, None] + lanes).flatten()]

    def together(self, most: int) -> Iterator[tuple[int, int]]:
        """Panels for one item, as (first, how many): neighbours, and one that overlaps alone."""
        each = len(self.begins) // self.groups
        alone = each - (self.own % self.span != 0)
        for group in range(0, len(self.begins), each):
            for first in range(0, alone, most):
                yield group + first, min(most, alone - first)
            for first in range(alone, each):
                yield group + first, 1


def indirection(problem: Problem, weight: torch.Tensor, pixels: int) -> torch.Tensor:
    """Where the pixels lie that each tile reads: distances in an image, -1 beside it.

    int32 [tiles, R·S, pixels], and [R·S, rest] for what makes no whole tile, in one row. Batch
    sizes share it: it goes when the weight does.
    """
    x, y, a = problem["input"], problem.output, problem.attrs
    moved = [tuple(a[name]) for name in ("stride", "padding", "dilation")]
    how = (x.shape[2:], pixel_bytes(x), y.shape[2:], *moved, pixels)
    return packed(weight, ("conv2d.x86 places", *how), lambda _: _places(problem, pixels))


def _places(problem: Problem, pixels: int) -> torch.Tensor:
    x, (_, _, rows, columns) = problem["input"], problem.output.shape
    (_, _, height, width), pitch = x.shape, pixel_bytes(x)
    a = problem.attrs

    def line(axis: int, length: int, kernel: int) -> torch.Tensor:
        """Places along an axis that each result reads under each tap: [length, kernel]."""
        stride, padding, dilation = (int(a[n][axis]) for n in ("stride", "padding", "dilation"))
        first = torch.arange(length)[:, None] * stride - padding
        return first + torch.arange(kernel) * dilation

    r, s = problem["weight"].shape[2:]
    down, along = line(0, rows, r)[:, None, :, None], line(1, columns, s)[None, :, None, :]
    inside = (down >= 0) & (down < height) & (along >= 0) & (along < width)
    found = torch.where(inside, (down * width + along) * pitch, -1).to(torch.int32)
    found = found.reshape(rows * columns, r * s)
    whole = rows * columns // pixels * pixels
    tiles = found[:whole].reshape(-1, pixels, r * s).transpose(1, 2)
    return torch.cat((tiles.reshape(-1), found[whole:].t().reshape(-1)))


# where things lie: the numbers of a call, of an item, and what a thread keeps on its stack
CALL_IMAGE, CALL_RESULT, CALL_RESIDUAL, CALL_ZEROS = map(code.given, range(4))
ITEM = range(0, 72, code.NUMBER)
IMAGE, RESULT, RESIDUAL, WEIGHT, BIAS, PLACES, COUNT, PANELS, HAS_REST = ITEM
STACK = range(0, 64, code.NUMBER)
BASE, ZEROS, LEFT, LEFT_PANELS, COLUMN, PANEL, TAPS, OWN_ITEM = STACK
POINTERS = ("rax", "rsi", "r8", "r9", "r10", "r11", "r14", "r15", "rbx")  # to a tile's pixels


@dataclass(frozen=True, kw_only=True)
class Tiles(ABC):
    """Tiles of ``pixels`` by ``vectors``, and machine code for them; sums are the first vectors.

    Attributes:
        rest: pixels of an image that make no whole tile.
        size: of a number, in bytes.
        taps: places of the filter.
        pitches: bytes from a pixel to the next: result, residual (None if there is none).
    """

    DEPTHWISE: ClassVar[bool] = False  # a panel reads its own channels of the image, not all

    isa: InstructionSet
    panels: Panels
    pixels: int
    rest: int
    size: int
    taps: int
    pitches: tuple[int, int | None]
    has_bias: bool
    activation: str | None
    floor: float

    @classmethod
    def of(
        cls,
        problem: Problem,
        vectors: int,
        pixels: int | None = None,
        groups: int = 1,
        **more: Any,
    ) -> Self:
        """Tiles for a problem; of as many pixels as registers allow if that is not said."""
        isa, y, residual = code.require_instructions(), problem.output, problem.epilogue.residual
        pixels = pixels or PIXELS[isa][vectors]
        return cls(
            isa=isa,
            panels=Panels(channels=y.shape[1], vectors=vectors, lanes=isa.lanes, groups=groups),
            pixels=pixels,
            rest=math.prod(y.shape[2:]) % pixels,
            size=y.itemsize,
            taps=math.prod(problem["weight"].shape[2:]),
            pitches=(pixel_bytes(y), None if residual is None else pixel_bytes(residual)),
            has_bias=problem.epilogue.bias is not None,
            activation=problem.epilogue.activation,
            floor=float(problem.epilogue.floor),
            **more,
        )

    @property
    def vectors(self) -> int:
        return self.panels.vectors

    @property
    def width(self) -> int:
        """The channels of a tile, those counted twice that are computed twice."""
        return self.vectors * self.isa.lanes

    def bound(
        self, problem: Problem, constants: Mapping[int, torch.Tensor], weight: torch.Tensor
    ) -> code.Launch:
        """The code with its table of items, for a weight that is laid out by panels."""
        bias = self._beside(problem, constants)
        places = self._indirection(problem, constants[1])
        zeros = torch.zeros(problem["input"].shape[1], dtype=torch.float32)
        items = self._items(problem, weight, bias, places)
        self._require_inside(problem, items, weight, bias, places)
        table, made = code.Table(items, weight, bias, places, zeros), _machine_code(self)
        beside = zeros.data_ptr()

        def numbers(x: torch.Tensor, *more: torch.Tensor) -> tuple[int, ...]:
            *residual, out = more
            added = residual[0].data_ptr() if residual else 0
            return x.data_ptr(), out.data_ptr(), added, beside

        return code.Launch(made, table, numbers)

    def _indirection(self, problem: Problem, weight: torch.Tensor) -> torch.Tensor:
        return indirection(problem, weight, self.pixels)

    def _beside(
        self, problem: Problem, constants: Mapping[int, torch.Tensor]
    ) -> torch.Tensor | None:
        """What panels read beside their weights, a row each: here the bias, in float32."""
        if 2 not in constants:
            return None
        return self.panels.laid_out(constants[2].float()).reshape(len(self.panels.begins), -1)

    def _items(
        self,
        problem: Problem,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        places: torch.Tensor,
    ) -> npt.NDArray[np.int64]:
        """The table of the items that threads take one by one: some pixels of an image and some
        panels of the weight.

        A row: distances of the image, the result and the residual, addresses of the weight, the
        bias and the places, how many tiles and panels, and whether pixels that make no whole tile
        follow.
        """
        x, y = problem["input"], problem.output
        pixels, image = math.prod(y.shape[2:]), math.prod(x.shape[2:]) * pixel_bytes(x)
        result, residual = self.pitches
        panel_bytes = weight[0].nbytes
        tiles = math.ceil(pixels / self.pixels)
        each = together = len(weight) // self.panels.groups
        if not self.DEPTHWISE:
            together = max(1, min(together, BLOCK_WEIGHT_BYTES // panel_bytes))
        most, by_blocks = self._block_pixels(problem, weight, math.ceil(len(weight) / together))
        least = math.ceil(tiles / (most // self.pixels))
        wanted = max(FEW_ITEMS, 2 * torch.get_num_threads())
        while together > 1 and y.shape[0] * least * math.ceil(len(weight) / together) < wanted:
            together = math.ceil(together / 2)
        halves = range(together.bit_length())
        some_panels = [[*self.panels.together(math.ceil(together / 2**i))] for i in halves]
        counts = tuple(tuple(count for _, count in some) for some in some_panels)
        blocks, way = cut(tiles, y.shape[0], counts, least, torch.get_num_threads())
        panel, some = np.array(some_panels[way], np.int64).T[..., None, None]
        column = np.array(self.panels.begins, np.int64)[panel] * self.size
        n = np.arange(y.shape[0])[:, None]
        first = np.array(edges(tiles, blocks))
        begin = first[:-1] * self.pixels
        has_rest = np.arange(blocks) == blocks - 1 if self.rest else np.zeros(blocks, np.int64)
        count = np.diff(first) - has_rest
        row = (
            n * image + (column if self.DEPTHWISE else self._group_bytes(x) * (panel // each)),
            (n * pixels + begin) * result + column,
            (n * pixels + begin) * (residual or 0) + column,
            weight.data_ptr() + panel * panel_bytes,
            0 if bias is None else bias.data_ptr() + panel * bias[0].nbytes,
            places.data_ptr() + begin * self.taps * places.itemsize,
            count,
            some,
            has_rest,
        )
        table = np.empty((len(panel), len(n), blocks, len(row)), np.int64)
        for number, values in enumerate(row):
            table[..., number] = values
        if by_blocks:
            table = table.transpose(1, 2, 0, 3)
        return table.reshape(-1, len(row))

    def _group_bytes(self, x: TensorMeta) -> int:
        """Of the channels of a pixel that a group reads."""
        return x.shape[1] // self.panels.groups * x.itemsize

    def _block_pixels(
        self, problem: Problem, weight: torch.Tensor, groups: int
    ) -> tuple[int, bool]:
        """The most pixels of a block, and whether it meets all panels before the next block: where
        to read all pixels again for each group of panels takes twice as long as to read the weight
        again for each block, which is a large one then.
        """
        if self.DEPTHWISE or self.panels.groups > 1:
            return BLOCK_PIXELS, True
        x, y = problem["input"], problem.output
        if groups == 1 or x.extent < FAR_BYTES[self.isa]:
            return BLOCK_PIXELS, False
        pixels = math.prod(y.shape[2:])
        of_pixel = x.extent / (y.shape[0] * pixels)
        most = max(BLOCK_PIXELS, int(BLOCK_IMAGE_BYTES[self.isa] / of_pixel))
        blocks = y.shape[0] * math.ceil(pixels / most)
        again = groups * x.extent > 2 * blocks * weight.nbytes
        return (most, True) if again else (BLOCK_PIXELS, False)

    def _require_inside(
        self,
        problem: Problem,
        items: npt.NDArray[np.int64],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        places: torch.Tensor,
    ) -> None:
        """Refuse a table that leads out of a tensor, whoever wrote it."""
        table = torch.from_numpy(items).T
        image, result, residual, panel, begin, _, count, panels, rest = table
        x, y, added = problem["input"], problem.output, problem.epilogue.residual
        pixels = self._pixels(count, rest)
        written = ((panels - 1) * self.width + self.panels.span) * self.size
        whole = torch.full_like(image, self._group_bytes(x))
        read = int(places.max()) + (written if self.DEPTHWISE else whole)
        code.require_inside("image", image, read, x.extent)
        code.require_inside("result", result, (pixels - 1) * pixel_bytes(y) + written, y.extent)
        if added is not None:
            spans = (pixels - 1) * pixel_bytes(added) + written
            code.require_inside("residual", residual, spans, added.extent)
        first = weight.data_ptr()
        code.require_inside("weight", panel - first, panels * weight[0].nbytes, weight.nbytes)
        if bias is not None:
            spans = panels * bias[0].nbytes
            code.require_inside("bias", begin - bias.data_ptr(), spans, bias.nbytes)
        self._require_places(table, places)

    def _pixels(self, count: Any, rest: Any) -> Any:
        """The pixels of so many tiles and perhaps the rest."""
        return count * self.pixels + rest * self.rest

    def _require_places(self, table: torch.Tensor, places: torch.Tensor) -> None:
        """Refuse items, the columns of the table, that would read beside the places."""
        place, count, rest = (table[ITEM.index(at)] for at in (PLACES, COUNT, HAS_REST))
        spans = self._pixels(count, rest) * self.taps * places.itemsize
        code.require_inside("places", place - places.data_ptr(), spans, places.nbytes)

    @abstractmethod
    def written(self, constants: Constants) -> Assembler:
        """The code."""

    def _begin_item(self, a: Assembler, kept_bytes: int) -> None:
        """Room on the stack, and ``_take_item``."""
        a.enter()
        a.subtract("rsp", kept_bytes)
        self._take_item(a)

    def _take_item(self, a: Assembler) -> None:
        """The next item, to rbx; where its image and the zeros are, is kept. rdi: the call."""
        code.take_item(a, "rbx", len(ITEM))
        a.load("rax", CALL_IMAGE)
        a.add_stored("rax", At(base="rbx", distance=IMAGE))
        a.store(kept(BASE), "rax")
        a.load("rcx", CALL_ZEROS)
        a.subtract("rcx", "rax")
        a.store(kept(ZEROS), "rcx")

    def _end_items(self, a: Assembler, kept_bytes: int) -> None:
        """The next item, and after the last the end."""
        a.jump("next")
        a.label("done")
        a.add("rsp", kept_bytes)
        a.leave()

    def _each_tile(self, a: Assembler, name: str, tile: Callable[[str, int], None]) -> None:
        """All tiles of the item, under the panel whose distance ``COLUMN`` is.

        r13, r12: a tile in the result and the residual; rbp: its places.

        Args:
            tile: writes the code of one, given its name and how many pixels it has.
        """
        a.load("rbx", kept(OWN_ITEM))
        for register, base, place in (
            ("r13", CALL_RESULT, RESULT),
            ("r12", CALL_RESIDUAL, RESIDUAL),
        ):
            a.load(register, base)
            a.add_stored(register, At(base="rbx", distance=place))
            a.add_stored(register, kept(COLUMN))
        a.load("rbp", At(base="rbx", distance=PLACES))
        a.load("rax", At(base="rbx", distance=COUNT))
        a.store(kept(LEFT), "rax")
        a.compare("rax", 0)
        a.jump_if("je", f"{name}, rest")
        a.label(f"{name}, tile")
        tile(f"{name}, tile", self.pixels)
        result, residual = self.pitches
        a.add("r13", self.pixels * result)
        a.add("r12", self.pixels * (residual or 0))
        a.add_to_stored(kept(LEFT), -1)
        a.jump_if("jne", f"{name}, tile")
        a.label(f"{name}, rest")
        if self.rest:
            a.load("rbx", kept(OWN_ITEM))
            a.load("rax", At(base="rbx", distance=HAS_REST))
            a.compare("rax", 0)
            a.jump_if("je", f"{name}, end")
            tile(f"{name}, rest", self.rest)
        a.label(f"{name}, end")

    def _address(self, a: Assembler, register: str, pixel: int) -> None:
        """Where a pixel of the tile reads under the tap whose places rbp names."""
        a.load_short(register, At(base="rbp", distance=4 * pixel))
        a.load_if_negative(register, kept(ZEROS))
        a.add_stored(register, kept(BASE))

    def _begin_sums(self, a: Assembler, pixels: int, bias: str) -> None:
        """The sums of a tile as they begin: zero, or the bias that a register points to."""
        for i, (p, v) in enumerate(self._places(pixels)):
            if p:
                a.copy_vector(i, v)
            elif self.has_bias:
                a.load_vector(i, At(base=bias, distance=v * self.isa.vector_bytes))
            else:
                a.vector("vxorps", i, i, i)

    def _places(self, pixels: int) -> list[tuple[int, int]]:
        """The pixel and the vector of each sum."""
        return [(p, v) for p in range(pixels) for v in range(self.vectors)]

    def _column(self, vector: int) -> int:
        """The distance in bytes from the panel's first channel to the vector's first."""
        return self.panels.columns[vector] * self.size

    def _of_result(self, pixel: int, vector: int) -> At:
        return At(base="r13", distance=pixel * self.pitches[0] + self._column(vector))

    def _of_residual(self, pixel: int, vector: int) -> At | None:
        if self.pitches[1] is None:
            return None
        return At(base="r12", distance=pixel * self.pitches[1] + self._column(vector))

    def _store(self, a: Assembler, to: At, sums: int) -> None:
        if self.size == WORD:
            a.store_vector(to, sums)
        else:
            a.store_bfloat16(to, sums)


def kept(place: int) -> At:
    """What a thread keeps on its stack."""
    return At(base="rsp", distance=place)


@functools.lru_cache(256)
def _machine_code(tiles: Tiles) -> code.MachineCode:
    """The machine code of some tiles, which is the same for all batch sizes and all weights.

    A convolution is bound in 0.8 ms with it, and in 2.0 where code is assembled for each.
    """
    constants = Constants(tiles.isa)
    return code.MachineCode(tiles.written(constants).code(), constants)


def pixel_bytes(meta: TensorMeta) -> int:
    """Bytes from a pixel to the next."""
    assert meta.pixel_pitch is not None
    return meta.pixel_pitch * meta.itemsize
