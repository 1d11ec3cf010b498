"""``deformable_attention`` on a CPU with AVX-512 or AVX2: float32.

A thread takes a query at a time. Where all points of all its heads lie is made first, coordinate by
coordinate: x and y take turns in memory, and so they do in vectors. Then a head adds up the four
pixels around each of its points, which are vectors of a head's channels, each with a weight.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX512, Assembler, At, InstructionSet
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.x86 import LARGEST, ROUNDS, Constants, exponential
from tessella.kernels.shared.x86_row_end import RowEnd
from tessella.operations.problem import Problem

ALONE_NUMBERS = 2**14  # so few are not worth waking a thread
MOST_POINTS = 64  # of a head: code for each
MOST_COORDINATES = 2**12  # of a query: they lie on the stack
MOST_SIDE = 2**20  # of a map: places between its pixels are still known
MOST_VECTORS = 7  # of a head's channels, AVX2's registers
VALUE, BOXES, OFFSETS, SCORES, RESULT, TABLES = map(code.given, range(6))
ITEM = OF_VALUE, OF_BOX, OF_OFFSETS, OF_SCORES, OF_RESULT = tuple(i * code.NUMBER for i in range(5))
# tables of a number for each coordinate of a query
SHARE, SIDE, LAST, STEP, BEGIN = range(5)
# what a query's coordinates become, on the stack; behind them a head's weights
NEAR_AT, FAR_AT, NEAR, FAR, WEIGHTS = range(5)
# vectors while places are made
CENTRE, SIDES, ZERO, AT, LOW, SHARE_OF, PIXEL, SPARE = range(8)
# vectors while points are added up
LEFT, RIGHT, ABOVE, BELOW, WEIGHT, UPPER, LOWER, WHOLE, SUMS = range(9)
REST = 15
# masks of AVX-512 behind those of a row's end
SOME_SCORES, SOME_COORDINATES, OF_A_BOX, EQUAL = 3, 4, 5, 6


def fits(problem: Problem) -> str | None:
    metas = (*problem.given, problem.output)
    if problem.constant:
        return "takes no constants"
    if {m.dtype for m in metas} != {"float32"}:
        return "float32 alone"
    if any(m.format != "contiguous" for m in metas):
        return "needs dense rows"
    if 0 in problem.output.shape:
        return "nothing to see"
    if max(m.extent for m in metas) > code.MAX_BYTES:
        return "distances have 32 bits"
    heads, points = problem.attrs["heads"], sum(problem.attrs["points"])
    depth, lanes = problem.output.shape[2] // heads, code.require_instructions().lanes
    if max(problem.attrs["sizes"]) > MOST_SIDE or depth > MOST_VECTORS * lanes:
        return f"maps of up to {MOST_SIDE} pixels a side, heads of {MOST_VECTORS * lanes} channels"
    if points > MOST_POINTS or 2 * heads * points > MOST_COORDINATES:
        return f"up to {MOST_POINTS} points a head and {MOST_COORDINATES // 2} a query"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    isa, attrs = code.require_instructions(), problem.attrs
    images, _, channels = problem["value"].shape
    queries, heads, total = problem["boxes"].shape[1], attrs["heads"], sum(attrs["points"])
    looks = _Looks(isa, Constants(isa, "rbp"), heads, total, channels // heads)
    query, image = np.arange(images * queries), np.repeat(np.arange(images), queries)
    rows = [image, query, query, query, query]
    items = np.stack(
        [
            row * (meta.extent // (images if meta is problem["value"] else len(query)))
            for row, meta in zip(rows, (*problem.given, problem.output), strict=True)
        ],
        1,
    )
    tables = looks.tables(attrs["sizes"], attrs["points"], attrs["spread"], channels)
    made = _machine_code(isa, heads, total, channels // heads)

    def numbers(*tensors: torch.Tensor) -> tuple[int, ...]:
        return *(t.data_ptr() for t in tensors), tables.data_ptr()

    few = len(query) * channels * total <= ALONE_NUMBERS
    return code.Launch(made, code.Table(items, tables), numbers, few=few)


@functools.lru_cache(64)
def _machine_code(isa: InstructionSet, heads: int, total: int, depth: int) -> code.MachineCode:
    """Of all layers of one width."""
    constants = Constants(isa, "rbp")
    written = _Looks(isa, constants, heads, total, depth).written()
    return code.MachineCode(written.code(), constants)


@dataclass(frozen=True)
class _Looks:
    """Machine code for queries of so many heads, of ``total`` points and ``depth`` channels."""

    isa: InstructionSet
    constants: Constants
    heads: int
    total: int
    depth: int

    @property
    def _coordinates(self) -> int:
        return 2 * self.heads * self.total

    @property
    def _array(self) -> int:
        """Bytes of a number for each coordinate, whole vectors."""
        return -(-self._coordinates // self.isa.lanes) * self.isa.vector_bytes

    def tables(
        self, sizes: tuple[int, ...], points: tuple[int, ...], spread: float, channels: int
    ) -> torch.Tensor:
        """A row of 32 bits for each coordinate: how far an offset of 1 leads in a box of the whole
        map, the map's side, its last pixel, the bytes from a pixel to the next, and where the
        head's first pixel begins.
        """
        made = np.zeros((5, self._array // 4), np.float32)
        heights, widths = np.array(sizes[::2]), np.array(sizes[1::2])
        starts = np.cumsum([0, *(heights * widths)])[:-1]

        def spread_out(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            """Of all coordinates, where those of each level are known."""
            return np.tile(np.repeat(np.stack([x, y], 1), points, 0), (self.heads, 1)).ravel()

        side = spread_out(widths, heights)
        known = slice(0, self._coordinates)
        made[SHARE, known] = side * (spread / spread_out(np.array(points), np.array(points)))
        made[SIDE, known], made[LAST, known] = side, side - 1
        row = channels * 4
        whole = made.view(np.int32)
        whole[STEP, known] = spread_out(np.full(len(points), row), widths * row)
        whole[BEGIN, known] = spread_out(starts * row, starts * 0)
        whole[BEGIN, known][::2] += np.repeat(np.arange(self.heads), self.total) * self.depth * 4
        return torch.from_numpy(made)

    def written(self) -> Assembler:
        """The code.

        rdi: the call; rbx: the item; r8, r9, r10, r11: a query's offsets and scores, the image's
        value, the result; r12: tables; rcx: heads that are left.
        """
        a, isa = Assembler(self.isa), self.isa
        with a.function(WEIGHTS * self._array + self._weights * isa.vector_bytes):
            self.constants.begin(a)
            if isa == AVX512:
                some = ((SOME_SCORES, self.total), (SOME_COORDINATES, self._coordinates),
                        (OF_A_BOX, 4))  # fmt: skip
                for mask, count in some:
                    a.set("rax", (1 << 4 * (count % isa.lanes)) - 1)
                    a.mask(mask, "rax")
            if self.depth % isa.lanes:
                self._end.begin(a, self.constants, self.depth % isa.lanes)
            a.load("r12", TABLES)
            with code.each_item(a, "rbx", len(ITEM)):
                for to, base, row in (
                    ("r10", VALUE, OF_VALUE), ("rdx", BOXES, OF_BOX), ("r8", OFFSETS, OF_OFFSETS),
                    ("r9", SCORES, OF_SCORES), ("r11", RESULT, OF_RESULT),
                ):  # fmt: skip
                    a.load(to, base)
                    a.add_stored(to, At(base="rbx", distance=row))
                self._places(a)
                a.move("r13", "rsp")
                a.set("rcx", self.heads)
                with a.counted("head", "rcx"):
                    self._weigh(a)
                    self._add_up(a)
                    a.add("r9", self.total * 4)
                    a.add("r11", self.depth * 4)
        return a

    @property
    def _end(self) -> RowEnd:
        return RowEnd(self.isa, REST)

    @property
    def _weights(self) -> int:
        """Vectors of a head's weights."""
        return -(-self.total // self.isa.lanes)

    def _load_some(self, a: Assembler, to: int, at: At, mask: int, count: int) -> None:
        """The first numbers of a vector; ``mask`` is AVX-512's of them."""
        if self.isa == AVX512:
            a.load_vector(to, at, mask)
        else:
            a.load_vector(SPARE, self.constants.first(count))
            a.load_some(to, at, SPARE)

    def _keep(self, a: Assembler, x: int, comparison: str, one: int, other: int | At) -> None:
        """0 where the comparison does not hold."""
        if self.isa == AVX512:
            a.compare_lanes(comparison, EQUAL, one, other)
            a.vector("vandps", x, x, x, EQUAL)
        else:
            a.compare_lanes(comparison, SPARE, one, other)
            a.vector("vandps", x, x, SPARE)

    def _places(self, a: Assembler) -> None:
        """Distances of the pixels around all points, and their shares, to the stack."""
        self._load_some(a, AT, At(base="rdx"), OF_A_BOX, 4)
        for to, first in ((CENTRE, 0), (SIDES, 2)):
            turns = first + torch.arange(self.isa.lanes, dtype=torch.int32) % 2
            a.load_vector(LOW, self.constants.held(("turns", first), turns.view(torch.float32)))
            a.vector("vpermd", to, LOW, AT)
        a.vector("vxorps", ZERO, ZERO, ZERO)
        whole, rest = divmod(self._coordinates, self.isa.lanes)
        a.set("rdx", 0)
        if whole:
            with a.stepped("place", "rdx", self.isa.vector_bytes, whole * self.isa.vector_bytes):
                a.load_vector(AT, At(base="r8", index="rdx"))
                self._place(a)
        if rest:
            self._load_some(a, AT, At(base="r8", index="rdx"), SOME_COORDINATES, rest)
            self._place(a)

    def _place(self, a: Assembler) -> None:
        """Of a vector of offsets."""

        def table(row: int) -> At:
            return At(base="r12", index="rdx", distance=row * self._array)

        at = self.constants.at
        a.vector("vmulps", AT, AT, table(SHARE))
        a.vector("vmulps", AT, AT, SIDES)
        a.vector("vfmadd231ps", AT, CENTRE, table(SIDE))
        a.vector("vsubps", AT, AT, at(0.5))
        # outside by more than a pixel nothing is seen; a number that is none lies there, too
        a.vector("vmaxps", AT, AT, at(-1.0))
        a.vector("vminps", AT, AT, table(SIDE))
        # a place on a pixel may have that before it as the near one, whose share is 0 then
        a.vector("vsubps", LOW, AT, at(0.5))
        a.vector("vaddps", LOW, LOW, at(ROUNDS))
        a.vector("vsubps", LOW, LOW, at(ROUNDS))
        a.vector("vsubps", AT, AT, LOW)
        a.load_vector(SHARE_OF, at(1.0))
        a.vector("vsubps", SHARE_OF, SHARE_OF, AT)
        self._pixel(a, SHARE_OF, NEAR, NEAR_AT)
        a.vector("vaddps", LOW, LOW, at(1.0))
        self._pixel(a, AT, FAR, FAR_AT)

    def _pixel(self, a: Assembler, share: int, shares: int, distances: int) -> None:
        """Store the share of the pixels ``LOW``, or 0 if they lie outside, and where they are, or
        the last ones inside.
        """

        def table(base: str, row: int) -> At:
            return At(base=base, index="rdx", distance=row * self._array)

        a.vector("vmaxps", PIXEL, LOW, ZERO)
        a.vector("vminps", PIXEL, PIXEL, table("r12", LAST))
        self._keep(a, share, "vcmpeqps", PIXEL, LOW)
        a.store_vector(table("rsp", shares), share)
        a.convert("vcvtps2dq", PIXEL, PIXEL)
        a.vector("vpmulld", PIXEL, PIXEL, table("r12", STEP))
        a.vector("vpaddd", PIXEL, PIXEL, table("r12", BEGIN))
        a.store_vector(table("rsp", distances), PIXEL)

    def _weigh(self, a: Assembler) -> None:
        """e to each of a head's scores less the highest, to the stack."""
        highest, y, made, n, f = range(5)
        a.broadcast(highest, At(base="r9"))
        for point in range(1, self.total):
            a.broadcast(y, At(base="r9", distance=4 * point))
            a.vector("vmaxps", highest, highest, y)
        for i in range(self._weights):
            at = At(base="r9", distance=i * self.isa.vector_bytes)
            count = min(self.isa.lanes, self.total - i * self.isa.lanes)
            if count == self.isa.lanes:
                a.load_vector(y, at)
            else:
                self._load_some(a, y, at, SOME_SCORES, count)
            a.vector("vsubps", y, y, highest)
            a.copy_vector(5, y)
            a.load_vector(n, self.constants.at(-LARGEST))
            a.vector("vmaxps", y, n, y)  # of a NaN that
            exponential(a, self.constants, y, made, n, f)
            if self.isa != AVX512:
                a.vector("vsubps", n, y, y)  # 0, or a NaN, whose bits the exponent has changed
                a.vector("vaddps", made, made, n)
            a.load_vector(n, self.constants.at(-LARGEST))
            self._keep(a, made, "vcmpnltps", 5, n)
            a.store_vector(
                At(base="rsp", distance=WEIGHTS * self._array + i * self.isa.vector_bytes), made
            )

    def _add_up(self, a: Assembler) -> None:
        """The mean of what a head's points see.

        r13: a point's coordinates on the stack; r14: its weight; r15: points that are left; rsi,
        rbx: the rows of the map above and below it; rax, rdx: how far in them.
        """
        vectors = -(-self.depth // self.isa.lanes)
        sums = range(SUMS, SUMS + vectors)
        for i in (WHOLE, *sums):
            a.vector("vxorps", i, i, i)
        a.move("r14", "rsp")
        a.add("r14", WEIGHTS * self._array)
        a.set("r15", self.total)

        def place(array: int, axis: int) -> At:
            return At(base="r13", distance=array * self._array + 4 * axis)

        with a.counted("point", "r15"):
            for to, array, axis in (
                ("rax", NEAR_AT, 0), ("rdx", FAR_AT, 0), ("rsi", NEAR_AT, 1), ("rbx", FAR_AT, 1)
            ):  # fmt: skip
                a.load_short(to, place(array, axis))
                if axis:
                    a.add(to, "r10")
            for share, array, axis in (
                (LEFT, NEAR, 0), (RIGHT, FAR, 0), (ABOVE, NEAR, 1), (BELOW, FAR, 1)
            ):  # fmt: skip
                a.broadcast(share, place(array, axis))
            a.broadcast(WEIGHT, At(base="r14"))
            a.vector("vaddps", WHOLE, WHOLE, WEIGHT)
            a.vector("vmulps", ABOVE, ABOVE, WEIGHT)
            a.vector("vmulps", BELOW, BELOW, WEIGHT)
            for i, total in enumerate(sums):
                for made, of_row, share in ((UPPER, "rsi", ABOVE), (LOWER, "rbx", BELOW)):
                    self._seen(a, WEIGHT, of_row, "rax", i)
                    a.vector("vmulps", made, WEIGHT, LEFT)
                    self._seen(a, WEIGHT, of_row, "rdx", i)
                    a.vector("vfmadd231ps", made, WEIGHT, RIGHT)
                    a.vector("vfmadd231ps", total, made, share)
            a.add("r13", 8)
            a.add("r14", 4)
        for i, total in enumerate(sums):
            a.vector("vdivps", total, total, WHOLE)
            at = At(base="r11", distance=i * self.isa.vector_bytes)
            self._end.store(a, at, total, 4, is_end=(i + 1) * self.isa.lanes > self.depth)

    def _seen(self, a: Assembler, to: int, row: str, column: str, vector: int) -> None:
        at = At(base=row, index=column, distance=vector * self.isa.vector_bytes)
        self._end.load(a, to, at, 4, is_end=(vector + 1) * self.isa.lanes > self.depth)
