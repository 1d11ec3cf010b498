"""Convolutions of int8 on a CPU with AMX, with scale, bias, residual, activation and rounding.

A block of pixels by up to 64 channels of the result waits in four tiles, which 64 numbers of each
pixel at a time are multiplied into. Tiles of pixels are read from an image or from lines of it
(``amx_window``), else what each pixel reads is copied first, for all channels at once. Copies are
in the workspace: a thread's stack may be small. Between the products of a block stands what becomes
of the sums of the block before: scaling and rounding them takes as long as multiplying, and is done
in other parts of the processor.

Source: the table of places is that of ``shared.x86_tiles``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessella.core.errors import KernelError
from tessella.device.packing import packed
from tessella.device.x86 import code
from tessella.device.x86.assembler import Assembler, At
from tessella.device.x86.tiles import ROW_BYTES, ROWS, TileAssembler, configuration, require_tiles
from tessella.device.x86.tiles import TILES as MOST_TILES
from tessella.kernels.catalog import Config
from tessella.kernels.epilogue.x86 import (
    TEMPORARIES,
    Constants,
    load_order,
    pack_int8,
    store_packed,
)
from tessella.kernels.shared import x86_int8
from tessella.kernels.shared.amx_window import (
    LARGEST_WINDOW,
    Window,
    copies_refusal,
    copy_lines,
    copy_pixels,
    is_direct,
    places_of_image,
    row_bytes,
    rows_of_pixels,
    steps_in_a_row,
    steps_of,
    window_of,
)
from tessella.kernels.shared.x86_ahead import LINE, Ahead
from tessella.kernels.shared.x86_int8 import Int8Tiles
from tessella.kernels.shared.x86_tiles import (
    BASE,
    BIAS,
    CALL_RESIDUAL,
    CALL_RESULT,
    COLUMN,
    COUNT,
    FEW_ITEMS,
    HAS_REST,
    ITEM,
    LEFT,
    LEFT_PANELS,
    OWN_ITEM,
    PANEL,
    PANELS,
    PLACES,
    RESIDUAL,
    RESULT,
    STACK,
    WEIGHT,
    WORD,
    indirection,
    kept,
    pixel_bytes,
)
from tessella.operations.problem import Problem

TILE_BYTES = ROWS * ROW_BYTES
# of pixels that one thread takes at a time: in the second cache, or in the first where weights are
# read again from the second
BUFFER_BYTES, SMALL_BUFFER_BYTES = 2**18, 2**15
MOST_WEIGHT_BYTES = 2**20
MOST_THREADS = 64  # have a part of the workspace, of up to MOST_BUFFER_BYTES
UNROLLED = 16  # steps of 64 numbers, and four in the loop behind them
LOOP = 4
MOST_LINES = 16  # of weights, asked for in each step

PART, TAKEN = map(code.given, (4, 5))  # numbers of a call, behind those of all tiles
# on the stack, behind what all tiles keep: numbers, the tiles' former configuration, sums
MORE = range(len(STACK) * code.NUMBER, (len(STACK) + 10) * code.NUMBER, code.NUMBER)
NUMBERS, CALLER, SOURCE, AT_RESULT, AT_RESIDUAL, IS_FIRST, LEFT_OF_LINE, STEP, END, COPY = MORE
FORMER, SUMS = 192, 256
AHEAD = Ahead(pointer="r14", step=kept(STEP), end=kept(END))
ORDER = 31  # the vector for packing
FIRST_TILE = 4  # behind those of sums: of pixels, then of weights
TILES = {4: 1, 2: 2, 1: 2}  # of pixels in a block, by those of channels


def fits(problem: Problem) -> str | None:
    if why := x86_int8.refusal(problem):
        return why
    if is_direct(problem) or all(window_of(problem, tiles) for tiles in TILES.values()):
        return None
    return copies_refusal(problem)


def configs(problem: Problem) -> tuple[Config, ...]:
    """Blocks by their vectors of channels; and by lines or not where that computes some twice."""
    lanes, channels = code.require_instructions().lanes, problem["weight"].shape[0]
    made: list[Config] = []
    for vectors, tiles in TILES.items():
        if vectors * lanes > channels or (vectors == 1 and channels >= 2 * lanes):
            continue
        window = None if is_direct(problem) else window_of(problem, tiles)
        if window is not None:
            made.append({"vectors": vectors, "lines": True})
        if window is None or (not window.is_exact and copies_refusal(problem) is None):
            made.append({"vectors": vectors, "lines": False})
    return tuple(made)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: int) -> code.Launch:
    problem.require_constants(constants)
    require_tiles()
    config = x86_int8.one_of(configs(problem), config)
    tiles = _tiles_of(problem, config, constants)
    made = tiles.bound(problem, constants, _weight(constants[1], tiles))
    parts, needed = _parts(problem, tiles)
    return replace(made, parts=parts, needed=needed)


def workspace_bytes(problem: Problem, **config: int) -> int:
    tiles = _tiles_of(problem, x86_int8.one_of(configs(problem), config), {})
    return _parts(problem, tiles)[1]


def _parts(problem: Problem, tiles: _Tiles) -> tuple[int | None, int]:
    """How many threads have a part of the workspace, None if none needs one, and its bytes: the
    same for any number of threads.
    """
    if not tiles.copied:
        return None, 0
    begins, groups = tiles.cut(problem, FEW_ITEMS)
    parts = min(MOST_THREADS, problem.output.shape[0] * len(begins) * len(groups))
    return parts, parts * tiles.part_bytes + code.CACHE_LINE


def _tiles_of(
    problem: Problem, config: Mapping[str, int], constants: Mapping[int, torch.Tensor]
) -> _Tiles:
    """The tiles, which are the same with and without constants but for what these bound."""
    x, pixels = problem["input"], math.prod(problem.output.shape[2:])
    direct, vectors = is_direct(problem), config["vectors"]
    window = window_of(problem, TILES[vectors]) if config["lines"] else None
    if window is not None:
        rows, blocks, steps, stride = window.rows, window.tiles, steps_of(problem), window.along
        most = window.most_lines // window.together * window.blocks
    else:
        rows, blocks = rows_of_pixels(pixels, TILES[vectors])
        steps = steps_in_a_row(problem)
        stride = pixel_bytes(x) if direct else row_bytes(problem)
        few = math.prod(problem["weight"].shape) <= BUFFER_BYTES
        held = SMALL_BUFFER_BYTES if few else BUFFER_BYTES
        most = min(pixels // (rows * blocks), max(1, held // (rows * blocks * stride)))
    per_panel = math.ceil(pixels / (rows * blocks)) * steps  # steps of the products
    weight_lines = steps * vectors * TILE_BYTES // LINE
    tiles = _Tiles.of(
        problem,
        vectors,
        rows * blocks,
        tile_rows=rows,
        steps=steps,
        channels=x.shape[1],
        stride=stride,
        window=window,
        copied=window.copied if window else not direct,
        most_blocks=most,
        lines=min(MOST_LINES, math.ceil(weight_lines / per_panel)),
        signed=False,
        **x86_int8.epilogue_of(problem, constants),
    )
    return replace(tiles, rest=0)  # the last block begins earlier


def _weight(weight: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
    """[K, C, R, S] → [panels, steps, vectors, 16 words, 16 channels, 4]: as tiles are loaded."""
    panels, pieces = tiles.panels, 1 if tiles.window is None else weight.shape[2]

    def pack(w: torch.Tensor) -> torch.Tensor:
        rows = panels.laid_out(w.permute(0, 2, 3, 1).reshape(w.shape[0], -1))
        rows = rows.reshape(len(rows), pieces, -1)
        rows = torch.nn.functional.pad(rows, (0, -rows.shape[2] % ROW_BYTES))
        shape = (len(panels.begins), panels.vectors, panels.lanes, tiles.steps, ROWS, WORD)
        return rows.reshape(shape).permute(0, 3, 1, 4, 2, 5).contiguous()

    return packed(weight, ("conv2d.amx_int8", panels, pieces), pack)


@dataclass(frozen=True, kw_only=True)
class _Tiles(Int8Tiles):
    """Blocks of one or two tiles of pixels by one, two or four of channels.

    Attributes:
        tile_rows: pixels of a tile.
        steps: of 64 numbers of a pixel.
        channels: of the image.
        stride: bytes from a pixel to the next, in the image or in a copy.
        window: how tiles lie in lines, or None: what a pixel reads lies in one piece.
        copied: tiles are read from a copy, else from the image.
        most_blocks: blocks of pixels of an item.
        lines: of weights that are asked for in each step.
    """

    tile_rows: int
    steps: int
    channels: int
    stride: int
    window: Window | None
    copied: bool
    most_blocks: int
    lines: int

    @property
    def _blocks(self) -> int:
        """Tiles of pixels."""
        return self.pixels // self.tile_rows

    @property
    def _sums_bytes(self) -> int:
        return self.pixels * self.width * WORD

    @property
    def _numbers(self) -> int:
        """Numbers of the table of places for each pixel that is copied."""
        return 1 if self.window else self.taps

    @property
    def part_bytes(self) -> int:
        """Of a thread: what it copies for an item, and what is read and written behind that."""
        if self.window:
            copied = self.window.read(self.window.most_lines) * self.window.line_bytes
        else:
            copied = self.most_blocks * self.pixels * self.stride
        return math.ceil(copied / ROW_BYTES + 2) * ROW_BYTES

    def _indirection(self, problem: Problem, weight: torch.Tensor) -> torch.Tensor:
        if self.window is None:
            return indirection(problem, weight, 1)
        return places_of_image(problem, weight, self.window)

    def _items(
        self,
        problem: Problem,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        places: torch.Tensor,
    ) -> npt.NDArray[np.int64]:
        """As ``Tiles`` has them, but for the last pixels: a block of its own that begins earlier,
        and computes some again.
        """
        assert bias is not None
        x, y = problem["input"], problem.output
        pixels, image = math.prod(y.shape[2:]), math.prod(x.shape[2:]) * pixel_bytes(x)
        result, residual = self.pitches
        begins, groups = self.cut(problem, FEW_ITEMS if torch.get_num_threads() > 1 else 1)
        rows = [
            (
                n * image,
                (n * pixels + begin) * result + self.panels.begins[panel] * self.size,
                (n * pixels + begin) * (residual or 0) + self.panels.begins[panel] * self.size,
                weight.data_ptr() + panel * weight[0].nbytes,
                bias.data_ptr() + panel * bias[0].nbytes,
                places.data_ptr() + places.itemsize * self._places_of(begin, count)[0],
                count,
                some,
                self._places_of(begin, count)[1] // self._numbers,
            )
            for panel, some in groups
            for n in range(y.shape[0])
            for begin, count in begins
        ]
        return np.array(rows, np.int64)

    def cut(
        self, problem: Problem, wanted: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """An image's pixels and the panels by items, of which some are wanted: the first pixel of
        each and how many blocks, the first panel and how many.
        """
        y, window, panels = problem.output, self.window, len(self.panels.begins)
        pixels, together = math.prod(y.shape[2:]), panels
        step = 1 if window is None else window.blocks  # blocks that stay together
        whole = pixels // self.pixels if window is None else window.lines // window.together * step
        most = min(whole, self.most_blocks)
        while most > step and y.shape[0] * math.ceil(whole / most) < wanted:
            most = math.ceil(most / 2 / step) * step
        runs = math.ceil(whole / most)
        if y.shape[0] * runs > 1:  # weights stay in the second cache from one item to the next
            together = max(1, min(together, MOST_WEIGHT_BYTES // self._panel_bytes))
        while together > 1 and y.shape[0] * runs * math.ceil(panels / together) < wanted:
            together = math.ceil(together / 2)
        counts = [min(most, whole - i * most) for i in range(runs)]
        begins = [(i * int(self._pixels(most, 0)), count) for i, count in enumerate(counts)]
        if window is None and pixels % self.pixels:
            begins.append((pixels - self.pixels, 1))
        return begins, list(self.panels.together(together))

    def _pixels(self, count: Any, rest: Any) -> Any:
        if self.window is None:
            return super()._pixels(count, rest)
        return count // self.window.blocks * self.window.together * self.window.width

    def _places_of(self, begin: int, blocks: int) -> tuple[int, int]:
        """The places that an item reads: the first, and how many."""
        if self.window is None:
            return begin * self._numbers, blocks * self.pixels * self._numbers
        line = begin // self.window.width * self.window.stride[0]
        lines = self.window.read(int(self._pixels(blocks, 0)) // self.window.width)
        return line * self.window.image[0], lines * self.window.image[0]

    def _require_places(self, table: torch.Tensor, places: torch.Tensor) -> None:
        """And items that read other places than their blocks need, or more than a copy holds."""
        place, blocks, read = (table[ITEM.index(at)] for at in (PLACES, COUNT, HAS_REST))
        spans = read * self._numbers * places.itemsize
        code.require_inside("places", place - places.data_ptr(), spans, places.nbytes)
        wanted = [self._places_of(0, n)[1] // self._numbers for n in blocks.tolist()]
        if self.window and (blocks % self.window.blocks).any():
            wanted = []  # a line in part
        if int(blocks.max()) > self.most_blocks or read.tolist() != wanted:
            raise KernelError(
                "machine code would leave its copy of the image",
                seen=f"items of {int(blocks.max())} blocks, {int(read.max())} pixels copied",
                fix="report the problem that it was asked for",
            )

    def written(self, constants: Constants) -> Assembler:
        """The code.

        rdi: the call; rsi, rax: where the pixels of a block lie, and how far apart; rcx, rdx: its
        weights and a row of them; r13, r12, rbx: of the block before, the result, the residual, and
        its scale and bias.
        """
        constants.pointer = "r15"
        a = TileAssembler(self.isa)
        a.enter()
        a.move("rax", "rsp")
        a.subtract("rsp", SUMS + self._sums_bytes)
        a.clear_low_bits("rsp", x86_int8.ALIGNED)
        a.store(kept(CALLER), "rax")
        if self.copied:
            code.take_part(a, "rax", PART, TAKEN, self.part_bytes)
            a.store(kept(COPY), "rax")
        constants.begin(a)
        load_order(a, constants, ORDER)
        if rest := self.channels % ROW_BYTES:
            a.set("rax", (1 << rest) - 1)
            a.mask(1, "rax")
        of_pixels = [self.tile_rows] * (FIRST_TILE + self._blocks)
        of_weights = [ROWS] * (MOST_TILES - len(of_pixels))
        shape = configuration([*of_pixels, *of_weights], [ROW_BYTES] * MOST_TILES)
        place = constants.held("tiles", shape.view(torch.float32))
        with a.configured(place, kept(FORMER)):
            self._take_item(a)
            self._item(a, constants)
            a.jump("next")
            a.label("done")
        a.load("rsp", kept(CALLER))
        a.leave()
        return a

    def _item(self, a: TileAssembler, constants: Constants) -> None:
        a.store(kept(OWN_ITEM), "rbx")
        if self.copied:
            self._copy_pixels(a)
        for place, source in ((PANEL, WEIGHT), (LEFT_PANELS, PANELS), (NUMBERS, BIAS)):
            a.load("rcx", At(base="rbx", distance=source))
            a.store(kept(place), "rcx")
        a.store_number(kept(COLUMN), 0)
        a.store_number(kept(IS_FIRST), 1)
        a.label("panel")
        a.load(AHEAD.pointer, kept(PANEL))
        AHEAD.begin(a, self._panel_bytes)
        a.store_number(AHEAD.step, self.lines * LINE)
        self._begin_panel(a)
        a.label("block")
        self._products(a, constants)
        for b in range(self._blocks):
            for v in range(self.vectors):
                at = SUMS + b * self.tile_rows * self.width * WORD + v * ROW_BYTES
                a.store_tile(At(base="rsp", index="rbp", distance=at), b * self.vectors + v)
        a.load("r13", kept(AT_RESULT))
        a.load("r12", kept(AT_RESIDUAL))
        a.load("rbx", kept(NUMBERS))
        AHEAD.pace(a, "asked", "rcx")
        a.store_number(kept(IS_FIRST), 0)
        self._next(a)
        a.add_to_stored(kept(LEFT), -1)
        a.jump_if("jne", "block")
        a.add_to_stored(kept(PANEL), self._panel_bytes)
        a.add_to_stored(kept(NUMBERS), 3 * self.width * WORD)
        a.add_to_stored(kept(COLUMN), self.width * self.size)
        a.add_to_stored(kept(LEFT_PANELS), -1)
        a.jump_if("jne", "panel")
        for write in self._endings(a, constants):
            write()

    def _next(self, a: Assembler) -> None:
        """To the next block; in a window the last of a line may begin earlier, and behind it the
        next line begins.
        """
        window, apart = self.window, self.stride
        if window is None or window.blocks == 1:
            line = self.pixels * apart
            if window is not None:
                line = window.together * window.stride[0] * window.line_bytes
            self._move(a, self.pixels, line)
            return
        last = window.width - (window.blocks - 1) * self.pixels
        a.add_to_stored(kept(LEFT_OF_LINE), -1)
        a.jump_if("je", "next line")
        if last != self.pixels:
            a.load("rcx", kept(LEFT_OF_LINE))
            a.compare("rcx", 1)
            a.jump_if("je", "last of the line")
        self._move(a, self.pixels, self.pixels * apart)
        a.jump("moved")
        if last != self.pixels:
            a.label("last of the line")
            self._move(a, last, last * apart)
            a.jump("moved")
        a.label("next line")
        line = window.stride[0] * window.line_bytes
        self._move(a, self.pixels, line - (window.width - self.pixels) * apart)
        a.store_number(kept(LEFT_OF_LINE), window.blocks)
        a.label("moved")

    def _move(self, a: Assembler, pixels: int, source: int) -> None:
        result, residual = self.pitches
        a.add_to_stored(kept(AT_RESULT), pixels * result)
        a.add_to_stored(kept(AT_RESIDUAL), pixels * (residual or 0))
        a.add_to_stored(kept(SOURCE), source)

    @property
    def _panel_bytes(self) -> int:
        return self.steps * self.vectors * TILE_BYTES

    def _begin_panel(self, a: Assembler) -> None:
        """The first block under the panel whose distance ``COLUMN`` is."""
        a.load("r11", kept(OWN_ITEM))
        for kept_at, base, place in (
            (AT_RESULT, CALL_RESULT, RESULT),
            (AT_RESIDUAL, CALL_RESIDUAL, RESIDUAL),
        ):
            a.load("rcx", base)
            a.add_stored("rcx", At(base="r11", distance=place))
            a.add_stored("rcx", kept(COLUMN))
            a.store(kept(kept_at), "rcx")
        if not self.copied:
            a.load("rcx", At(base="r11", distance=PLACES))
            a.load_short("rcx", At(base="rcx"))
            a.add_stored("rcx", kept(BASE))
        else:
            a.load("rcx", kept(COPY))
        a.store(kept(SOURCE), "rcx")
        a.load("rcx", At(base="r11", distance=COUNT))
        a.store(kept(LEFT), "rcx")
        if self.window:
            a.store_number(kept(LEFT_OF_LINE), self.window.blocks)

    def _copy_pixels(self, a: Assembler) -> None:
        """What the item's pixels read, to the thread's part of the workspace."""
        a.load("rbp", At(base="rbx", distance=PLACES))
        a.load("r9", At(base="rbx", distance=HAS_REST))
        a.load("r10", kept(COPY))
        if self.window and self.window.before is not None:
            copy_lines(a, self.window, self.window.before)
        else:
            step = self.window.pitch if self.window else self.stride
            copy_pixels(a, self.channels, self._numbers, step)

    def _products(self, a: TileAssembler, constants: Constants) -> None:
        """All products of a block, and between them the ending of the one before, if there is."""
        a.load("rsi", kept(SOURCE))
        a.load("rcx", kept(PANEL))
        a.set("rax", self.stride)
        a.set("rdx", ROW_BYTES)
        a.set("rbp", self.width * WORD)
        for i in range(self._blocks * self.vectors):
            a.zero_tile(i)
        if self.pitches[1] is not None:
            a.load("r10", kept(AT_RESIDUAL))
            for p in range(self.pixels):
                a.prefetch(At(base="r10", distance=p * self.pitches[1]))
        together = min(LARGEST_WINDOW if self.window else UNROLLED, self.steps)
        a.load("r9", kept(IS_FIRST))
        a.compare("r9", 0)
        a.jump_if("je", "second")
        self._steps_and(a, together, [])
        a.jump("others")
        a.label("second")
        self._steps_and(a, together, self._endings(a, constants))
        a.label("others")
        times, left = divmod(self.steps - together, LOOP)
        if times:
            a.set("r9", times)
            with a.counted("more", "r9"):
                self._steps_and(a, LOOP, [])
        if left:
            self._steps_and(a, left, [])

    def _steps_and(self, a: TileAssembler, steps: int, between: list[Callable[[], None]]) -> None:
        """So many steps, and the pointers behind them; other code in equal parts between them."""
        slots = steps * self._blocks * self.vectors
        done = slot = 0
        for step in range(steps):
            for i in range(max(self._blocks, self.vectors)):
                self._load(a, step, i)
                for block, v in self._ready(i):
                    sums = block * self.vectors + v
                    a.multiply_tiles("tdpbssd", sums, FIRST_TILE + block, self._of_weights(v))
                    slot += 1
                    until = len(between) * slot // slots
                    for write in between[done:until]:
                        write()
                    done = until
            for line in range(self.lines):
                a.prefetch(At(base=AHEAD.pointer, distance=line * LINE), cache=2)
            a.add_stored(AHEAD.pointer, AHEAD.step)
        a.add("rsi", steps * ROW_BYTES)  # of a window there are no more steps
        a.add("rcx", steps * self.vectors * TILE_BYTES)

    def _load(self, a: TileAssembler, step: int, i: int) -> None:
        if i < self._blocks:
            at = self._distance(step) + i * self._second
            a.load_tile(FIRST_TILE + i, At(base="rsi", index="rax", distance=at))
        if i < self.vectors:
            at = (step * self.vectors + i) * TILE_BYTES
            a.load_tile(self._of_weights(i), At(base="rcx", index="rdx", distance=at))

    @property
    def _second(self) -> int:
        """The distance of a block's second tile of pixels from the first."""
        return self.window.second if self.window else self.tile_rows * self.stride

    def _distance(self, step: int) -> int:
        """What a tile of pixels reads in a step, from the block's begin on."""
        if self.window is None:
            return step * ROW_BYTES
        return self.window.places[step]

    def _of_weights(self, vector: int) -> int:
        """A tile of weights: there are two or, for four vectors, three."""
        first = FIRST_TILE + self._blocks
        return first + vector % (MOST_TILES - first)

    def _ready(self, i: int) -> list[tuple[int, int]]:
        """The products whose second tile is the one loaded last."""
        all_ = [(b, v) for b in range(self._blocks) for v in range(self.vectors)]
        return [(b, v) for b, v in all_ if max(b, v) == i]

    def _endings(self, a: Assembler, constants: Constants) -> list[Callable[[], None]]:
        """What writes the ending of a block, some pixels each: of two a vector is packed."""
        pixels = range(self.pixels)
        some = 2 if self.vectors == 2 else 1
        together = [pixels[p : p + some] for p in pixels[::some]]
        return [partial(self._end, a, some, i, constants) for i, some in enumerate(together)]

    def _end(self, a: Assembler, pixels: Sequence[int], number: int, constants: Constants) -> None:
        first = number % 2 * 8
        spare = first + 8 - TEMPORARIES
        places = [(p, v) for p in pixels for v in range(self.vectors)]
        for i, (p, v) in enumerate(places):
            at = SUMS + (p * self.width + v * self.isa.lanes) * WORD
            self._finish(a, (p, v), first + i, kept(at), spare, constants)
        if not self.rounds:
            return
        relu = self.activation == "relu"
        made = pack_int8(a, constants, range(first, first + len(places)), ORDER, at_least_zero=relu)
        store_packed(a, self._of_result(pixels[0], 0), made, self.vectors)
        if len(pixels) == 2:
            a.store_upper_half(self._of_result(pixels[1], 0), made)
