"""Attention in bfloat16 by the tiles of AMX: a thread takes one head after another, whose keys and
values it packs once as tiles read them; of 32 queries at a time the scores stay in the caches.

Keys lie in panels of 16 beside each other, two channels of each in 32 bits; values in panels of 16
channels, of two keys in 32 bits. Queries are read where they lie; where less than 32 are left, a
block begins earlier, and some are computed twice, to the same numbers, as are channels of values.
So do the last 32 channels of queries, whose keys are 0 where they were multiplied before (an
infinite query makes a NaN there, where a score could be minus infinity). Scores
are float32 until they are rounded powers; the sums are those of powers before they are rounded.

Source: the softmax of whole rows at a time, after Dao et al., "FlashAttention" (2022).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

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
from tessella.kernels.attention import heads
from tessella.kernels.attention.heads import (
    ITEM,
    KEY_STEP,
    KEYS_AT,
    MASK,
    OF_KEYS,
    OF_MASK,
    OF_QUERIES,
    OF_RESULT,
    OF_VALUES,
    PART,
    QUERIES,
    QUERY_STEP,
    RESULT,
    TAKEN,
    VALUE_STEP,
    VALUES,
)
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.x86 import LOG2E, ROUNDS, Constants
from tessella.operations.problem import Problem

ROWS = 32  # queries of a block
HALF = 16  # rows of a tile; channels, or keys, of a panel
STEP = 32  # channels, or keys, that a product of tiles takes
SIZE, WORD = 2, 4
TILE_BYTES = 1024
TOGETHER = 8  # rows whose powers are made side by side
# of 2ᶠ, f from -1/2 to 1/2: within 3e-6 of it, where rounding to bfloat16 takes 4e-3
POWER = (0.9999991655349731, 0.6931219696998596, 0.24024981260299683, 0.05591703951358795,
         0.009560510516166687)  # fmt: skip
EXTREMES, SUMS = 0, 8  # vectors: of each row its largest score, and the sum of its powers
SPARE = 16  # and three more for each of four rows
ROUNDING, FACTOR, LEAST = 29, 30, 31


def fits(problem: Problem) -> str | None:
    if why := heads.refusal(problem, "bfloat16", STEP):
        return why
    if problem["query"].shape[3] % 2:
        return "an even number of channels"
    if problem["query"].shape[2] < ROWS:
        return f"{ROWS} queries at least"
    if _Head.of(problem).part_bytes > heads.MOST_PART_BYTES:
        return f"keys and values of a head in {heads.MOST_PART_BYTES} bytes"
    return None


def workspace_bytes(problem: Problem) -> int:
    return heads.workspace_bytes(problem, _Head.of(problem).part_bytes)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    head = _Head.of(problem)
    return heads.bound(problem, constants, _machine_code(head), head.part_bytes)


@functools.lru_cache(64)
def _machine_code(head: _Head) -> code.MachineCode:
    require_tiles()
    constants, tiles = Constants(AVX512, "r10"), configuration([HALF] * 8, [CACHE_LINE] * 8)
    return code.MachineCode(head.written(constants, tiles).code(), constants, tiles)


class _Head(heads.Head):
    """Machine code for a head."""

    @property
    def steps(self) -> int:
        """Of the products with values: the last ones are filled up, keys with the last key again,
        whose powers become 0, and values with zeros."""
        return math.ceil(self.keys / STEP)

    @property
    def _panel(self) -> int:
        """Bytes of 16 keys."""
        return len(self._reads) * TILE_BYTES

    @property
    def _reads(self) -> list[int]:
        """The first channel that each product with keys takes."""
        return [min(i, self.channels - STEP) for i in range(0, self.channels, STEP)]

    @property
    def _writes(self) -> list[int]:
        """The first channel of each two panels of values."""
        return [min(i, self.width - STEP) for i in range(0, self.width, STEP)]

    # what lies in a thread's part, one behind the other
    @property
    def _values(self) -> int:
        return 2 * self.steps * self._panel

    @property
    def _value_panel(self) -> int:
        """Bytes of 16 channels of all values."""
        return self.steps * TILE_BYTES

    @property
    def _scores(self) -> int:
        return self._values + 2 * len(self._writes) * self._value_panel

    @property
    def _row(self) -> int:
        """Bytes from a row of scores to the next: not a power of two, for the first cache."""
        return self.steps * STEP * WORD + CACHE_LINE

    @property
    def _powers(self) -> int:
        return self._scores + ROWS * self._row

    @property
    def _power_row(self) -> int:
        return self.steps * STEP * SIZE + CACHE_LINE

    @property
    def _made(self) -> int:
        """A block of results before they are rounded."""
        return self._powers + ROWS * self._power_row

    @property
    def _factors(self) -> int:
        return self._made + 4 * TILE_BYTES

    @property
    def _kept(self) -> int:
        """How tiles were configured."""
        return self._factors + ROWS * CACHE_LINE

    @property
    def _mask_at(self) -> int:
        """Where what is added for the block's first query lies."""
        return self._kept + CONFIGURATION_BYTES

    @property
    def part_bytes(self) -> int:
        return self._mask_at + CACHE_LINE

    def written(self, constants: Constants, tiles: torch.Tensor) -> TileAssembler:
        """The code.

        rdi: the call; r15: the item; r13: the thread's part; r10: the constants; r12, r14: the
        queries and the step between them; rbp: where their results go.
        """
        a = TileAssembler(AVX512)
        with a.function():
            code.take_part(a, "r13", PART, TAKEN, self.part_bytes)
            a.set("r8", tiles.data_ptr())
            kept = At(base="r13", distance=self._kept)
            with a.configured(At(base="r8"), kept), code.each_item(a, "r15", len(ITEM)):
                constants.begin(a)
                self._head(a, constants)
        return a

    def _head(self, a: TileAssembler, constants: Constants) -> None:
        self._pack_keys(a)
        self._pack_values(a)
        self._row_of(a, "r12", QUERIES, OF_QUERIES)
        a.load("r14", QUERY_STEP)
        self._row_of(a, "rbp", RESULT, OF_RESULT)
        mask = At(base="r13", distance=self._mask_at)
        if self.is_masked:
            self._row_of(a, "rax", MASK, OF_MASK)
            a.store(mask, "rax")
        whole, rest = divmod(self.queries, ROWS)
        a.set("rbx", whole + (rest > 0))
        with a.counted("rows", "rbx"):
            if rest:
                a.compare("rbx", 1)
                a.jump_if("jne", "whole block")
                a.move("rax", "r14")
                a.multiply("rax", ROWS - rest)
                a.subtract("r12", "rax")
                a.subtract("rbp", (ROWS - rest) * self.pitch)
                if self.mask_step:
                    a.add_to_stored(mask, -(ROWS - rest) * self.mask_step)
                a.label("whole block")
            self._score(a)
            self._exponentiate(a, constants)
            self._add_values(a)
            a.move("rax", "r14")
            a.multiply("rax", ROWS)
            a.add("r12", "rax")
            a.add("rbp", ROWS * self.pitch)
            if self.mask_step:
                a.add_to_stored(mask, ROWS * self.mask_step)

    def _row_of(self, a: TileAssembler, register: str, base: At, distance: int) -> None:
        a.load(register, base)
        a.add_stored(register, At(base="r15", distance=distance))

    def _pack_keys(self, a: TileAssembler) -> None:
        """r8, r9: a key and the step between them; rcx: where its first channels go."""
        self._row_of(a, "r8", KEYS_AT, OF_KEYS)
        a.load("r9", KEY_STEP)
        a.move("rcx", "r13")
        whole, rest = divmod(self.keys, HALF)
        if whole:
            a.set("rsi", whole)
            with a.counted("panels", "rsi"):
                self._keys(a, "keys", HALF)
                a.add("rcx", self._panel - CACHE_LINE)
        left = 2 * self.steps * HALF - self.keys
        if rest:
            self._keys(a, "last keys", rest)
        if left:
            a.subtract("r8", "r9")
        if rest:
            self._keys(a, "no keys", HALF - rest, moves=False)
            a.add("rcx", self._panel - CACHE_LINE)
        if left >= HALF:
            self._keys(a, "a panel of none", HALF, moves=False)

    def _keys(self, a: TileAssembler, name: str, count: int, *, moves: bool = True) -> None:
        a.set("r11", count)
        with a.counted(name, "r11"):
            for step, first in enumerate(self._reads):
                for pair in range(STEP // 2):
                    to = At(base="rcx", distance=step * TILE_BYTES + pair * CACHE_LINE)
                    if first + 2 * pair < step * STEP:  # multiplied before
                        a.set("rdx", 0)
                    else:
                        a.load_short("rdx", At(base="r8", distance=first * SIZE + pair * WORD))
                    a.store_short(to, "rdx")
            a.add("rcx", WORD)
            if moves:
                a.add("r8", "r9")

    def _pack_values(self, a: TileAssembler) -> None:
        """r8, rdx: a value and the step between them; rcx: where two of them go."""
        self._row_of(a, "r8", VALUES, OF_VALUES)
        a.load("rdx", VALUE_STEP)
        a.move("rcx", "r13")
        a.add("rcx", self._values)
        pairs, rest = divmod(self.keys, 2)
        if pairs:
            a.set("r11", pairs)
            with a.counted("pairs", "r11"):
                self._pair(a, second=True)
                a.add("r8", "rdx")
                a.add("r8", "rdx")
        if rest:
            self._pair(a, second=False)
        if none := self.steps * HALF - pairs - rest:
            a.vector("vxorps", 0, 0, 0)
            a.set("r11", none)
            with a.counted("no values", "r11"):
                for panel in range(2 * len(self._writes)):
                    a.store_vector(At(base="rcx", distance=panel * self._value_panel), 0)
                a.add("rcx", CACHE_LINE)

    def _pair(self, a: TileAssembler, *, second: bool) -> None:
        """Of two values: each channel of one and the other, or of one and 0."""
        for panel in range(2 * len(self._writes)):
            first = self._writes[panel // 2] + panel % 2 * HALF
            x, y, distance = panel % 8, 8 + panel % 8, first * SIZE
            a.load_words(x, At(base="r8", distance=distance))
            if second:
                a.load_bfloat16(y, At(base="r8", index="rdx", distance=distance))
                a.vector("vorps", x, x, y)
            a.store_vector(At(base="rcx", distance=panel * self._value_panel), x)
        a.add("rcx", CACHE_LINE)

    def _score(self, a: TileAssembler) -> None:
        """rcx: two panels of keys; r8: their scores; r9: the lower queries; rax, rsi, rdx: from a
        row of queries, of keys and of scores to the next.
        """
        a.move("rax", "r14")
        a.move("r9", "r14")
        a.multiply("r9", HALF)
        a.add("r9", "r12")
        a.move("rcx", "r13")
        a.move("r8", "r13")
        a.add("r8", self._scores)
        a.set("rdx", self._row)
        a.set("rsi", CACHE_LINE)
        a.set("r11", self.steps)
        with a.counted("score", "r11"):
            for tile in range(4):
                a.zero_tile(tile)
            for step, first in enumerate(self._reads):
                queries, keys = first * SIZE, step * TILE_BYTES
                a.load_tile(4, At(base="r12", index="rax", distance=queries))
                a.load_tile(6, At(base="rcx", index="rsi", distance=keys))
                a.multiply_tiles("tdpbf16ps", 0, 4, 6)
                a.load_tile(7, At(base="rcx", index="rsi", distance=keys + self._panel))
                a.multiply_tiles("tdpbf16ps", 1, 4, 7)
                a.load_tile(5, At(base="r9", index="rax", distance=queries))
                a.multiply_tiles("tdpbf16ps", 2, 5, 6)
                a.multiply_tiles("tdpbf16ps", 3, 5, 7)
            for tile in range(4):
                down, along = divmod(tile, 2)
                distance = down * HALF * self._row + along * CACHE_LINE
                a.store_tile(At(base="r8", index="rdx", distance=distance), tile)
            a.add("rcx", 2 * self._panel)
            a.add("r8", 2 * CACHE_LINE)

    def _exponentiate(self, a: TileAssembler, constants: Constants) -> None:
        """The scores become powers of two, as far as they are below their row's largest, those of
        no key 0; and each row's factor is 1 / their sum.

        r8, r9, r11: some rows of scores, powers and factors; rcx: the mask; rdx: the place in a row
        of scores, and rsi in one of powers; rax: rows that are left.
        """
        a.load_vector(FACTOR, constants.at(self.scale * LOG2E))
        a.load_vector(ROUNDING, constants.at(ROUNDS))
        a.load_vector(LEAST, constants.at(heads.NOTHING * LOG2E))
        for register, place in (("r8", self._scores), ("r9", self._powers), ("r11", self._factors)):
            a.move(register, "r13")
            a.add(register, place)
        if self.is_masked:
            a.load("rcx", At(base="r13", distance=self._mask_at))
        a.set("rax", ROWS // TOGETHER)
        with a.counted("powers", "rax"):
            self._scale(a, constants)
            for row in range(TOGETHER):
                a.load_vector(SUMS + row, constants.at(0.0))
            whole, rest = divmod(self.keys, STEP)
            a.set("rdx", 0)
            a.set("rsi", 0)
            if whole:
                with a.stepped("raise", "rdx", 2 * CACHE_LINE, whole * 2 * CACHE_LINE):
                    self._raise(a, constants, STEP)
            if rest:
                self._raise(a, constants, rest)
            self._across(a, "vaddps", SUMS)
            a.load_vector(SPARE, constants.at(1.0))
            for row in range(TOGETHER):
                if self.is_masked:  # of no key, too
                    a.vector("vmaxps", SUMS + row, SPARE, SUMS + row)
                a.vector("vdivps", SUMS + row, SPARE, SUMS + row)
                a.store_vector(At(base="r11", distance=row * CACHE_LINE), SUMS + row)
            a.add("r8", TOGETHER * self._row)
            a.add("r9", TOGETHER * self._power_row)
            a.add("r11", TOGETHER * CACHE_LINE)
            if self.mask_step:
                a.add("rcx", TOGETHER * self.mask_step)

    def _scale(self, a: TileAssembler, constants: Constants) -> None:
        """The scores times their factor, and what is added to them; and the largest of each row."""
        rows_of_mask = TOGETHER if self.mask_step else int(self.is_masked)
        for row in range(TOGETHER):
            a.load_vector(EXTREMES + row, constants.at(-math.inf))
        a.set("rdx", 0)
        with a.stepped("scale", "rdx", CACHE_LINE, self.steps * 2 * CACHE_LINE):
            for row in range(rows_of_mask):
                a.load_vector(SUMS + row, self._of_mask(row))
                a.vector("vmulps", SUMS + row, SUMS + row, constants.at(LOG2E))
            for row in range(TOGETHER):
                x, place = SPARE + row, At(base="r8", index="rdx", distance=row * self._row)
                a.vector("vmulps", x, FACTOR, place)
                if self.is_masked:
                    a.vector("vaddps", x, x, SUMS + row % rows_of_mask)
                a.store_vector(place, x)
                a.vector("vmaxps", EXTREMES + row, x, EXTREMES + row)
        self._across(a, "vmaxps", EXTREMES)
        if self.is_masked:
            for row in range(TOGETHER):
                a.vector("vsubps", EXTREMES + row, EXTREMES + row, self._of_mask(row))

    def _of_mask(self, row: int) -> At:
        return At(base="rcx", index="rdx", distance=row * self.mask_step)

    def _across(self, a: TileAssembler, name: str, first: int) -> None:
        """The lanes of each row's vector combined, in all of them."""
        for row in range(TOGETHER):
            a.store_vector(At(base="r11", distance=row * CACHE_LINE), first + row)
        for row in range(TOGETHER):
            x, at = first + row, row * CACHE_LINE
            for lane in range(AVX512.lanes):
                other = SPARE + lane % 8
                a.broadcast(other if lane else x, At(base="r11", distance=at + lane * WORD))
                if lane:
                    a.vector(name, x, x, other)

    def _raise(self, a: TileAssembler, constants: Constants, keys: int) -> None:
        """The next scores of each row, of which the first ``keys`` count."""
        for row in range(TOGETHER):
            made = []
            for v in range(2):
                x = SPARE + (2 * row + v) % 4 * 3
                rounded, power, counts = x + 1, x + 2, 1 + (2 * row + v) % 4
                distance = row * self._row + v * CACHE_LINE
                a.load_vector(x, At(base="r8", index="rdx", distance=distance))
                a.vector("vsubps", x, x, EXTREMES + row)
                a.compare_lanes("vcmpnltps", counts, x, LEAST)  # a NaN counts
                a.vector("vaddps", rounded, x, ROUNDING)
                a.vector("vsubps", rounded, rounded, ROUNDING)
                a.vector("vsubps", x, x, rounded)
                a.load_vector(power, constants.at(POWER[-1]))
                for coefficient in reversed(POWER[:-1]):
                    a.vector("vfmadd213ps", power, x, constants.at(coefficient))
                a.vector("vscalefps", power, power, rounded, mask=counts)
                lanes = min(HALF, max(0, keys - v * HALF))
                if lanes < HALF:
                    a.vector("vandps", power, power, constants.first(lanes))
                a.vector("vaddps", SUMS + row, SUMS + row, power)
                made.append(power)
            a.vector("vcvtne2ps2bf16", made[0], made[1], made[0])
            a.store_vector(At(base="r9", index="rsi", distance=row * self._power_row), made[0])
        a.add("rsi", CACHE_LINE)

    def _add_values(self, a: TileAssembler) -> None:
        """rcx: a step of two panels of values; r8: powers; rdx, rsi, rax: from a row of powers, of
        values and of what is made to the next.
        """
        a.set("rdx", self._power_row)
        a.set("rsi", CACHE_LINE)
        a.set("rax", 2 * CACHE_LINE)
        for pair, first in enumerate(self._writes):
            a.move("r8", "r13")
            a.add("r8", self._powers)
            a.move("rcx", "r13")
            a.add("rcx", self._values + 2 * pair * self._value_panel)
            for tile in range(4):
                a.zero_tile(tile)
            a.set("r11", self.steps)
            with a.counted(f"values {pair}", "r11"):
                a.load_tile(4, At(base="r8", index="rdx"))
                a.load_tile(6, At(base="rcx", index="rsi"))
                a.multiply_tiles("tdpbf16ps", 0, 4, 6)
                a.load_tile(7, At(base="rcx", index="rsi", distance=self._value_panel))
                a.multiply_tiles("tdpbf16ps", 1, 4, 7)
                a.load_tile(5, At(base="r8", index="rdx", distance=HALF * self._power_row))
                a.multiply_tiles("tdpbf16ps", 2, 5, 6)
                a.multiply_tiles("tdpbf16ps", 3, 5, 7)
                a.add("r8", CACHE_LINE)
                a.add("rcx", TILE_BYTES)
            for tile in range(4):
                down, along = divmod(tile, 2)
                distance = self._made + down * 2 * TILE_BYTES + along * CACHE_LINE
                a.store_tile(At(base="r13", index="rax", distance=distance), tile)
            for row in range(ROWS):
                x = row % 8 * 2
                factor = At(base="r13", distance=self._factors + row * CACHE_LINE)
                a.load_vector(SPARE + row % 8, factor)
                for v in range(2):
                    distance = self._made + (2 * row + v) * CACHE_LINE
                    a.vector("vmulps", x + v, SPARE + row % 8, At(base="r13", distance=distance))
                a.vector("vcvtne2ps2bf16", x, x + 1, x)
                place = row * self.pitch + first * SIZE
                a.store_vector(At(base="rbp", distance=place), x)
