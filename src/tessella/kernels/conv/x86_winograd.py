"""Winograd's F(4, 3) on a CPU with AVX-512 or AVX2: 3×3 convolutions of step 1 in float32,
with a quarter of the products. Slices of a volume are images, and those that a result reads more
channels of it: a filter of D×3×3 multiplies the tiles of D slices at once.

A thread takes some tiles of 4×4 results at a time, of any images. It transforms the 6×6 pixels that
each reads, channel by channel in vectors; multiplies, for each of the 36 places, the tiles' rows of
channels by that place's matrix; and transforms back, adding bias and residual and activating. What
stands between lies in the workspace, a part for each thread, as large as a processor's second or
third cache holds. Tables say where the pixels lie; beside the image they point to zeros, and
results beside it go to a place that nobody reads.

Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2015), F(4×4, 3×3). Its
error is some ten times that of plain sums, and of the largest pixel of a tile's 6×6, not of a
window's 3×3: an infinite one makes up to 16 results infinite or NaN, where plain sums have 9.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tessella.device.packing import packed
from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2, AVX512, Assembler, At, InstructionSet
from tessella.device.x86.code import CACHE_LINE, MAX_BYTES
from tessella.kernels.catalog import Config
from tessella.kernels.epilogue.x86 import Constants, activate
from tessella.kernels.shared import x86_convolution as x86
from tessella.kernels.shared.x86_ahead import Ahead
from tessella.kernels.shared.x86_convolution import UNROLLED
from tessella.kernels.shared.x86_tiles import (
    PIXELS,
    WORD,
    kept,
    pixel_bytes,
)
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

READ, MADE = 6, 4  # pixels along a tile's edge
MOST_SLICES = 5  # that a result reads; the code has each
# of where a volume's tiles lie: of 128³ with filters of three slices it is half of that
TABLE_BYTES = 2**27
PLACES, RESULTS = READ**2, MADE**2
WORTH_TILES = 8  # fewer do not repay four times the weight's bytes
MOST_THREADS = 8
# of a panel's words, of which every such one asks for a line: few groups of tiles read a panel
ASKING = {AVX512: 1, AVX2: 2}
# of the workspace's part for a thread: about the second cache, and what a third one has for a core
PART_BYTES = (3 * 2**17, 3 * 2**19)
WIDE = 4  # vectors
FILTER = (
    (1 / 4, 0, 0), (-1 / 6, -1 / 6, -1 / 6), (-1 / 6, 1 / 6, -1 / 6), (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6), (0, 0, 1),
)  # fmt: skip


def fits(problem: Problem) -> str | None:
    if why := x86.refusal(problem):
        return why
    x, weight, attrs = problem["input"], problem["weight"], problem.attrs
    lanes = code.require_instructions().lanes
    if x.dtype != "float32":
        return "float32"
    if weight.shape[-2:] != (3, 3) or attrs["groups"] != 1:
        return "3×3 and one group"
    if _slices(problem) > MOST_SLICES:
        return f"a filter of at most {MOST_SLICES} slices"
    if {*attrs["stride"], *attrs["dilation"]} != {1}:
        return "stride and dilation 1"
    if weight.shape[0] % lanes or weight.shape[1] % lanes:
        return f"channels by {lanes}"
    if PLACES * math.prod(weight.shape) // 9 * WORD > MAX_BYTES:
        return "distances have 32 bits"
    table = _tiles(problem) * (PLACES * _slices(problem) + 2 * RESULTS) * WORD
    if len(x.shape) == 5 and table > TABLE_BYTES:
        return "too many tiles for a table of where they lie"
    images = (x, problem.output, problem.epilogue.residual)
    if max(m.extent for m in images if m is not None) > MAX_BYTES:
        return "distances have 32 bits"
    return None


def outclassed(problem: Problem) -> str | None:
    if _tiles(problem) < WORTH_TILES:
        return f"fewer than {WORTH_TILES} tiles"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    """By the tiles that a thread takes: what lies between is in its second cache, or its third;
    and where registers allow, wide panels, which fewer tiles fill."""
    isa = code.require_instructions()
    channels, filters = problem["weight"].shape[1], problem["weight"].shape[0]
    channels *= _slices(problem)
    vectors = next(v for v in (*sorted({2, *PIXELS[isa]} - {1}), 1) if _divides(filters, v, isa))
    total, tried = _tiles(problem), [(vectors, most) for most in PART_BYTES]
    if isa == AVX512 and _divides(filters, WIDE, isa):
        tried.append((WIDE, PART_BYTES[-1]))
    found: list[Config] = []
    for vectors, most in tried:
        pixels = PIXELS[isa][vectors]
        some = max(2 * pixels, most // (PLACES * (channels + filters) * WORD))
        items = math.ceil(total / some)
        tiles = math.ceil(math.ceil(total / items) / pixels) * pixels
        if (config := {"vectors": vectors, "tiles": tiles}) not in found:
            found.append(config)
    return tuple(found)


def _divides(filters: int, vectors: int, isa: InstructionSet) -> bool:
    return filters % (vectors * isa.lanes) == 0


def _tiles(problem: Problem) -> int:
    images, _, *slices, rows, columns = problem.output.shape
    return images * math.prod(slices) * math.ceil(rows / MADE) * math.ceil(columns / MADE)


def _slices(problem: Problem) -> int:
    """How many a result reads: the filter's, 1 of an image."""
    return math.prod(problem["weight"].shape[2:-2])


