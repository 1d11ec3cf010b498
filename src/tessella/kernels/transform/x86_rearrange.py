"""``rearrange`` on a CPU with AVX-512 or AVX2: rows that lie together on both sides, and two runs
of numbers that take turns, as two groups of channels that are shuffled.

A thread takes some rows at a time; a table says where each is read. A row's last vectors end with
it, and so may hold again what those before wrote. A vector of each run is put together with the
other's in registers: within 16 bytes, and then those in order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX512, Assembler, At, InstructionSet
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.x86 import Constants
from tessella.kernels.transform.rearrange_aten import read_at, row_width
from tessella.operations.problem import Problem
from tessella.operations.rearrangement import Moves, moves

BLOCK_BYTES = 2**15  # that one thread takes at a time
ALONE_BYTES = 2**14  # so few are not worth waking a thread
# bytes of an element → what puts the lower, and the upper, halves of 16 bytes together
UNPACK = {1: ("vpunpcklbw", "vpunpckhbw"), 2: ("vpunpcklwd", "vpunpckhwd"),
          4: ("vpunpckldq", "vpunpckhdq")}  # fmt: skip
# of an item: the address of what says where its rows are read, where the first is written, how many
TABLE, TO, ROWS = (i * code.NUMBER for i in range(3))
ITEM = 3
ORDERS = 4  # the first of two vectors that say how numbers are put together (AVX-512)


def fits(problem: Problem) -> str | None:
    x, y = problem["input"], problem.output
    if problem.constant:
        return "takes no constants"
    if "strided" in (x.format, y.format):
        return "both sides dense"
    if y.itemsize not in UNPACK:
        return f"elements of 1, 2 and 4 bytes, not {y.dtype}"
    if y.nbytes > code.MAX_BYTES:
        return "distances have 32 bits"
    made, least = moves(problem), code.require_instructions().vector_bytes
    if _run(made) * y.itemsize < least:
        return f"rows, or two runs that take turns, of {least} bytes at least"
    return None


def _takes_turns(moves: Moves) -> bool:
    """Whether the result has numbers of two runs of the input in turn."""
    return (
        len(moves.parts) > 1
        and not {len(moves.parts) - 1, len(moves.parts) - 2} & moves.turning
        and moves.parts[-1].size == 2
        and moves.parts[-2].read == 1
    )


def _run(moves: Moves) -> int:
    """Elements that lie together in the input and are written together, or in turn with as many."""
    return moves.parts[-2].size if _takes_turns(moves) else row_width(moves)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    isa, y, made = code.require_instructions(), problem.output, moves(problem)
    size, own, turns = y.itemsize, _run(made) * y.itemsize, _takes_turns(made)
    apart = made.parts[-1].read * size if turns else 0  # bytes between the runs
    reads = size * read_at(made, 1 + turns)
    row = own * (1 + turns)
    code.require_inside("input", reads, torch.tensor(apart + own), problem["input"].extent)
    code.require_inside("result", torch.tensor(0), torch.tensor(row * len(reads)), y.extent)
    some = max(1, BLOCK_BYTES // row)
    items = [
        (reads.data_ptr() + first * code.NUMBER, first * row, min(some, len(reads) - first))
        for first in range(0, len(reads), some)
    ]

    def numbers(x: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
        return x.data_ptr(), out.data_ptr()

    written = _machine_code(isa, own, size, apart)
    few = y.nbytes <= ALONE_BYTES
    return code.Launch(written, code.Table(items, reads), numbers, few=few)


@functools.lru_cache(64)
def _machine_code(isa: InstructionSet, own: int, size: int, apart: int) -> code.MachineCode:
    constants = Constants(isa)
    return code.MachineCode(_written(isa, own, size, apart, constants).code(), constants)


def _written(
    isa: InstructionSet, own: int, size: int, apart: int, constants: Constants
) -> Assembler:
    """The code.

    rdi: the call; rbx: the item; rsi, r9: a row's place in the table and in the result; r10, r11:
    a vector's in the input and in the result; rcx: rows that are left; rdx: vectors.

    Args:
        own: bytes of a run; ``size``: of an element.
        apart: bytes between two runs that take turns; 0 if there is one run.
    """
    a, vector = Assembler(isa), isa.vector_bytes
    runs = 2 if apart else 1
    whole, rest = own // vector, own % vector

    def item(number: int) -> At:
        return At(base="rbx", distance=number)

    def move(distance: int) -> None:
        """A vector of each run, which begin so far behind r10."""
        a.load_vector(0, At(base="r10", distance=distance))
        if apart:
            a.load_vector(1, At(base="r10", distance=distance + apart))
            _store_in_turn(a, At(base="r11", distance=2 * distance), size)
        else:
            a.store_vector(At(base="r11", distance=distance), 0)

    with a.function():
        if apart and isa == AVX512:
            constants.begin(a)
            for half in (0, 1):
                a.load_vector(ORDERS + half, constants.held(half, _order(half)))
        with code.each_item(a, "rbx", ITEM):
            a.load("rsi", item(TABLE))
            a.load("r9", code.given(1))
            a.add_stored("r9", item(TO))
            a.load("rcx", item(ROWS))
            with a.counted("row", "rcx"):
                a.load("r10", code.given(0))
                a.add_stored("r10", At(base="rsi"))
                a.move("r11", "r9")
                a.set("rdx", whole)
                with a.counted("vector", "rdx"):
                    move(0)
                    a.add("r10", vector)
                    a.add("r11", runs * vector)
                if rest:
                    move(rest - vector)
                a.add("rsi", code.NUMBER)
                a.add("r9", runs * own)
    return a


def _store_in_turn(a: Assembler, to: At, size: int) -> None:
    """Store the elements of vectors 0 and 1 in turn."""
    lower, upper = 2, 3
    for made, name in zip((lower, upper), UNPACK[size], strict=True):
        a.vector(name, made, 0, 1)
    vector = a.instructions.vector_bytes
    for half in (0, 1):
        there = replace(to, distance=to.distance + half * vector)
        if a.instructions == AVX512:
            a.copy_vector(0, lower)
            a.vector("vpermt2ps", 0, ORDERS + half, upper)
            a.store_vector(there, 0)
            continue
        for made in (lower, upper):
            if half:
                a.upper_half(made, made)
            a.store_half(replace(there, distance=there.distance + (made - lower) * 16), made)


def _order(half: int) -> torch.Tensor:
    """Which numbers of two vectors are the lower, or upper, 16 bytes of each in turn, and so on;
    those of the second vector count from 16 on.
    """
    lanes = AVX512.lanes
    place = torch.arange(lanes)
    quarter, inside = place // 4, place % 4
    found = (quarter % 2) * lanes + (quarter // 2 + 2 * half) * 4 + inside
    return found.to(torch.int32).view(torch.float32)
