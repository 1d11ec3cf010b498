"""``layer_norm`` on a CPU with AVX-512 or AVX2: rows of float32 or bfloat16 (AVX-512 with BF16).

A thread takes some rows at a time. Of a row, which stays in the first cache, first the mean is
taken, then the mean square of what differs from it, so that a large mean costs no digits; then it
is normalized, weighed and stored. Sums are float32, in four vectors at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tessella.device.packing import packed
from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX512, Assembler, At, InstructionSet
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.x86 import Constants
from tessella.kernels.shared.x86_row_end import LANES, RowEnd
from tessella.operations.problem import Problem

BLOCK_NUMBERS = 2**13  # that one thread takes at a time
ALONE_NUMBERS = 2**13  # so few are not worth waking a thread
WRITTEN_OUT = 16  # vectors of a row at most: more are a loop
SUMS = 4  # vectors, the first ones; behind them what is read
READ, MEAN, SPREAD, ORDERS, REST = 4, 8, 9, 10, 15
INPUT, RESULT, WEIGHT, BIAS = map(code.given, range(4))
ITEM = OF_ROWS, COUNT = 0, code.NUMBER


def fits(problem: Problem) -> str | None:
    x, y = problem["input"], problem.output
    if problem.is_constant("input"):
        return "its input is a constant"
    if (x.dtype, y.dtype) != ("float32", "float32") and (
        (x.dtype, y.dtype) != ("bfloat16", "bfloat16") or not code.has_bfloat16()
    ):
        return "float32 throughout, or bfloat16 where the processor rounds to it"
    if x.format != "contiguous" or y.format != "contiguous":
        return "needs contiguous rows"
    if not problem.operation.shapes(problem.inputs).keys() - {"input"} <= set(problem.constants):
        return "weight and bias must be constants"
    if 0 in x.shape:
        return "nothing to make"
    if x.extent > code.MAX_BYTES:
        return "distances have 32 bits"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    x, isa = problem["input"], code.require_instructions()
    columns = math.prod(problem.attrs["normalized_shape"])
    rows = math.prod(x.shape) // columns
    some = max(1, BLOCK_NUMBERS // columns)
    begins = np.arange(0, rows, some)
    counts = np.minimum(some, rows - begins)
    row_bytes = columns * x.itemsize
    items = np.stack((begins * row_bytes, counts), 1)
    code.require_inside(
        "rows", torch.from_numpy(items[:, 0]), torch.from_numpy(counts * row_bytes), x.extent
    )
    weight, bias = (_filled(constants.get(i), isa) for i in (1, 2))
    made = _machine_code(
        isa, columns, x.itemsize, float(problem.attrs["eps"]), weight is not None, bias is not None
    )
    beside = tuple(0 if t is None else t.data_ptr() for t in (weight, bias))

    def numbers(x: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
        return x.data_ptr(), out.data_ptr(), *beside

    table = code.Table(items, weight, bias)
    return code.Launch(made, table, numbers, few=rows * columns <= ALONE_NUMBERS)


def _filled(tensor: torch.Tensor | None, isa: InstructionSet) -> torch.Tensor | None:
    """Weight or bias in float32, with zeros up to a whole vector."""
    if tensor is None:
        return None

    def fill(t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(t.detach().float().flatten(), (0, -t.numel() % isa.lanes))

    return packed(tensor, ("layer_norm.x86", isa.lanes), fill)


@functools.lru_cache(64)
def _machine_code(
    isa: InstructionSet, columns: int, size: int, eps: float, has_weight: bool, has_bias: bool
) -> code.MachineCode:
    """Of all layers of one width."""
    constants = Constants(isa, "rbp")
    norm = _Norm(isa, constants, columns, size, eps, has_weight, has_bias)
    return code.MachineCode(norm.written().code(), constants)


@dataclass(frozen=True)
class _Norm:
    """Machine code for rows of so many columns, of ``size`` bytes a number."""

    isa: InstructionSet
    constants: Constants
    columns: int
    size: int
    eps: float
    has_weight: bool
    has_bias: bool

    def written(self) -> Assembler:
        """The code.

        rdi: the call; rbx: the item; r8, r9: a row and its result; r10, r11: weight and bias; rcx:
        rows that are left; rdx, rsi: how far in the row and in the weight, in bytes.
        """
        a, rest = Assembler(self.isa), self.columns % self.isa.lanes
        with a.function():
            self.constants.begin(a)
            for i, order in enumerate(self._orders()):
                held = self.constants.held(("across", i), order.view(torch.float32))
                a.load_vector(ORDERS + i, held)
            if rest:
                self._end.begin(a, self.constants, rest)
            a.load("r10", WEIGHT)
            a.load("r11", BIAS)
            with code.each_item(a, "rbx", len(ITEM)):
                for to, base in (("r8", INPUT), ("r9", RESULT)):
                    a.load(to, base)
                    a.add_stored(to, At(base="rbx", distance=OF_ROWS))
                a.load("rcx", At(base="rbx", distance=COUNT))
                with a.counted("row", "rcx"):
                    self._row(a)
                    for pointer in ("r8", "r9"):
                        a.add(pointer, self.columns * self.size)
        return a

    def _orders(self) -> Iterator[torch.Tensor]:
        """By which lanes the halves of a vector, of its halves, and so on, change places."""
        step = self.isa.lanes // 2
        while step:
            yield torch.arange(self.isa.lanes, dtype=torch.int32) ^ step
            step //= 2

    def _row(self, a: Assembler) -> None:
        # The mean as the first number and what the others differ from it: of equal numbers it is
        # that, where one rounding of a sum would be divided by the square root of eps.
        first = At(base="r8")
        a.broadcast_bfloat16(MEAN, first) if self.size == 2 else a.broadcast(MEAN, first)
        self._begin_sums(a)
        self._each_vector(a, "sum", self._add)
        self._mean_of_sums(a, SPREAD)
        a.vector("vaddps", MEAN, MEAN, SPREAD)
        self._begin_sums(a)
        self._each_vector(a, "square", self._add_square)
        self._mean_of_sums(a, SPREAD)
        a.vector("vaddps", SPREAD, SPREAD, self.constants.at(self.eps))
        a.convert("vsqrtps", SPREAD, SPREAD)
        a.load_vector(READ, self.constants.at(1.0))
        a.vector("vdivps", SPREAD, READ, SPREAD)
        self._each_vector(a, "store", self._store)

    def _begin_sums(self, a: Assembler) -> None:
        for i in range(SUMS):
            a.vector("vxorps", i, i, i)

    def _mean_of_sums(self, a: Assembler, to: int) -> None:
        """The mean of all lanes of all sums, in each lane."""
        a.vector("vaddps", 0, 0, 1)
        a.vector("vaddps", 2, 2, 3)
        a.vector("vaddps", 0, 0, 2)
        for i, _ in enumerate(self._orders()):
            a.vector("vpermd", 1, ORDERS + i, 0)
            a.vector("vaddps", 0, 0, 1)
        a.vector("vmulps", to, 0, self.constants.at(1 / self.columns))

    def _each_vector(
        self, a: Assembler, name: str, write: Callable[[Assembler, int, int, bool], None]
    ) -> None:
        """Code for each vector of the row.

        Args:
            write: given its number behind rdx and rsi, and whether it is what is left of the row.
        """
        whole, rest = divmod(self.columns, self.isa.lanes)
        looped = whole // SUMS if whole > WRITTEN_OUT else 0
        step = SUMS * self.isa.lanes
        a.set("rdx", 0)
        a.set("rsi", 0)
        if looped:
            with a.stepped(name, "rdx", step * self.size, looped * step * self.size):
                for i in range(SUMS):
                    write(a, i, i, False)
                a.add("rsi", step * 4)
        for i in range(whole - looped * SUMS):
            write(a, i, i % SUMS, False)
        if rest:
            write(a, whole - looped * SUMS, 0, True)

    def _load(self, a: Assembler, to: int, vector: int, is_rest: bool) -> None:
        at = At(base="r8", index="rdx", distance=vector * self.isa.lanes * self.size)
        self._end.load(a, to, at, self.size, is_end=is_rest)

    @property
    def _end(self) -> RowEnd:
        return RowEnd(self.isa, REST)

    def _centred(self, a: Assembler, vector: int, sums: int, is_rest: bool) -> int:
        """The vector's numbers less ``MEAN``, and 0 behind the row's end."""
        read = READ + sums
        self._load(a, read, vector, is_rest)
        a.vector("vsubps", read, read, MEAN, LANES if is_rest and self.isa == AVX512 else 0)
        if is_rest and self.isa != AVX512:
            a.vector("vandps", read, read, REST)
        return read

    def _add(self, a: Assembler, vector: int, sums: int, is_rest: bool) -> None:
        a.vector("vaddps", sums, sums, self._centred(a, vector, sums, is_rest))

    def _add_square(self, a: Assembler, vector: int, sums: int, is_rest: bool) -> None:
        read = self._centred(a, vector, sums, is_rest)
        a.vector("vfmadd231ps", sums, read, read)

    def _store(self, a: Assembler, vector: int, number: int, is_rest: bool) -> None:
        x, factor, lanes = READ + number, number, self.isa.lanes
        self._load(a, x, vector, is_rest)
        a.vector("vsubps", x, x, MEAN)
        a.vector("vmulps", x, x, SPREAD)
        weight, bias = (
            At(base=base, index="rsi", distance=vector * lanes * 4) for base in ("r10", "r11")
        )
        if self.has_weight and self.has_bias:
            a.load_vector(factor, weight)
            a.vector("vfmadd213ps", x, factor, bias)
        elif self.has_weight:
            a.vector("vmulps", x, x, weight)
        elif self.has_bias:
            a.vector("vaddps", x, x, bias)
        at = At(base="r9", index="rdx", distance=vector * lanes * self.size)
        self._end.store(a, at, x, self.size, is_end=is_rest)
