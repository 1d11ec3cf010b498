"""Machine code for blocks of a product of bfloat16 in tiles of AMX: 32 rows by 32 channels."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX512, At
from tessella.device.x86.code import CACHE_LINE
from tessella.device.x86.tiles import (
    CONFIGURATION_BYTES,
    TileAssembler,
    configuration,
    require_tiles,
)
from tessella.kernels.epilogue.x86 import Constants, activate
from tessella.kernels.shared.x86_tiles import Panels, kept

ROWS, WIDTH = 32, 32  # of a block: two tiles by two
LANES = 16  # channels of a tile
SIZE, WORD = 2, 4  # bytes of a number, and of a sum
STEP = 32  # channels of the image that a product of tiles takes: 64 bytes
DIRECT, COPIED, FRAMED, SPREAD = range(4)  # how tiles reach rows
TILE_BYTES = 1024
BLOCK_BYTES = ROWS * WIDTH * WORD
LOWER = BLOCK_BYTES // 2  # from the sums of upper tiles to those of lower ones
PANEL_STEP_BYTES = 2 * TILE_BYTES  # of a panel's weights in a step
# Steps of a chunk, best first: as many of a panel's weights, 16 KB, stay in the first cache, while
# block after block comes from the second. Where both come from there, a step takes 26 ns, not 19.
CHUNKS = (8, 9, 7, 10, 6)
LEAST_CHUNKED = 12  # steps: what is less stays in the first cache anyway
AHEAD_BYTES = 2**16  # of a panel: what is so far ahead is asked for
PLACE = 8  # bytes: of a result, and of its part of the residual

IMAGE, RESULT, RESIDUAL, ZEROS, PART, TAKEN = map(code.given, range(6))
ITEM = range(0, 96, code.NUMBER)
(OF_IMAGE, OF_RESULT, OF_RESIDUAL, OF_WEIGHT, OF_BIAS, OF_PLACES, OF_RESULTS, OF_PANELS, OF_BLOCKS,
 OF_EARLIER, OF_COPIES, OF_NUMBER) = ITEM  # fmt: skip
_STACK = range(0, 144, code.NUMBER)
(LEFT_PANELS, LEFT_CHUNKS, LEFT_BLOCKS, RESULT_AT, RESIDUAL_AT, BIAS_AT, BESIDE, NOWHERE, NUMBER,
 AHEAD_AT, OWN_ITEM, ROWS_AT, CHUNK_ROWS, SUMS_AT, BLOCK_ROWS, BLOCK_RESULT, BLOCK_RESIDUAL,
 BLOCK_PLACES) = _STACK  # fmt: skip
SUMS, SPARE = 0, 16  # vectors: two of each row, and those for activations
TOGETHER = 4  # rows whose sums are finished side by side


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Lines of an image of few channels, spread to four with zeros, as a line of results sees them.

    Attributes:
        channels: of the image; ``width``: pixels of a line; ``before``: pixels of padding.
        count: of lines, one below the other; each has ``nbytes``.
    """

    channels: int
    width: int
    before: int
    count: int
    nbytes: int

    PIXEL: ClassVar[int] = 4 * SIZE  # bytes
    TOGETHER: ClassVar[int] = CACHE_LINE // PIXEL  # pixels of a vector

    def copy(self, a: TileAssembler) -> None:
        """rsi: the lines' places; r8: the image; rdx: where to; masks 1, 2: a vector's channels."""
        whole, rest = divmod(self.width, self.TOGETHER)
        for mask, pixels in ((1, self.TOGETHER), (2, rest)):
            a.set("rax", sum((2**self.channels - 1) << 4 * i for i in range(pixels)))
            a.mask(mask, "rax")
        a.vector("vxorps", 1, 1, 1)
        before = self.before * self.PIXEL
        a.set("r9", self.count)
        with a.counted("line", "r9"):
            a.load_short("rax", At(base="rsi"))
            a.load_if_negative("rax", kept(BESIDE))
            a.add("rax", "r8")
            a.add("rsi", WORD)
            a.move("rcx", "rdx")
            for distance in range(0, before, CACHE_LINE):
                a.store_vector(At(base="rcx", distance=distance), 1)
            for mask, times in ((1, whole), (2, int(rest > 0))):
                if times:
                    a.set("r10", times)
                    with a.counted(f"pixels {mask}", "r10"):
                        a.expand_words(0, At(base="rax"), mask)
                        a.store_vector(At(base="rcx", distance=before), 0)
                        a.add("rax", self.TOGETHER * self.channels * SIZE)
                        a.add("rcx", CACHE_LINE)
            filled = before + (whole + (rest > 0)) * CACHE_LINE
            for distance in range(0, self.nbytes - filled, CACHE_LINE):
                a.store_vector(At(base="rcx", distance=before + distance), 1)
            a.add("rdx", self.nbytes)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Machine code for blocks of rows by channels.

    Attributes:
        way: how tiles reach rows.
        seen: bytes of what a place of the filter sees; of lines that are spread, a line of it.
        taps: where those of a result lie in a framed image, in pixels from its first one, or in
            lines that are spread, in results.
        most_rows: of an item; ``together``: panels of one, at most.
        chunk: steps that all blocks of an item do before the next ones: a part of a panel's.
        ahead: lines of the next panel that are asked for in a step.
        pitches: bytes from a pixel to the next: image, result, residual (None if there is none).
        spread: what is copied of an image of few channels; ``along``: the step of its filter.
    """

    panels: Panels
    way: int
    seen: int
    taps: tuple[int, ...]
    most_rows: int
    together: int
    chunk: int
    ahead: int
    pitches: tuple[int, int, int | None]
    activation: str | None
    floor: float = 0.0
    spread: Lines | None = None
    along: int = 1

    @property
    def groups(self) -> list[tuple[int, int]]:
        """The first panel of each item and how many it has."""
        return list(self.panels.together(self.together))

    @property
    def _halves(self) -> range:
        """Of a panel's channels: the second is the first, and is left out, where 16 are all."""
        return range(2 if self.panels.columns[1] else 1)

    @property
    def lines(self) -> int:
        """Of what a place of the filter sees: as many steps."""
        return math.ceil(self.seen / CACHE_LINE)

    @property
    def steps(self) -> int:
        """Of a block, by a panel."""
        return len(self.taps) * self.lines

    @property
    def chunks(self) -> int:
        """Of a panel."""
        return self.steps // self.chunk

    @property
    def panel_bytes(self) -> int:
        return self.steps * PANEL_STEP_BYTES

    @property
    def pitch(self) -> int:
        """Bytes from a row to the next."""
        return {
            DIRECT: self.pitches[0],
            COPIED: CACHE_LINE,
            FRAMED: self.lines * CACHE_LINE,
            SPREAD: self.along * Lines.PIXEL,
        }[self.way]

    @property
    def step(self) -> int:
        """Bytes from a step's part of a row to the next one's."""
        return ROWS * CACHE_LINE if self.way == COPIED else CACHE_LINE

    @property
    def _block(self) -> int:
        """Bytes from a block's rows to the next one's."""
        whole = self.steps * CACHE_LINE if self.way == COPIED else self.pitch
        return ROWS * whole

    @property
    def part_bytes(self) -> int:
        """Of a thread: blocks' sums, how tiles were configured, what nobody reads, and copies."""
        if self.spread is not None:  # stores go as far as a vector behind the last line
            lines = self.spread.count * self.spread.nbytes
            return self._copies + math.ceil(lines / CACHE_LINE) * CACHE_LINE + CACHE_LINE
        copied = {
            DIRECT: 0,
            COPIED: self.most_rows * len(self.taps),
            FRAMED: self.most_rows + max(self.taps),
        }[self.way]
        return self._copies + copied * self.lines * CACHE_LINE

    @property
    def _sums(self) -> int:
        """Bytes of the sums: of one block, or of all that wait for a panel's next chunk."""
        return BLOCK_BYTES * (math.ceil(self.most_rows / ROWS) if self.chunks > 1 else 1)

    @property
    def _nobody(self) -> int:
        """Where in a thread's part results lie that nobody reads."""
        return self._sums + CONFIGURATION_BYTES

    @property
    def _copies(self) -> int:
        return self._nobody + WIDTH * SIZE

    def written(self, constants: Constants, tiles: torch.Tensor) -> TileAssembler:
        """The code. A block's sums leave their tiles when it has been multiplied, and are finished
        while the next one is: vectors compute beside tiles.

        rdi: the call; r12: a panel of the weight; r13: the thread's part, where sums lie first. Of
        the block before: rbp: its sums; r15, r11: its result and its residual, or where those of
        the image begin; rbx: the places of its rows; r10: constants.
        """
        a = TileAssembler(AVX512)
        with a.function(len(_STACK) * code.NUMBER):
            code.take_part(a, "r13", PART, TAKEN, self.part_bytes)
            a.store_number(kept(NUMBER), 0)
            a.set("r8", tiles.data_ptr())
            before = At(base="r13", distance=self._sums)
            with a.configured(At(base="r8"), before), code.each_item(a, "rbx", len(ITEM)):
                a.store(kept(OWN_ITEM), "rbx")
                self._item(a, constants)
        return a

    def _item(self, a: TileAssembler, constants: Constants) -> None:
        if self.way == DIRECT:
            a.load("rax", IMAGE)
            a.add_stored("rax", At(base="rbx", distance=OF_IMAGE))
            a.store(kept(ROWS_AT), "rax")
        else:
            self._copy(a)
        for to, base, distance in (
            (RESULT_AT, RESULT, OF_RESULT),
            (RESIDUAL_AT, RESIDUAL, OF_RESIDUAL),
        ):
            a.load("rax", base)
            a.add_stored("rax", At(base="rbx", distance=distance))
            a.store(kept(to), "rax")
        for to, distance in ((BIAS_AT, OF_BIAS), (LEFT_PANELS, OF_PANELS)):
            a.load("rax", At(base="rbx", distance=distance))
            a.store(kept(to), "rax")
        a.load("r12", At(base="rbx", distance=OF_WEIGHT))
        constants.begin(a)
        a.set("rbp", 0)  # no block was before
        with a.counted("panel", kept(LEFT_PANELS)):
            self._begin_panel(a)
            with a.counted("chunk", kept(LEFT_CHUNKS)):
                self._begin_chunk(a)
                with a.counted("block", kept(LEFT_BLOCKS)):
                    self._begin_earlier(a)
                    self._begin_sums(a)
                    a.compare("rbp", 0)
                    a.jump_if("je", "first")
                    self._multiply(a, "beside", constants)
                    a.jump("multiplied")
                    a.label("first")
                    self._multiply(a, "alone", None)
                    a.label("multiplied")
                    self._end_block(a)
                a.add("r12", self.chunk * PANEL_STEP_BYTES)
                a.add_to_stored(kept(CHUNK_ROWS), self.chunk * self.step)
            a.add_to_stored(kept(BIAS_AT), WIDTH * WORD)
            for place in (RESULT_AT, RESIDUAL_AT):
                a.add_to_stored(kept(place), WIDTH * SIZE)
        a.set("rcx", ROWS // TOGETHER)
        with a.counted("last rows", "rcx"):
            self._finish(a, TOGETHER, constants)

    def _begin_panel(self, a: TileAssembler) -> None:
        a.store_number(kept(LEFT_CHUNKS), self.chunks)
        a.load("rax", kept(ROWS_AT))
        a.store(kept(CHUNK_ROWS), "rax")

    def _begin_chunk(self, a: TileAssembler) -> None:
        a.store(kept(SUMS_AT), "r13")
        a.move("rax", "r12")
        a.add("rax", min(self.panel_bytes, AHEAD_BYTES) if self.chunks > 1 else self.panel_bytes)
        a.store(kept(AHEAD_AT), "rax")
        for to, source in (
            (BLOCK_ROWS, CHUNK_ROWS),
            (BLOCK_RESULT, RESULT_AT),
            (BLOCK_RESIDUAL, RESIDUAL_AT),
        ):
            a.load("rax", kept(source))
            a.store(kept(to), "rax")
        a.load("rcx", kept(OWN_ITEM))
        for to, distance in ((LEFT_BLOCKS, OF_BLOCKS), (BLOCK_PLACES, OF_RESULTS)):
            a.load("rax", At(base="rcx", distance=distance))
            a.store(kept(to), "rax")

    def _begin_sums(self, a: TileAssembler) -> None:
        """What the block's sums begin as: rcx, r8: upper and lower tiles; rdx: from row to row."""
        a.set("rdx", 0)
        a.load("rcx", kept(BIAS_AT))  # each row
        a.move("r8", "rcx")
        if self.chunks > 1:
            a.load("rax", kept(LEFT_CHUNKS))
            a.compare("rax", self.chunks)
            a.jump_if("je", "begun")
            a.set("rdx", WIDTH * WORD)
            a.load("rcx", kept(SUMS_AT))
            a.move("r8", "rcx")
            a.add("r8", LOWER)
            a.label("begun")

    def _end_block(self, a: TileAssembler) -> None:
        """The block's sums leave their tiles, and it becomes the block before if it is done."""
        a.set("rdx", WIDTH * WORD)
        a.load("rcx", kept(SUMS_AT))
        for down, along in itertools.product(range(2), self._halves):
            at = At(base="rcx", index="rdx", distance=down * LOWER + along * CACHE_LINE)
            a.store_tile(at, 2 * down + along)
        if self.chunks > 1:
            a.add_to_stored(kept(SUMS_AT), BLOCK_BYTES)
            a.set("rbp", 0)
            a.load("rax", kept(LEFT_CHUNKS))
            a.compare("rax", 1)
            a.jump_if("jne", "not done")
        a.move("rbp", "rcx")
        framed = self.way == FRAMED
        a.load("r15", kept(RESULT_AT if framed else BLOCK_RESULT))
        a.load("r11", kept(RESIDUAL_AT if framed else BLOCK_RESIDUAL))
        if framed:
            a.load("rbx", kept(BLOCK_PLACES))
            a.move("rax", "r13")
            a.add("rax", self._nobody)
            a.subtract("rax", "r15")
            a.store(kept(NOWHERE), "rax")
        if self.chunks > 1:
            a.label("not done")
        for place, step in (
            (BLOCK_ROWS, self._block),
            (BLOCK_RESULT, ROWS * self.pitches[1]),
            (BLOCK_RESIDUAL, ROWS * (self.pitches[2] or 0)),
            (BLOCK_PLACES, ROWS * PLACE),
        ):
            a.add_to_stored(kept(place), step)

    def _copy(self, a: TileAssembler) -> None:
        """The item's rows to the workspace, unless they are those of the item before.

        rbx: the item; rsi: a pixel's places; rdx: its row, and rcx in it; r8: the image; r9: rows
        of a block that are left; r10: blocks, or pixels, that are left.
        """
        a.move("rdx", "r13")
        a.add("rdx", self._copies)
        a.store(kept(ROWS_AT), "rdx")
        a.load("rax", At(base="rbx", distance=OF_NUMBER))
        a.load("rcx", kept(NUMBER))
        a.compare("rax", "rcx")
        a.jump_if("je", "copied")
        a.store(kept(NUMBER), "rax")
        if rest := self.seen % CACHE_LINE:
            a.set("rax", 2**rest - 1)
            a.mask(1, "rax")
        a.load("rsi", At(base="rbx", distance=OF_PLACES))
        a.load("r8", IMAGE)
        a.add_stored("r8", At(base="rbx", distance=OF_IMAGE))
        a.load("r9", ZEROS)
        a.subtract("r9", "r8")
        a.store(kept(BESIDE), "r9")
        if self.spread is not None:
            self.spread.copy(a)
        elif self.way == FRAMED:
            a.load("r10", At(base="rbx", distance=OF_COPIES))
            with a.counted("pixel", "r10"):
                self._copy_pixel(a, "rdx", CACHE_LINE)
        else:
            a.load("r10", At(base="rbx", distance=OF_BLOCKS))
            # of the last block all rows: its first are the last of the block before
            with a.counted("copied block", "r10"):
                a.compare("r10", 1)
                a.jump_if("jne", "copied whole")
                a.load("rax", At(base="rbx", distance=OF_EARLIER))
                a.multiply("rax", len(self.taps) * WORD)
                a.subtract("rsi", "rax")
                a.label("copied whole")
                a.set("r9", ROWS)
                with a.counted("row", "r9"):
                    a.move("rcx", "rdx")
                    a.set("r11", len(self.taps))
                    with a.counted("tap", "r11"):
                        self._copy_pixel(a, "rcx", ROWS * CACHE_LINE)
                    a.add("rdx", CACHE_LINE)
                a.add("rdx", self._block - ROWS * CACHE_LINE)
        a.label("copied")

    def _copy_pixel(self, a: TileAssembler, to: str, step: int) -> None:
        """A pixel's channels, and zeros behind them, or zeros beside the image; both pointers go
        on."""
        a.load_short("rax", At(base="rsi"))
        a.load_if_negative("rax", kept(BESIDE))
        a.add("rax", "r8")
        a.add("rsi", WORD)
        for i in range(self.lines):
            masked = self.seen < (i + 1) * CACHE_LINE
            a.load_vector(i % 8, At(base="rax", distance=i * CACHE_LINE), mask=int(masked))
            a.store_vector(At(base=to, distance=i * step), i % 8)
        a.add(to, self.lines * step)

    def _begin_earlier(self, a: TileAssembler) -> None:
        """Move the last block's rows back, where less than a block is left."""
        a.load("rax", kept(LEFT_BLOCKS))
        a.compare("rax", 1)
        a.jump_if("jne", "whole")
        a.load("rcx", kept(OWN_ITEM))
        a.load("rax", At(base="rcx", distance=OF_EARLIER))
        for place, step in (
            (BLOCK_ROWS, 0 if self.way == COPIED else self.pitch),
            (BLOCK_RESULT, self.pitches[1]),
            (BLOCK_RESIDUAL, self.pitches[2] or 0),
            (BLOCK_PLACES, PLACE),
        ):
            if step:
                a.move("rcx", "rax")
                a.multiply("rcx", -step)
                a.add_stored("rcx", kept(place))
                a.store(kept(place), "rcx")
        a.label("whole")

    def _multiply(self, a: TileAssembler, name: str, constants: Constants | None) -> None:
        """The block's rows by a chunk of the panel: sums in tiles 0 to 3, from ``_begin_sums`` on.

        rsi: the rows that a place of the filter sees; rax: from one to the next; rcx, rdx: the
        panel; r9: the end of a loop; r8: what is asked for.

        Args:
            constants: of the block before, which is finished; None if there is none.
        """
        for down, along in itertools.product(range(2), self._halves):
            at = At(base=("rcx", "r8")[down], index="rdx", distance=along * CACHE_LINE)
            a.load_tile(2 * down + along, at)
        a.set("rax", self.pitch)
        a.set("rdx", CACHE_LINE)
        a.move("rcx", "r12")
        a.move("r9", "r12")
        a.load("r8", kept(AHEAD_AT))
        loops = self._loops(constants is not None)
        for number, (tap, first, steps, rows) in enumerate(loops):
            if not first:
                a.load("rsi", kept(BLOCK_ROWS))
                if tap:
                    a.add("rsi", tap * self.pitch)
            a.add("r9", steps * PANEL_STEP_BYTES)
            with a.stepped(f"{name} {number}", "rcx", PANEL_STEP_BYTES, "r9"):
                self._step(a, rows, constants)
        a.store(kept(AHEAD_AT), "r8")

    def _loops(self, finishes: bool) -> list[tuple[int, int, int, int]]:
        """Loops over the steps: the place of the filter, the first step under it, how many, and how
        many rows of the block before each finishes: a power of two."""
        taps = self.taps if self.way in (FRAMED, SPREAD) else (0,)
        under = self.chunk // len(taps)
        rows = 1
        while finishes and rows * under * len(taps) < ROWS:
            rows *= 2
        left = ROWS // rows if finishes else 0
        found = []
        for tap in taps:
            some = min(left, under)
            left -= some
            found += [(tap, 0, some, rows)] if some else []
            found += [(tap, some, under - some, 0)] if some < under else []
        return found

    def _step(self, a: TileAssembler, rows: int, constants: Constants | None) -> None:
        lower = ROWS // 2 * self.pitch
        a.load_tile(4, At(base="rsi", index="rax"))
        for half in self._halves:
            a.load_tile(6 + half, At(base="rcx", index="rdx", distance=half * TILE_BYTES))
            a.multiply_tiles("tdpbf16ps", half, 4, 6 + half)
        a.load_tile(5, At(base="rsi", index="rax", distance=lower))
        for half in self._halves:
            a.multiply_tiles("tdpbf16ps", 2 + half, 5, 6 + half)
        a.add("rsi", self.step)
        for line in range(self.ahead):
            a.prefetch(At(base="r8", distance=line * CACHE_LINE), cache=2)
        if self.ahead:
            a.add("r8", self.ahead * CACHE_LINE)
        for _ in range(math.ceil(rows / TOGETHER)):
            assert constants is not None
            self._finish(a, min(rows, TOGETHER), constants)

    def _finish(self, a: TileAssembler, rows: int, constants: Constants) -> None:
        """Residual, activation and rounding of the next rows of the block before."""
        _, of_result, of_residual = self.pitches
        framed = self.way == FRAMED
        for row in range(rows):
            pair = [SUMS + 2 * row + half for half in self._halves]
            if framed and of_residual is not None:
                a.load_short("r14", At(base="rbx", distance=row * PLACE + WORD))
                a.add("r14", "r11")
            for v, x in enumerate(pair):
                at = row * WIDTH * WORD + v * CACHE_LINE
                a.load_vector(x, At(base="rbp", distance=at))
                if of_residual is not None:
                    base, begin = ("r14", 0) if framed else ("r11", row * of_residual)
                    at = begin + self.panels.columns[v] * SIZE
                    a.load_bfloat16(SPARE, At(base=base, distance=at))
                    a.vector("vaddps", x, x, SPARE)
                activate(a, self.activation, constants, x, SPARE, coarse=True, floor=self.floor)
            if framed:
                a.load_short("r14", At(base="rbx", distance=row * PLACE))
                a.load_if_negative("r14", kept(NOWHERE))
                a.add("r14", "r15")
            base, begin = ("r14", 0) if framed else ("r15", row * of_result)
            if self.panels.span == WIDTH:
                a.vector("vcvtne2ps2bf16", pair[0], pair[1], pair[0])
                a.store_vector(At(base=base, distance=begin), pair[0])
            else:
                for x, column in zip(pair, self.panels.columns, strict=False):
                    a.store_bfloat16(At(base=base, distance=begin + column * SIZE), x)
        a.add("rbp", rows * WIDTH * WORD)
        if framed:
            a.add("rbx", rows * PLACE)
        else:
            a.add("r15", rows * of_result)
            a.add("r11", rows * (of_residual or 0))


@functools.lru_cache(256)
def machine_code(blocks: Blocks) -> code.MachineCode:
    """The machine code of some blocks, which is the same for all weights."""
    require_tiles()
    read = min(blocks.seen, CACHE_LINE) if blocks.spread else CACHE_LINE  # by a step, of a row
    tiles = configuration(
        [ROWS // 2] * 6 + [read // WORD] * 2, [CACHE_LINE] * 4 + [read] * 2 + [CACHE_LINE] * 2
    )
    constants = Constants(AVX512, "r10")
    return code.MachineCode(blocks.written(constants, tiles).code(), constants, tiles)