def workspace_bytes(problem: Problem, **config: int) -> int:
    tiles = _Tiles.of(problem, config)
    return _threads(problem, tiles) * tiles.part_bytes + CACHE_LINE


def _threads(problem: Problem, tiles: _Tiles) -> int:
    """How many threads have a part of the workspace."""
    return min(MOST_THREADS, math.ceil(_tiles(problem) / tiles.tiles))


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: int) -> code.Launch:
    problem.require_constants(constants)
    tiles = _Tiles.of(problem, config)
    weight, bias = _weight(constants[1], tiles), constants.get(2)
    if bias is None:
        bias = torch.zeros(tiles.filters, dtype=torch.float32)
    bias, zeros = bias.float().contiguous(), torch.zeros(tiles.channels, dtype=torch.float32)
    places = _places(problem)
    _require_inside(problem, places)
    items = _items(problem, tiles, places)
    table = code.Table(items, weight, bias, zeros, places)
    has_residual = problem.epilogue.residual is not None

    def numbers(x: torch.Tensor, *more: torch.Tensor) -> tuple[int, ...]:
        added = more[0].data_ptr() if has_residual else 0
        return (
            x.data_ptr(), more[-1].data_ptr(), added, zeros.data_ptr(),
            weight.data_ptr(), bias.data_ptr(),
        )  # fmt: skip

    return code.Launch(
        _machine_code(tiles),
        table,
        numbers,
        needed=workspace_bytes(problem, **config),
        parts=_threads(problem, tiles),
    )


