"""``pointwise`` on a CPU with AVX-512 or AVX2: a program of float32 numbers in one pass, or of
bfloat16 (AVX-512 with BF16), which are float32 in registers, as its constants may be in memory.

A thread takes some rows at a time. Of a row a vector of columns after the other is loaded, goes
through the program in registers, and is stored; what is one number a row, or a vector that all rows
share, is read as it lies. Single operations are programs of one instruction.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tessella.core.errors import CompileError, KernelError
from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX512, Assembler, At, InstructionSet
from tessella.device.x86.code import MAX_BYTES
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.x86 import TEMPORARIES, Constants, activate
from tessella.kernels.pointwise.walk import Walk, walk
from tessella.kernels.shared.axes import Axes
from tessella.kernels.shared.x86_row_end import RowEnd
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem

BLOCK_NUMBERS = 2**14  # that one thread takes at a time
ALONE_NUMBERS = 2**13  # so few are not worth waking a thread
WIDE_COLUMN = "rsi"  # of constants in float32 beside bfloat16
# one a tensor
POINTERS = ("r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rbp", WIDE_COLUMN)

BINARY = {"add": "vaddps", "sub": "vsubps", "mul": "vmulps", "div": "vdivps"}
WITH_NUMBER = {"plus": "vaddps", "times": "vmulps", "over": "vdivps"}
BOUNDS = {"at_least": "vmaxps", "at_most": "vminps"}


def fits(problem: Problem) -> str | None:
    free = [m for i, m in enumerate(problem.inputs) if i not in problem.constant]
    dtypes = {m.dtype for m in (*free, *problem.outputs) if m is not None}
    if dtypes != {"float32"} and (dtypes != {"bfloat16"} or not code.has_bfloat16()):
        return "float32 throughout, or bfloat16 where the processor rounds to it"
    if len(problem.outputs) != 1:
        return "makes one result"
    try:
        walked, isa = walk(problem), code.require_instructions()
    except (KernelError, CompileError) as reason:
        return str(reason)
    lowered, axes = walked.lowered, walked.axes
    sizes = {m.itemsize for m in lowered.metas(problem.given)} | {problem.output.itemsize}
    if any(m.dtype not in (problem.output.dtype, "float32") for m in lowered.metas(problem.given)):
        return "its constants have another element type"
    if 0 in problem.output.shape:
        return "nothing to make"
    if unknown := sorted({op for op, n in zip(lowered.ops, lowered.numbers) if not _known(op, n)}):
        return f"no machine code for {', '.join(unknown)}"
    if len(axes.strides) > (most := len(POINTERS) - (len(sizes) > 1)):
        return f"at most {most} tensors"
    if any(s[-1] not in (0, 1) for s in axes.strides) or axes.strides[-1][-1] != 1:
        return "numbers of a row lie apart"
    if max(math.prod(m.shape) for m in problem.given) * 4 > MAX_BYTES or problem.output.extent > (
        MAX_BYTES
    ):
        return "distances have 32 bits"
    if _registers(walked) > isa.vectors - TEMPORARIES - 1:
        return "more values at a time than registers"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    walked, isa = walk(problem), code.require_instructions()
    operands = walked.lowered.binder(constants)
    axes = _rows_of_columns(walked.axes, isa)
    metas = [*walked.lowered.metas(problem.given), problem.output]
    sizes = tuple(m.itemsize for m in metas)
    items = _items(axes, sizes)
    _require_inside(problem, walked, axes, items)
    table = code.Table(items)
    made = _machine_code(isa, walked, axes, sizes)

    def numbers(*tensors: torch.Tensor) -> tuple[int, ...]:
        *inputs, out = tensors
        read = operands(problem.tensors(constants, inputs))
        return (*(t.data_ptr() for t in read), out.data_ptr())

    return code.Launch(made, table, numbers, few=math.prod(axes.sizes) <= ALONE_NUMBERS)


_made: dict[tuple[object, ...], code.MachineCode] = {}  # by all that it depends on
_MOST_MADE = 256


def _machine_code(
    isa: InstructionSet, walked: Walk, axes: Axes, sizes: tuple[int, ...]
) -> code.MachineCode:
    """The machine code of a program, which is the same for all batch sizes: a step of a plan is
    bound in two thirds of the time with it.
    """
    lowered = walked.lowered
    program = repr((lowered.ops, lowered.reads, lowered.numbers, lowered.results))
    strides = tuple(s[-2:] for s in axes.strides)
    key = isa, program, walked.inputs, axes.columns, strides, sizes
    made = _made.get(key)
    if made is None:
        written = _Program(isa=isa, walked=walked, axes=axes, constants=Constants(isa), sizes=sizes)
        made = code.MachineCode(written.written().code(), written.constants)
        if len(_made) >= _MOST_MADE:
            _made.clear()
        _made[key] = made
    return made


def _known(op: str, numbers: tuple[float, float, float]) -> bool:
    if op == "power":
        return numbers[0] == 2
    return op in {*BINARY, *WITH_NUMBER, *BOUNDS, *ACTIVATIONS, "neg", "leaky_relu"}


def _registers(walked: Walk) -> int:
    """The vectors that hold values at the same time, at most."""
    _, most = _places(walked)
    return most


def _places(walked: Walk) -> tuple[list[int], int]:
    """The vector of each operand and each step, and how many there are.

    An operand is loaded where it is read first; a step takes the place of what it is the last to
    read.
    """
    lowered, count = walked.lowered, walked.inputs
    last = {r: n for n, reads in enumerate(_reads(walked)) for r in reads}
    last[lowered.results[0]] = len(lowered.ops)
    places: dict[int, int] = {}
    free: list[int] = []
    most = itertools.count()
    for number, reads in enumerate(_reads(walked)):
        for read in (r for r in reads if r not in places):
            places[read] = free.pop() if free else next(most)
        free += [places[r] for r in dict.fromkeys(reads) if last[r] == number]
        places[count + number] = free.pop() if free else next(most)
    for result in lowered.results:
        if result not in places:
            places[result] = next(most)
    return [places.get(v, 0) for v in range(count + len(lowered.ops))], next(most)


def _reads(walked: Walk) -> list[tuple[int, ...]]:
    """The values that each step reads."""
    lowered = walked.lowered
    both = zip(lowered.ops, lowered.reads, strict=True)
    return [(x, y) if op in BINARY else (x,) for op, (x, y) in both]


def _rows_of_columns(axes: Axes, isa: InstructionSet) -> Axes:
    """The walk with at least two axes, for which long rows are cut into equal ones where
    possible.
    """
    *rows, columns = axes.sizes
    widths = range(min(BLOCK_NUMBERS, columns) // isa.lanes * isa.lanes, 0, -isa.lanes)
    width = next((w for w in widths if columns % w == 0), columns)
    if columns <= BLOCK_NUMBERS and rows:
        return axes
    strides = tuple((*s[:-1], s[-1] * width, s[-1]) for s in axes.strides)
    return Axes(sizes=(*rows, columns // width, width), strides=strides)


def _items(axes: Axes, sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """What threads take one by one: where some rows begin in each tensor, in bytes; how many."""
    *outer, rows, columns = axes.sizes
    some = max(1, min(rows, BLOCK_NUMBERS // columns))
    row = np.arange(0, rows, some)
    table = np.empty((*outer, len(row), len(axes.strides) + 1), np.int64)
    places = np.ix_(*map(np.arange, outer), row)
    for number, (strides, size) in enumerate(zip(axes.strides, sizes, strict=True)):
        steps = strides[: len(outer) + 1]  # all but that of a row's numbers
        table[..., number] = size * sum(at * step for at, step in zip(places, steps, strict=True))
    table[..., -1] = np.minimum(some, rows - row)
    return table.reshape(-1, len(axes.strides) + 1)


def _require_inside(
    problem: Problem, walked: Walk, axes: Axes, items: npt.NDArray[np.int64]
) -> None:
    """Refuse a table that leads out of a tensor, whoever wrote it."""
    *begins, rows = torch.from_numpy(items).T
    metas = [*walked.lowered.metas(problem.given), problem.output]
    for meta, begin, strides in zip(metas, begins, axes.strides, strict=True):
        columns = (axes.columns - 1) * strides[-1] + 1
        spans = meta.itemsize * ((rows - 1) * strides[-2] + columns)
        code.require_inside("tensor", begin, spans, meta.extent)


@dataclass(frozen=True, kw_only=True)
class _Program:
    """Machine code for rows of columns; ``sizes``: bytes of each tensor's numbers, 4, or 2."""

    isa: InstructionSet
    walked: Walk
    axes: Axes
    constants: Constants
    sizes: tuple[int, ...]

    def written(self) -> Assembler:
        """The code.

        rdi: the call, with the tensors' addresses; rbx: the item;
        ``POINTERS``: the row of each tensor; rcx: rows that are left; rdx: the column, in bytes of
        the result, and ``WIDE_COLUMN`` in those of float32 where both are read.
        """
        a, tensors = Assembler(self.isa), len(self.axes.strides)
        whole, rest = divmod(self.axes.columns, self.isa.lanes)
        with a.function():
            if rest:
                self._begin_rest(a, rest)
            with code.each_item(a, "rbx", tensors + 1):
                for i, pointer in enumerate(POINTERS[:tensors]):
                    a.load(pointer, code.given(i))
                    a.add_stored(pointer, At(base="rbx", distance=i * code.NUMBER))
                a.load("rcx", At(base="rbx", distance=tensors * code.NUMBER))
                self.constants.begin(a)
                with a.counted("row", "rcx"):
                    a.set("rdx", 0)
                    if self._is_mixed:
                        a.set(WIDE_COLUMN, 0)
                    if whole:
                        size = self.isa.lanes * self.sizes[-1]
                        with a.stepped("columns", "rdx", size, whole * size):
                            self._vector(a, is_rest=False)
                            if self._is_mixed:
                                a.add(WIDE_COLUMN, self.isa.vector_bytes)
                    if rest:
                        self._vector(a, is_rest=True)
                    for pointer, strides, size in zip(
                        POINTERS, self.axes.strides, self.sizes, strict=False
                    ):
                        if strides[-2]:
                            a.add(pointer, size * strides[-2])
        return a

    def _begin_rest(self, a: Assembler, rest: int) -> None:
        """The mask of the columns that make no whole vector."""
        if self.isa != AVX512:
            self.constants.begin(a)
        self._end.begin(a, self.constants, rest)

    @property
    def _is_mixed(self) -> bool:
        return len(set(self.sizes)) > 1

    @property
    def _end(self) -> RowEnd:
        return RowEnd(self.isa, self.isa.vectors - 1)

    def _vector(self, a: Assembler, *, is_rest: bool) -> None:
        """A vector of columns from rdx on, or what is left of the row."""
        lowered = self.walked.lowered
        places, _ = _places(self.walked)
        loaded: set[int] = set()
        for number, (op, reads) in enumerate(zip(lowered.ops, _reads(self.walked), strict=True)):
            for read in reads:
                if read < self.walked.inputs and read not in loaded:
                    self._load(a, places[read], read, is_rest)
                    loaded.add(read)
            to = places[self.walked.inputs + number]
            self._step(a, op, to, [places[r] for r in reads], lowered.numbers[number][0])
        (result,) = lowered.results
        if result < self.walked.inputs and result not in loaded:
            self._load(a, places[result], result, is_rest)
        at = self._at(len(self.axes.strides) - 1)
        self._end.store(a, at, places[result], self.sizes[-1], is_end=is_rest)

    def _load(self, a: Assembler, to: int, operand: int, is_rest: bool) -> None:
        at = self._at(operand)
        if self.axes.strides[operand][-1] == 0:
            spread = a.broadcast_bfloat16 if self.sizes[operand] == 2 else a.broadcast
            spread(to, At(base=at.base))
        else:
            self._end.load(a, to, at, self.sizes[operand], is_end=is_rest)

    def _at(self, tensor: int) -> At:
        is_wide = self.sizes[tensor] > self.sizes[-1]
        return At(base=POINTERS[tensor], index=WIDE_COLUMN if is_wide else "rdx")

    def _step(self, a: Assembler, op: str, to: int, reads: list[int], number: float) -> None:
        x, first = reads[0], self.isa.vectors - 1 - TEMPORARIES
        if op in BINARY:
            a.vector(BINARY[op], to, x, reads[1])
        elif op in WITH_NUMBER:
            a.vector(WITH_NUMBER[op], to, x, self.constants.at(number))
        elif op == "neg":
            a.vector("vmulps", to, x, self.constants.at(-1.0))
        elif op == "power":
            a.vector("vmulps", to, x, x)
        elif op == "leaky_relu":  # the larger of x and its multiple, or the smaller of a steep one
            a.vector("vmulps", first, x, self.constants.at(number))
            a.vector("vmaxps" if number <= 1 else "vminps", to, first, x)
        elif op in BOUNDS:  # of a NaN the second
            a.load_vector(first, self.constants.at(number))
            a.vector(BOUNDS[op], to, first, x)
        else:
            if to != x:
                a.copy_vector(to, x)
            activate(a, op, self.constants, to, first)
