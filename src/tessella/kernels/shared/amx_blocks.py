"""Machine code for blocks of a product of bfloat16 in tiles of AMX: 32 rows by 32 channels."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX512, At
from tessella.device.x86.tiles import CONFIGURATION_BYTES, TileAssembler, configuration
from tessella.kernels.epilogue.x86 import Constants, activate
from tessella.kernels.shared.x86_tiles import CACHE_LINE, Panels, kept

ROWS, WIDTH = 32, 32  # of a block: two tiles by two
SIZE, WORD = 2, 4  # bytes of a number, and of a sum
STEP = 32  # channels of the image that a product of tiles takes: 64 bytes
DIRECT, COPIED, FRAMED = range(3)  # how tiles reach rows
TILE_BYTES = 1024
BLOCK_BYTES = ROWS * WIDTH * WORD
PANEL_STEP_BYTES = 2 * TILE_BYTES  # of a panel's weights in a step
PLACE = 8  # bytes: of a result, and of its part of the residual
UNROLLED = 4  # rows of a block whose sums are finished in a round

IMAGE, RESULT, RESIDUAL, ZEROS, PART, TAKEN = map(code.given, range(6))
ITEM = range(0, 96, code.NUMBER)
(OF_IMAGE, OF_RESULT, OF_RESIDUAL, OF_WEIGHT, OF_BIAS, OF_PLACES, OF_RESULTS, OF_PANELS, OF_BLOCKS,
 OF_EARLIER, OF_COPIES, OF_NUMBER) = ITEM  # fmt: skip
_STACK = range(0, 88, code.NUMBER)
(LEFT_PANELS, LEFT_BLOCKS, LEFT_ROWS, RESULT_AT, RESIDUAL_AT, BIAS_AT, BESIDE, NOWHERE, PLACES_AT,
 NUMBER, ROWS_AT) = _STACK  # fmt: skip
SUMS, SPARE = 0, 16  # vectors: two of each row, and those for activations


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Machine code for blocks of rows by channels.

    Attributes:
        way: how tiles reach rows.
        seen: bytes of what a place of the filter sees.
        taps: where those of a result lie in a framed image, in pixels from its first one.
        most_rows: of an item; ``together``: panels of one, at most.
        pitches: bytes from a pixel to the next: image, result, residual (None if there is none).
    """

    panels: Panels
    way: int
    seen: int
    taps: tuple[int, ...]
    most_rows: int
    together: int
    pitches: tuple[int, int, int | None]
    activation: str | None

    @property
    def groups(self) -> list[tuple[int, int]]:
        """The first panel of each item and how many it has."""
        return list(self.panels.together(self.together))

    @property
    def lines(self) -> int:
        """Of what a place of the filter sees: as many steps."""
        return self.seen // CACHE_LINE

    @property
    def panel_bytes(self) -> int:
        return len(self.taps) * self.lines * PANEL_STEP_BYTES

    @property
    def pitch(self) -> int:
        """Bytes from a row to the next."""
        return {DIRECT: self.pitches[0], COPIED: CACHE_LINE, FRAMED: self.seen}[self.way]

    @property
    def step(self) -> int:
        """Bytes from a step's part of a row to the next one's."""
        return ROWS * CACHE_LINE if self.way == COPIED else CACHE_LINE

    @property
    def _block(self) -> int:
        """Bytes from a block's rows to the next one's."""
        whole = len(self.taps) * self.seen if self.way == COPIED else self.pitch
        return ROWS * whole

    @property
    def part_bytes(self) -> int:
        """Of a thread: a block's sums, how tiles were configured, what nobody reads, and copies."""
        copied = {
            DIRECT: 0,
            COPIED: self.most_rows * len(self.taps) * self.seen,
            FRAMED: (self.most_rows + max(self.taps)) * self.seen,
        }[self.way]
        return _COPIES + copied

    def written(self, constants: Constants, tiles: torch.Tensor) -> TileAssembler:
        """The code.

        rdi: the call; rbx: the item; r13: the thread's part; rbp: the item's rows; r12: a panel of
        the weight; r14, r15, r11: a block's rows, its result and its residual.
        """
        a = TileAssembler(AVX512)
        with a.function(len(_STACK) * code.NUMBER):
            a.set("r13", 1)
            a.fetch_add(TAKEN, "r13")
            a.multiply("r13", self.part_bytes)
            a.add_stored("r13", PART)
            a.store_number(kept(NUMBER), 0)
            a.set("r8", tiles.data_ptr())
            before = At(base="r13", distance=BLOCK_BYTES)
            with a.configured(At(base="r8"), before), code.each_item(a, "rbx", len(ITEM)):
                self._item(a, constants)
        return a

    def _item(self, a: TileAssembler, constants: Constants) -> None:
        if self.way == DIRECT:
            a.load("rbp", IMAGE)
            a.add_stored("rbp", At(base="rbx", distance=OF_IMAGE))
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
        with a.counted("panel", kept(LEFT_PANELS)):
            a.move("r14", "rbp")
            a.load("r15", kept(RESULT_AT))
            a.load("r11", kept(RESIDUAL_AT))
            for to, distance in ((LEFT_BLOCKS, OF_BLOCKS), (PLACES_AT, OF_RESULTS)):
                a.load("rax", At(base="rbx", distance=distance))
                a.store(kept(to), "rax")
            if self.way == FRAMED:
                a.move("rax", "r13")
                a.add("rax", _NOBODY)
                a.subtract("rax", "r15")
                a.store(kept(NOWHERE), "rax")
            with a.counted("block", kept(LEFT_BLOCKS)):
                self._begin_earlier(a)
                self._multiply(a)
                self._finish(a, constants)
                a.add("r14", self._block)
            a.add("r12", self.panel_bytes)
            a.add_to_stored(kept(BIAS_AT), WIDTH * WORD)
            for place in (RESULT_AT, RESIDUAL_AT):
                a.add_to_stored(kept(place), WIDTH * SIZE)

    def _copy(self, a: TileAssembler) -> None:
        """The item's rows to the workspace, unless they are those of the item before.

        rsi: a pixel's places; rdx: its row, and rcx in it; r8: the image; r9: rows of a block that
        are left; r10: blocks, or pixels, that are left.
        """
        a.move("rbp", "r13")
        a.add("rbp", _COPIES)
        a.load("rax", At(base="rbx", distance=OF_NUMBER))
        a.load("rcx", kept(NUMBER))
        a.compare("rax", "rcx")
        a.jump_if("je", "copied")
        a.store(kept(NUMBER), "rax")
        a.load("rsi", At(base="rbx", distance=OF_PLACES))
        a.load("r8", IMAGE)
        a.add_stored("r8", At(base="rbx", distance=OF_IMAGE))
        a.load("r9", ZEROS)
        a.subtract("r9", "r8")
        a.store(kept(BESIDE), "r9")
        a.move("rdx", "rbp")
        if self.way == FRAMED:
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
        """A pixel's channels, or zeros beside the image; both pointers go on."""
        a.load_short("rax", At(base="rsi"))
        a.load_if_negative("rax", kept(BESIDE))
        a.add("rax", "r8")
        a.add("rsi", WORD)
        for i in range(self.lines):
            a.load_vector(i % 8, At(base="rax", distance=i * CACHE_LINE))
            a.store_vector(At(base=to, distance=i * step), i % 8)
        a.add(to, self.lines * step)

    def _begin_earlier(self, a: TileAssembler) -> None:
        """Move the last block's rows back, where less than a block is left."""
        a.load("rax", kept(LEFT_BLOCKS))
        a.compare("rax", 1)
        a.jump_if("jne", "whole")
        a.load("rax", At(base="rbx", distance=OF_EARLIER))
        moved = {"r14": 0 if self.way == COPIED else self.pitch}
        if self.way == FRAMED:
            moved["r10"] = PLACE
            a.load("r10", kept(PLACES_AT))
        else:
            moved["r15"], moved["r11"] = self.pitches[1], self.pitches[2] or 0
        for register, pitch in moved.items():
            if pitch:
                a.move("rcx", "rax")
                a.multiply("rcx", pitch)
                a.subtract(register, "rcx")
        if self.way == FRAMED:
            a.store(kept(PLACES_AT), "r10")
        a.label("whole")

    def _multiply(self, a: TileAssembler) -> None:
        """The block's rows by the panel: sums in tiles 0 to 3.

        rsi, r10: its upper and lower rows; rax: from one to the next; rcx, rdx: the panel; r9: the
        end of what a place of the filter is multiplied by.
        """
        a.set("rdx", 0)
        a.load("rcx", kept(BIAS_AT))
        for tile in range(4):  # each row of them is the bias
            a.load_tile(tile, At(base="rcx", index="rdx", distance=tile % 2 * CACHE_LINE))
        a.set("rax", self.pitch)
        a.set("rdx", CACHE_LINE)
        a.move("rcx", "r12")
        a.move("r9", "r12")
        framed = self.way == FRAMED
        for number, tap in enumerate(self.taps if framed else self.taps[:1]):
            a.move("rsi", "r14")
            if tap:
                a.add("rsi", tap * self.pitch)
            a.move("r10", "rsi")
            a.add("r10", ROWS // 2 * self.pitch)
            a.add("r9", self.lines * PANEL_STEP_BYTES if framed else self.panel_bytes)
            with a.stepped(f"step {number}", "rcx", PANEL_STEP_BYTES, "r9"):
                a.load_tile(4, At(base="rsi", index="rax"))
                a.load_tile(6, At(base="rcx", index="rdx"))
                a.multiply_tiles("tdpbf16ps", 0, 4, 6)
                a.load_tile(7, At(base="rcx", index="rdx", distance=TILE_BYTES))
                a.multiply_tiles("tdpbf16ps", 1, 4, 7)
                a.load_tile(5, At(base="r10", index="rax"))
                a.multiply_tiles("tdpbf16ps", 2, 5, 6)
                a.multiply_tiles("tdpbf16ps", 3, 5, 7)
                for register in ("rsi", "r10"):
                    a.add(register, self.step)

    def _finish(self, a: TileAssembler, constants: Constants) -> None:
        """Residual, activation and rounding of the block's sums.

        rcx: a row of them; rax: constants; r10: places of results; rsi, r8: those of a row.
        """
        a.set("rdx", WIDTH * WORD)
        for tile in range(4):
            down, along = divmod(tile, 2)
            distance = down * ROWS // 2 * WIDTH * WORD + along * CACHE_LINE
            a.store_tile(At(base="r13", index="rdx", distance=distance), tile)
        constants.begin(a)
        a.move("rcx", "r13")
        a.load("r10", kept(PLACES_AT))
        a.store_number(kept(LEFT_ROWS), ROWS // UNROLLED)
        _, of_result, of_residual = self.pitches
        with a.counted("rows", kept(LEFT_ROWS)):
            for row in range(UNROLLED):
                to, added = self._row(a, row)
                pair = SUMS + 2 * row, SUMS + 2 * row + 1
                for v, x in enumerate(pair):
                    at = row * WIDTH * WORD + v * CACHE_LINE
                    a.load_vector(x, At(base="rcx", distance=at))
                    if of_residual is not None:
                        at = added.distance + v * CACHE_LINE // 2
                        a.load_bfloat16(SPARE, At(base=added.base, distance=at))
                        a.vector("vaddps", x, x, SPARE)
                    activate(a, self.activation, constants, x, SPARE)
                a.vector("vcvtne2ps2bf16", pair[0], pair[1], pair[0])
                a.store_vector(to, pair[0])
            a.add("rcx", UNROLLED * WIDTH * WORD)
            if self.way == FRAMED:
                a.add("r10", UNROLLED * PLACE)
            else:
                a.add("r15", UNROLLED * of_result)
                a.add("r11", UNROLLED * (of_residual or 0))
        a.store(kept(PLACES_AT), "r10")

    def _row(self, a: TileAssembler, row: int) -> tuple[At, At]:
        """Where a row of the block goes, and its part of the residual."""
        _, of_result, of_residual = self.pitches
        if self.way != FRAMED:
            added = At(base="r11", distance=row * (of_residual or 0))
            return At(base="r15", distance=row * of_result), added
        a.load_short("rsi", At(base="r10", distance=row * PLACE))
        a.load_if_negative("rsi", kept(NOWHERE))
        a.add("rsi", "r15")
        if of_residual is not None:
            a.load_short("r8", At(base="r10", distance=row * PLACE + WORD))
            a.add("r8", "r11")
        return At(base="rsi"), At(base="r8")


_NOBODY = BLOCK_BYTES + CONFIGURATION_BYTES  # in a thread's part: what nobody reads, and copies
_COPIES = _NOBODY + WIDTH * SIZE


@functools.lru_cache(256)
def machine_code(blocks: Blocks) -> code.MachineCode:
    """The machine code of some blocks, which is the same for all weights."""
    constants, tiles = Constants(AVX512), configuration([16] * 8, [CACHE_LINE] * 8)
    return code.MachineCode(blocks.written(constants, tiles).code(), constants, tiles)