def _weight(weight: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
    """[K, C, (D,) 3, 3] → transformed [36, panels, D · C, width]."""

    def pack(w: torch.Tensor) -> torch.Tensor:
        g = torch.tensor(FILTER, dtype=torch.float64)
        w = w.movedim(1, -3).flatten(1, -3)
        panels = w.reshape(-1, tiles.width, *w.shape[1:])
        made = torch.empty(PLACES, len(panels), w.shape[1], tiles.width, dtype=torch.float32)
        for number, panel in enumerate(panels):  # all at once take five times the memory
            u = torch.einsum("ir,kcrs,js->ijck", g, panel.double(), g)
            made[:, number] = u.flatten(0, 1)
        return made

    return packed(weight, ("conv.x86_winograd", tiles.width), pack)


_placed: weakref.WeakValueDictionary[tuple[object, ...], torch.Tensor] = (
    weakref.WeakValueDictionary()
)  # that a plan's steps hold: layers of one shape share a table


def _places(problem: Problem) -> torch.Tensor:
    metas = [problem["input"], problem.output, problem.epilogue.residual]
    lie = [(m.shape, pixel_bytes(m)) for m in metas if m is not None]
    key = *lie, tuple(problem.attrs["padding"]), _slices(problem)
    made = _placed.get(key)
    if made is None:
        made = _placed[key] = _laid(problem)
    return made


def _laid(problem: Problem) -> torch.Tensor:
    """int32 [tiles, 36 for each slice + 16 (+ 16)]: where a tile's pixels lie in the image, its
    results and its part of the residual; -1 beside them.
    """
    x, y, residual = problem["input"], problem.output, problem.epilogue.residual
    images, (made, rows, columns) = y.shape[0], _sides(y)
    down, along = (-(-size // MADE) for size in (rows, columns))
    front, top, left = (0, *problem.attrs["padding"])[-3:]

    def line(count: int, step: int, before: int, span: int, axis: int) -> torch.Tensor:
        """Places that each of so many reads of a span along an axis of [n, d, r, c, slices, …]."""
        first = torch.arange(count, dtype=torch.int32)[:, None] * step - before
        at = first + torch.arange(span, dtype=torch.int32)
        return at.reshape([count if i == axis else span if i == axis + 3 else 1 for i in range(7)])

    def lie(meta: TensorMeta, slices: int, edge: int, before: tuple[int, ...]) -> torch.Tensor:
        sides = _sides(meta)
        moves = zip((made, down, along), (1, MADE, MADE), before, (slices, edge, edge), strict=True)
        d, r, c = (line(*move, axis=i + 1) for i, move in enumerate(moves))
        inside = torch.ones(1, dtype=torch.bool)
        for at, side in zip((d, r, c), sides, strict=True):
            inside = inside & (at >= 0) & (at < side)
        n = torch.arange(images, dtype=torch.int32).reshape(-1, *[1] * 6) * sides[0]
        at = (((n + d) * sides[1] + r) * sides[2] + c) * pixel_bytes(meta)
        return torch.where(inside, at, -1).reshape(images * made * down * along, -1)

    parts = [lie(x, _slices(problem), READ, (front, top, left)), lie(y, 1, MADE, (0, 0, 0))]
    if residual is not None:
        parts.append(lie(residual, 1, MADE, (0, 0, 0)))
    return torch.cat(parts, 1)


def _sides(meta: TensorMeta) -> tuple[int, ...]:
    """Slices, rows and columns: an image is one slice."""
    return (1, *meta.shape[2:])[-3:]


def _require_inside(problem: Problem, places: torch.Tensor) -> None:
    """Refuse a table that leads out of a tensor, whoever wrote it."""
    x, y, added = problem["input"], problem.output, problem.epilogue.residual
    sizes = [PLACES * _slices(problem), RESULTS, *([] if added is None else [RESULTS])]
    metas = (x, y) if added is None else (x, y, added)
    names = ("image", "result", "residual")
    parts = torch.split(places, sizes, 1)
    for name, meta, part in zip(names, metas, parts, strict=False):
        begins = torch.stack(part.aminmax()).clamp(min=0).long()
        code.require_inside(
            name, begins, torch.full_like(begins, meta.shape[1] * WORD), meta.extent
        )


def _items(problem: Problem, tiles: _Tiles, places: torch.Tensor) -> npt.NDArray[np.int64]:
    """What threads take one by one: where some tiles' places lie, how many tiles and how many
    groups of them are multiplied.
    """
    begin = np.arange(0, _tiles(problem), tiles.tiles)
    count = np.minimum(tiles.tiles, _tiles(problem) - begin)
    groups = -(-count // tiles.pixels)
    first = places.data_ptr() + begin * places.shape[1] * places.itemsize
    return np.stack((first, count, groups), 1).astype(np.int64)


IMAGE, RESULT, RESIDUAL, ZEROS, WEIGHT, BIAS, PART, TAKEN = map(code.given, range(8))
_STACK = range(0, 88, code.NUMBER)
(OWN_PART, BASE, BESIDE, OUT_BASE, OUT_BESIDE, ADDED_BASE, ADDED_BESIDE, LEFT_PLACES,
 LEFT_PANELS, *_AHEAD) = _STACK  # fmt: skip
AHEAD = Ahead(pointer="r12", step=kept(_AHEAD[0]), end=kept(_AHEAD[1]))
POINTERS = len(_STACK) * code.NUMBER  # on the stack from here on: those to a tile's pixels
ADDED = POINTERS + RESULTS * code.NUMBER  # and to its part of the residual
BETWEEN = POINTERS + PLACES * code.NUMBER  # the vectors between two transforms


@dataclass(frozen=True, kw_only=True)
class _Tiles:
    """Machine code for some tiles at a time.

    Attributes:
        vectors: of a panel of the products; ``pixels``: rows of them, a row is one tile's.
        tiles: that a thread takes, so many pixels' multiple.
        channels: of a pixel that is read; ``slices`` of them are multiplied, one behind another.
    """

    isa: InstructionSet
    vectors: int
    tiles: int
    channels: int
    slices: int
    filters: int
    has_residual: bool
    activation: str | None
    floor: float

    @classmethod
    def of(cls, problem: Problem, config: Mapping[str, int]) -> _Tiles:
        filters, channels = problem["weight"].shape[:2]
        return cls(
            isa=code.require_instructions(),
            channels=channels,
            slices=_slices(problem),
            filters=filters,
            has_residual=problem.epilogue.residual is not None,
            activation=problem.epilogue.activation,
            floor=float(problem.epilogue.floor),
            **(config or configs(problem)[0]),
        )

    @property
    def pixels(self) -> int:
        return PIXELS[self.isa][self.vectors]

    @property
    def width(self) -> int:
        """Channels of a panel."""
        return self.vectors * self.isa.lanes

    @property
    def depth(self) -> int:
        """Channels of a tile that are multiplied."""
        return self.slices * self.channels

    @property
    def v_bytes(self) -> int:
        """From one place's transformed pixels to the next: a line more, as a cache has few places
        for what lies a power of two apart."""
        return self.tiles * self.depth * WORD + CACHE_LINE

    @property
    def m_bytes(self) -> int:
        """From one place's products to the next."""
        return self.tiles * self.filters * WORD + CACHE_LINE

    @property
    def part_bytes(self) -> int:
        """Of a thread: transformed pixels, products, and what nobody reads."""
        used = PLACES * (self.v_bytes + self.m_bytes) + self.filters * WORD
        return math.ceil(used / CACHE_LINE) * CACHE_LINE

    def written(self, constants: Constants) -> Assembler:
        """The code.

        rdi: the call; rbx: the item; r12: a tile's places; r13: tiles that are left; r14: the
        tile's row of the first place; rdx: the channel, in bytes; r11: constants.
        """
        a = Assembler(self.isa)
        with a.function(BETWEEN + PLACES * self.isa.vector_bytes):
            code.take_part(a, "rax", PART, TAKEN, self.part_bytes)
            a.store(kept(OWN_PART), "rax")
            a.add("rax", PLACES * (self.v_bytes + self.m_bytes))  # what nobody reads
            self._keep_base(a, OUT_BASE, OUT_BESIDE, RESULT)
            self._keep_base(a, ADDED_BASE, ADDED_BESIDE, RESIDUAL)
            a.load("rax", ZEROS)
            self._keep_base(a, BASE, BESIDE, IMAGE)
            with code.each_item(a, "rbx", 3):
                self._read(a, constants)
                self._multiply(a)
                self._make(a, constants)
        return a

    def _keep_base(self, a: Assembler, base: int, beside: int, tensor: At) -> None:
        """Keep where a tensor begins, and how far from there what rax points to lies."""
        a.load("rcx", tensor)
        a.store(kept(base), "rcx")
        a.move("rdx", "rax")
        a.subtract("rdx", "rcx")
        a.store(kept(beside), "rdx")

    @contextmanager
    def _each_tile(
        self, a: Assembler, name: str, distance: int, constants: Constants, channels: int
    ) -> Iterator[None]:
        """Code for each vector of so many channels of each tile of the item."""
        constants.begin(a)
        a.load("r12", At(base="rbx"))
        a.load("r13", At(base="rbx", distance=code.NUMBER))
        a.load("r14", kept(OWN_PART))
        a.add("r14", distance)
        with a.counted(name, "r13"):
            yield
            a.add("r12", (PLACES * self.slices + RESULTS * (1 + self.has_residual)) * WORD)
            a.add("r14", channels * WORD)

    def _point(self, a: Assembler, to: int, first: int, count: int, base: int, beside: int) -> None:
        """Addresses of what some of the tile's places say, on the stack."""
        for i in range(count):
            a.load_short("rax", At(base="r12", distance=(first + i) * WORD))
            a.load_if_negative("rax", kept(beside))
            a.add_stored("rax", kept(base))
            a.store(kept(to + i * code.NUMBER), "rax")

    def _read(self, a: Assembler, constants: Constants) -> None:
        """Bᵀ d B of the item's tiles."""
        vector = self.isa.vector_bytes
        with self._each_tile(a, "read", 0, constants, self.channels):
            for number in range(self.slices):
                if number:
                    a.add("r14", self.channels * WORD)
                self._point(a, POINTERS, number * PLACES, PLACES, BASE, BESIDE)
                a.set("rdx", 0)
                with a.stepped(f"read channels {number}", "rdx", vector, self.channels * WORD):
                    self._read_channels(a, constants)

    def _read_channels(self, a: Assembler, constants: Constants) -> None:
        vector = self.isa.vector_bytes
        for column in range(READ):
            for row in range(READ):
                a.load("rax", kept(POINTERS + (row * READ + column) * code.NUMBER))
                a.load_vector(row, At(base="rax", index="rdx"))
            for row, made in enumerate(_into(a, constants)):
                a.store_vector(kept(BETWEEN + (row * READ + column) * vector), made)
        for row in range(READ):
            for column in range(READ):
                a.load_vector(column, kept(BETWEEN + (row * READ + column) * vector))
            for column, made in enumerate(_into(a, constants)):
                place = (row * READ + column) * self.v_bytes
                a.store_vector(At(base="r14", index="rdx", distance=place), made)

    def _multiply(self, a: Assembler) -> None:
        """The products of each place.

        r8, r14: a panel of the weight, and its end; r9, r10: the place's tiles and products; rsi,
        r13: some tiles, and their products; r15: the panel's products; r11: groups that are left;
        r12: what is asked for.
        """
        a.load("r8", WEIGHT)
        a.load("r9", kept(OWN_PART))
        a.move("r10", "r9")
        a.add("r10", PLACES * self.v_bytes)
        a.store_number(kept(LEFT_PLACES), PLACES)
        with a.counted("place", kept(LEFT_PLACES)):
            a.move("r15", "r10")
            a.store_number(kept(LEFT_PANELS), self.filters // self.width)
            with a.counted("panel", kept(LEFT_PANELS)):
                a.move("r14", "r8")
                a.add("r14", self.depth * self.width * WORD)
                a.move(AHEAD.pointer, "r8")
                AHEAD.begin(a, self.depth * self.width * WORD)
                a.move("rsi", "r9")
                a.move("r13", "r15")
                a.load("r11", At(base="rbx", distance=2 * code.NUMBER))
                with a.counted("group", "r11"):
                    self._products(a)
                    AHEAD.pace(a, "asked", "rax")
                    a.add("rsi", self.pixels * self.depth * WORD)
                    a.add("r13", self.pixels * self.filters * WORD)
                a.move("r8", "r14")
                a.add("r15", self.width * WORD)
            a.add("r9", self.v_bytes)
            a.add("r10", self.m_bytes)

    def _products(self, a: Assembler) -> None:
        """Some tiles' channels by the panel."""
        sums, vector = self.vectors * self.pixels, self.isa.vector_bytes
        spread = sums + self.vectors
        spreads = min(2, self.isa.vectors - spread)
        for i in range(sums):
            a.vector("vxorps", i, i, i)
        a.move("rax", "r8")
        a.move("rdx", "rsi")
        a.label("words")
        for word in range(UNROLLED):  # lanes are a multiple of it
            for v in range(self.vectors):
                at = At(base="rax", distance=(word * self.vectors + v) * vector)
                a.load_vector(sums + v, at)
            for p in range(self.pixels):
                of_tile = spread + p % spreads
                at = At(base="rdx", distance=(p * self.depth + word) * WORD)
                a.broadcast(of_tile, at)
                for v in range(self.vectors):
                    a.vector("vfmadd231ps", p * self.vectors + v, sums + v, of_tile)
            if word % ASKING[self.isa] == 0:
                AHEAD.line(a)
        a.add("rax", UNROLLED * self.width * WORD)
        a.add("rdx", UNROLLED * WORD)
        a.compare("rax", "r14")
        a.jump_if("jne", "words")
        for p in range(self.pixels):
            for v in range(self.vectors):
                at = At(base="r13", distance=p * self.filters * WORD + v * vector)
                a.store_vector(at, p * self.vectors + v)

    def _make(self, a: Assembler, constants: Constants) -> None:
        """Aᵀ m A of the item's tiles, and what follows. rcx: the bias."""
        vector = self.isa.vector_bytes
        with self._each_tile(a, "make", PLACES * self.v_bytes, constants, self.filters):
            results = PLACES * self.slices
            self._point(a, POINTERS, results, RESULTS, OUT_BASE, OUT_BESIDE)
            if self.has_residual:
                self._point(a, ADDED, results + RESULTS, RESULTS, ADDED_BASE, ADDED_BESIDE)
            a.load("rcx", BIAS)
            a.set("rdx", 0)
            with a.stepped("make channels", "rdx", vector, self.filters * WORD):
                for column in range(READ):
                    for row in range(READ):
                        place = (row * READ + column) * self.m_bytes
                        a.load_vector(row, At(base="r14", index="rdx", distance=place))
                    for row, made in enumerate(_out_of(a, constants)):
                        a.store_vector(kept(BETWEEN + (row * READ + column) * vector), made)
                for row in range(MADE):
                    for column in range(READ):
                        a.load_vector(column, kept(BETWEEN + (row * READ + column) * vector))
                    for column, made in enumerate(_out_of(a, constants)):
                        number = (row * MADE + column) * code.NUMBER
                        a.vector("vaddps", made, made, At(base="rcx", index="rdx"))
                        if self.has_residual:
                            a.load("rax", kept(ADDED + number))
                            a.vector("vaddps", made, made, At(base="rax", index="rdx"))
                        activate(a, self.activation, constants, made, 0, floor=self.floor)
                        a.load("rax", kept(POINTERS + number))
                        a.store_vector(At(base="rax", index="rdx"), made)


def _into(a: Assembler, constants: Constants) -> tuple[int, ...]:
    """Bᵀ times vectors 0 to 5, which it overwrites: where its six results are.

    4 d0 - 5 d2 + d4; ±(d3 - 4 d1) + d4 - 4 d2; ±2 (d3 - d1) + d4 - d2; 4 d1 - 5 d3 + d5.
    """

    def add(to: int, source: int, factor: float) -> None:
        a.vector("vfmadd231ps", to, source, constants.at(factor))

    a.copy_vector(6, 4)
    add(6, 0, 4.0)
    add(6, 2, -5.0)
    a.copy_vector(7, 4)
    add(7, 2, -4.0)
    a.copy_vector(8, 3)
    add(8, 1, -4.0)
    a.vector("vaddps", 9, 7, 8)
    a.vector("vsubps", 10, 7, 8)
    a.vector("vsubps", 7, 4, 2)
    a.vector("vsubps", 8, 3, 1)
    a.copy_vector(11, 7)
    add(11, 8, 2.0)
    add(7, 8, -2.0)
    add(5, 1, 4.0)
    add(5, 3, -5.0)
    return 6, 9, 10, 11, 7, 5


def _out_of(a: Assembler, constants: Constants) -> tuple[int, ...]:
    """Aᵀ times vectors 0 to 5: where its four results are, none of which is one of 0 to 5.

    With s, d = m1 ± m2 and p, q = m3 ± m4: m0 + s + p; d + 2 q; s + 4 p; d + 8 q + m5.
    """
    a.vector("vaddps", 6, 1, 2)
    a.vector("vsubps", 7, 1, 2)
    a.vector("vaddps", 8, 3, 4)
    a.vector("vsubps", 9, 3, 4)
    a.vector("vaddps", 10, 0, 6)
    a.vector("vaddps", 10, 10, 8)
    a.copy_vector(11, 7)
    a.vector("vfmadd231ps", 11, 9, constants.at(2.0))
    a.vector("vfmadd231ps", 6, 8, constants.at(4.0))
    a.vector("vaddps", 7, 7, 5)
    a.vector("vfmadd231ps", 7, 9, constants.at(8.0))
    return 10, 11, 6, 7


@functools.lru_cache(256)
def _machine_code(tiles: _Tiles) -> code.MachineCode:
    constants = Constants(tiles.isa, "r11")
    return code.MachineCode(tiles.written(constants).code(), constants)
