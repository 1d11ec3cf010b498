"""Attention on a CPU with AVX-512 or AVX2: a thread takes one head after another, whose keys and
values it packs once; of some queries at a time the scores never leave the first cache.

Keys are packed in panels of channels by keys, values in panels of keys by channels, so that both
products read them in order: where heads lie side by side in a row of 9 kB, as behind one product
for queries, keys and values, their rows would fall on four sets of the first cache. The result of
all heads of a row lies together, as the layer behind reads it. Where channels do not fill the last
vectors, these begin earlier, and some are computed twice, to the same numbers.

Source: the softmax of a few rows at a time, as Dao et al., "FlashAttention" (2022), without their
running maximum: a CPU's cache holds the scores of whole rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tessella.core.integers import ceil_div
from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2, AVX512, Assembler, At, InstructionSet
from tessella.device.x86.code import CACHE_LINE
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
    VECTORS,
)
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.x86 import Constants, exponential
from tessella.operations.problem import Problem

ROWS = {AVX512: 12, AVX2: 6}  # queries of a tile, which has as many times two sums
WORD = 4
UNROLLED = 4  # keys that are multiplied with their values in a round of the loop
# e to it is nothing beside 1, and what values are multiplied with it no subnormal number: slow
LOWEST = -60.0
AHEAD = 8  # rows: what is read of other layers' results is asked for so long before


def fits(problem: Problem) -> str | None:
    if why := heads.refusal(problem, "float32", code.require_instructions().lanes):
        return why
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
    constants = Constants(head.isa)
    return code.MachineCode(head.written(constants).code(), constants)


@dataclass(frozen=True, kw_only=True)
class _Head(heads.Head):
    """Machine code for a head, with the instructions that there are."""

    isa: InstructionSet = field(default_factory=code.require_instructions)

    @property
    def vector(self) -> int:
        """Bytes of a register."""
        return self.isa.vector_bytes

    @property
    def rows(self) -> int:
        """Queries of a tile: its sums are the first vectors, and two for a panel's row follow."""
        return ROWS[self.isa]

    @property
    def panel(self) -> int:
        """Numbers of a row of a panel, ``panel_bytes`` long."""
        return VECTORS * self.isa.lanes

    @property
    def panel_bytes(self) -> int:
        return VECTORS * self.vector

    @property
    def panels(self) -> int:
        """Of keys; the last one is filled up with the last key again, whose scores become 0."""
        return math.ceil(self.keys / self.panel)

    @property
    def _value_panels(self) -> int:
        return math.ceil(self.width / self.panel)

    def _columns(self, channels: int, vectors: int) -> list[int]:
        """The first channel of each vector."""
        lanes = self.isa.lanes
        return [min(v * lanes, channels - lanes) for v in range(vectors)]

    @property
    def rounds(self) -> int:
        """Of the loop over the keys and their values, those behind the last of which are 0."""
        return math.ceil(self.keys / UNROLLED)

    # what lies in a thread's part, one behind the other
    @property
    def _values(self) -> int:
        return self.panels * self.channels * self.panel_bytes

    @property
    def _value_panel(self) -> int:
        return self.rounds * UNROLLED * self.panel_bytes

    @property
    def _queries(self) -> int:
        return self._values + self._value_panels * self._value_panel

    @property
    def _scores(self) -> int:
        return self._queries + ceil_div(self.rows * self.channels * WORD, CACHE_LINE) * CACHE_LINE

    @property
    def _row(self) -> int:
        """Bytes of a row of scores."""
        return self.panels * self.panel_bytes

    @property
    def _factors(self) -> int:
        return self._scores + self.rows * self._row

    @property
    def part_bytes(self) -> int:
        return ceil_div(self._factors + self.rows * self.vector, CACHE_LINE) * CACHE_LINE

    def written(self, constants: Constants) -> Assembler:
        """The code.

        rdi: the call; r15: the item; r13: the thread's part; rax: the constants; r12, r14: the
        queries and the step between them; rbp: where their results go; rsi: what of the mask is
        added to the scores of the first.
        """
        a = Assembler(self.isa)
        with a.function():
            code.take_part(a, "r13", PART, TAKEN, self.part_bytes)
            with code.each_item(a, "r15", len(ITEM)):
                self._head(a, constants)
        return a

    def _head(self, a: Assembler, constants: Constants) -> None:
        constants.begin(a)
        self._pack_keys(a)
        self._pack_values(a)
        self._row_of(a, "r12", QUERIES, OF_QUERIES)
        a.load("r14", QUERY_STEP)
        self._row_of(a, "rbp", RESULT, OF_RESULT)
        if self.is_masked:
            self._row_of(a, "rsi", MASK, OF_MASK)
        whole, rest = divmod(self.queries, self.rows)
        if whole:
            a.set("rbx", whole)
            with a.counted("rows", "rbx"):
                self._some_rows(a, "some", self.rows, constants)
        if rest:
            self._some_rows(a, "rest", rest, constants)

    def _row_of(self, a: Assembler, register: str, base: At, distance: int) -> None:
        a.load(register, base)
        a.add_stored(register, At(base="r15", distance=distance))

    def _pack_keys(self, a: Assembler) -> None:
        self._row_of(a, "r8", KEYS_AT, OF_KEYS)
        a.load("r9", KEY_STEP)
        self._look_ahead(a)
        a.move("rcx", "r13")
        whole, rest = divmod(self.keys, self.panel)
        if whole:
            a.set("r10", whole)
            with a.counted("key panels", "r10"):
                self._keys(a, "keys", self.panel)
                a.add("rcx", self.channels * self.panel_bytes - self.panel_bytes)
        if rest:
            self._keys(a, "last keys", rest)
            a.subtract("r8", "r9")
            self._keys(a, "no keys", self.panel - rest, moves=False)

    def _keys(self, a: Assembler, name: str, count: int, *, moves: bool = True) -> None:
        a.set("r11", count)
        with a.counted(name, "r11"):
            if moves:
                self._ask_for(a, self.channels)
            for channel in range(self.channels):
                a.load_short("rdx", At(base="r8", distance=channel * WORD))
                a.store_short(At(base="rcx", distance=channel * self.panel_bytes), "rdx")
            a.add("rcx", WORD)
            if moves:
                a.add("r8", "r9")

    def _look_ahead(self, a: Assembler) -> None:
        """rsi: what is some rows behind r8."""
        a.move("rsi", "r8")
        for _ in range(AHEAD):
            a.add("rsi", "r9")

    def _ask_for(self, a: Assembler, numbers: int) -> None:
        """Fetch the row at rsi, and go to the next."""
        for distance in range(0, numbers * WORD, CACHE_LINE):
            a.prefetch(At(base="rsi", distance=distance))
        a.add("rsi", "r9")

    def _pack_values(self, a: Assembler) -> None:
        self._row_of(a, "r8", VALUES, OF_VALUES)
        a.load("r9", VALUE_STEP)
        self._look_ahead(a)
        a.move("rcx", "r13")
        a.add("rcx", self._values)
        places = [
            v // VECTORS * self._value_panel + v % VECTORS * self.vector
            for v in range(self._value_panels * VECTORS)
        ]
        columns = self._columns(self.width, len(places))
        a.set("r11", self.keys)
        with a.counted("values", "r11"):
            self._ask_for(a, self.width)
            for v, (place, column) in enumerate(zip(places, columns, strict=True)):
                a.load_vector(v % 12, At(base="r8", distance=column * WORD))
                a.store_vector(At(base="rcx", distance=place), v % 12)
            a.add("rcx", self.panel_bytes)
            a.add("r8", "r9")
        a.vector("vxorps", 0, 0, 0)
        for _ in range(self.rounds * UNROLLED - self.keys):
            for place in places:
                a.store_vector(At(base="rcx", distance=place), 0)
            a.add("rcx", self.panel_bytes)

    def _some_rows(self, a: Assembler, name: str, rows: int, constants: Constants) -> None:
        self._take_queries(a, rows, constants)
        self._score(a, name, rows)
        self._exponentiate(a, name, rows, constants)
        self._add_values(a, name, rows)
        a.add("rbp", rows * self.pitch)
        if self.mask_step:
            a.add("rsi", rows * self.mask_step)

    def _take_queries(self, a: Assembler, rows: int, constants: Constants) -> None:
        """The next queries, times the scale."""
        a.load_vector(self.isa.vectors - 1, constants.at(self.scale))
        for row in range(rows):
            vectors = ceil_div(self.channels, self.isa.lanes)
            for v, column in enumerate(self._columns(self.channels, vectors)):
                read = At(base="r12", distance=column * WORD)
                a.vector("vmulps", v % 12, self.isa.vectors - 1, read)
                place = self._queries + (row * self.channels + column) * WORD
                a.store_vector(At(base="r13", distance=place), v % 12)
            a.add("r12", "r14")
        a.move("r8", "r12")
        for _ in range(self.rows):  # the next ones, while these are multiplied
            for distance in range(0, self.channels * WORD, CACHE_LINE):
                a.prefetch(At(base="r8", distance=distance))
            a.add("r8", "r14")

    def _score(self, a: Assembler, name: str, rows: int) -> None:
        """rcx: a panel of keys; r8: the scores of its keys; rdx: the distance of a channel; r9:
        what of the mask is added to them.
        """
        unrolled = math.gcd(self.channels, 16)
        a.move("rcx", "r13")
        a.move("r8", "r13")
        if self.is_masked:
            a.move("r9", "rsi")
        a.set("r10", self.panels)
        with a.counted(f"{name} panels", "r10"):
            self._zero(a, rows)
            a.set("rdx", 0)
            end = self.channels * WORD
            with a.stepped(f"{name} channels", "rdx", unrolled * WORD, end):
                for u in range(unrolled):
                    self._multiply(a, rows, "rcx", u * self.panel_bytes, "r13", "rdx", [
                        self._queries + row * self.channels * WORD + u * WORD
                        for row in range(rows)
                    ])  # fmt: skip
                a.add("rcx", unrolled * self.panel_bytes)
            for row in range(rows):
                for v in range(VECTORS):
                    i = row * VECTORS + v
                    if self.is_masked:
                        distance = row * self.mask_step + v * self.vector
                        a.vector("vaddps", i, i, At(base="r9", distance=distance))
                    a.store_vector(self._score_at("r8", row, v), i)
            a.add("r8", self.panel_bytes)
            if self.is_masked:
                a.add("r9", self.panel_bytes)

    def _score_at(self, base: str, row: int, v: int) -> At:
        return At(base=base, distance=self._scores + row * self._row + v * self.vector)

    def _factor(self, row: int) -> At:
        return At(base="r13", distance=self._factors + row * self.vector)

    def _zero(self, a: Assembler, rows: int) -> None:
        for i in range(rows * VECTORS):
            a.vector("vxorps", i, i, i)

    def _multiply(
        self, a: Assembler, rows: int, panel: str, at: int, base: str, index: str, places: list[int]
    ) -> None:
        """Add to the sums the products of a number of each row and a row of a panel."""
        for v in range(VECTORS):
            a.load_vector(self.rows * VECTORS + v, At(base=panel, distance=at + v * self.vector))
        for row in range(rows):
            spread = (self.rows + 1) * VECTORS + row % 2
            a.broadcast(spread, At(base=base, index=index, distance=places[row]))
            for v in range(VECTORS):
                a.vector("vfmadd231ps", row * VECTORS + v, self.rows * VECTORS + v, spread)

    def _exponentiate(self, a: Assembler, name: str, rows: int, constants: Constants) -> None:
        """The scores of each row become e to what they are below its largest, those of no key 0;
        its factor 1 / their sum.
        """
        self._fold(a, f"{name} largest", "vmaxps", rows)
        for row in range(rows):
            if self.is_masked:  # r9: behind the panels
                a.vector("vsubps", row, row, At(base="r9", distance=row * self.mask_step))
            a.store_vector(self._factor(row), row)
        a.load_vector(self.isa.vectors - 1, constants.at(LOWEST))
        a.move("r8", "r13")
        whole, rest = divmod(self.keys, self.panel)
        if whole:
            a.set("r10", whole)
            with a.counted(f"{name} powers", "r10"):
                self._powers(a, rows, constants, self.panel)
                a.add("r8", self.panel_bytes)
        if rest:
            self._powers(a, rows, constants, rest)
        self._fold(a, f"{name} sums", "vaddps", rows)
        a.load_vector(self.isa.vectors - 1, constants.at(1.0))
        for row in range(rows):
            if self.is_masked:  # of no key, too
                a.vector("vmaxps", row, self.isa.vectors - 1, row)
            a.vector("vdivps", row, self.isa.vectors - 1, row)
            a.store_vector(self._factor(row), row)

    def _fold(self, a: Assembler, label: str, name: str, rows: int) -> None:
        """The scores of each row combined, in all lanes of its vector, the first ones."""
        places = [(row, v) for row in range(rows) for v in range(VECTORS)]
        for i, place in enumerate(places):
            a.load_vector(i, self._score_at("r13", *place))
        if self.panels > 1:
            a.move("r8", "r13")
            a.set("r10", self.panels - 1)
            with a.counted(label, "r10"):
                a.add("r8", self.panel_bytes)
                for i, place in enumerate(places):
                    a.vector(name, i, i, self._score_at("r8", *place))
        for row in range(rows):
            a.vector(name, row, row * VECTORS, row * VECTORS + 1)
        self._across(a, name, rows)

    def _across(self, a: Assembler, name: str, rows: int) -> None:
        """The lanes of each row's vector combined, in all of them."""
        for row in range(rows):
            a.store_vector(self._factor(row), row)
        for row in range(rows):
            at = self._factor(row)
            a.broadcast(row, at)
            for lane in range(1, self.isa.lanes):
                other = self.rows * VECTORS + lane % 4
                a.broadcast(other, At(base=at.base, distance=at.distance + lane * WORD))
                a.vector(name, row, row, other)

    def _powers(self, a: Assembler, rows: int, constants: Constants, keys: int) -> None:
        """Those of a panel, of which the first ``keys`` are any."""
        places = [(row, v) for row in range(rows) for v in range(VECTORS)]
        together = self.rows // 2  # each score has four vectors
        for begin in range(0, len(places), together):
            some = places[begin : begin + together]
            a.interleave([
                functools.partial(self._power, constants, keys, row, v, i)
                for i, (row, v) in enumerate(some)
            ])  # fmt: skip

    def _power(
        self, constants: Constants, keys: int, row: int, v: int, i: int, a: Assembler
    ) -> None:
        """One vector of them; vectors ``4 * i`` to ``4 * i + 3`` are overwritten, and a mask, or
        with AVX2 a vector behind those of all, which says where no key is hidden."""
        place, score, power = self._score_at("r8", row, v), 4 * i, 4 * i + 1
        counts = 1 + i if self.isa == AVX512 else 2 * self.rows + i
        a.load_vector(score, place)
        a.vector("vsubps", score, score, self._factor(row))
        if self.is_masked:  # a NaN counts
            a.compare_lanes("vcmpnltps", counts, score, constants.at(heads.NOTHING))
        a.vector("vmaxps", score, self.isa.vectors - 1, score)  # a NaN stays
        by_mask = self.is_masked and self.isa == AVX512
        mask = counts if by_mask else 0
        exponential(a, constants, score, power, score + 2, score + 3, mask)
        if self.isa == AVX2:
            a.vector("vsubps", score, score, score)  # 0, or a NaN, which the power is not
            a.vector("vaddps", power, power, score)
            if self.is_masked:
                a.vector("vandps", power, power, counts)
        lanes = min(self.isa.lanes, max(0, keys - v * self.isa.lanes))
        if lanes < self.isa.lanes:
            a.vector("vandps", power, power, constants.first(lanes))
        a.store_vector(place, power)

    def _add_values(self, a: Assembler, name: str, rows: int) -> None:
        """rcx: a row of a panel of values; rdx: the distance of its key's score."""
        a.move("rcx", "r13")
        a.add("rcx", self._values)
        columns = self._columns(self.width, self._value_panels * VECTORS)
        for panel in range(self._value_panels):
            self._zero(a, rows)
            a.set("rdx", 0)
            end = self.rounds * UNROLLED * WORD
            with a.stepped(f"{name} values {panel}", "rdx", UNROLLED * WORD, end):
                for u in range(UNROLLED):
                    self._multiply(a, rows, "rcx", u * self.panel_bytes, "r13", "rdx", [
                        self._scores + row * self._row + u * WORD for row in range(rows)
                    ])  # fmt: skip
                a.add("rcx", UNROLLED * self.panel_bytes)
            for row in range(rows):
                for v in range(VECTORS):
                    i = row * VECTORS + v
                    a.vector("vmulps", i, i, self._factor(row))
                    place = row * self.pitch + columns[panel * VECTORS + v] * WORD
                    a.store_vector(At(base="rbp", distance=place), i)
