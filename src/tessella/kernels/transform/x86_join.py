"""``cat`` on a CPU with AVX-512 or AVX2: rows of bytes, each part's into its columns of the result,
but for parts that were written there.

A thread takes some rows of a part at a time; a row's last vector ends with it, and so may hold
again what the one before wrote.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import Assembler, At, InstructionSet
from tessella.kernels.catalog import Call
from tessella.kernels.shared.x86_tiles import pixel_bytes
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

BLOCK_BYTES = 2**15  # that one thread takes at a time
ALONE_BYTES = 2**14  # so few are not worth waking a thread
MOST_PARTS = 16
# of an item: where in the call its part's address lies, distances, rows, bytes from a row to the
# next, and where in a row its last vector begins
PART, FROM, TO, ROWS, FROM_PITCH, TO_PITCH, LAST = (i * code.NUMBER for i in range(7))
ITEM = 7


def fits(problem: Problem) -> str | None:
    parts, y = problem.given, problem.output
    if problem.constant:
        return "takes no constants"
    if len({m.dtype for m in (*parts, y)}) > 1:
        return "parts of one element type"
    if len(problem.in_place) == len(parts):
        return "all parts lie in the result already"
    if len(parts) > MOST_PARTS:
        return f"up to {MOST_PARTS} parts"
    if 0 in y.shape:
        return "nothing to make"
    rows = _rows_of(problem)
    if rows is None:
        return "rows of channels in channels_last, or dense ones"
    least = code.require_instructions().vector_bytes
    copied = [m for i, m in enumerate(parts) if i not in problem.in_place]
    if any(rows(m)[0] < least for m in copied):
        return f"rows of {least} bytes at least"
    return None


def _rows_of(problem: Problem) -> Callable[[TensorMeta], tuple[int, int]] | None:
    """What says of a tensor how many bytes of each row are its own, and how many lead to the next;
    None where the parts and the result have no such rows in common.
    """
    metas = (*problem.given, problem.output)
    dim = problem.attrs["dim"] % len(problem.output.shape)
    if dim == 1 and all(m.pixel_pitch is not None for m in metas):
        return lambda m: (m.shape[1] * m.itemsize, pixel_bytes(m))
    if all(m.format == "contiguous" for m in metas):
        return lambda m: (math.prod(m.shape[dim:]) * m.itemsize,) * 2
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    isa, y = code.require_instructions(), problem.output
    rows_of = _rows_of(problem)
    assert rows_of is not None, "asked for in spite of fits()"
    whole, pitch = rows_of(y)
    rows, start, items = math.prod(y.shape) * y.itemsize // whole, 0, []
    for position, meta in enumerate(problem.given):
        width, step = rows_of(meta)
        if position in problem.in_place:
            start += width
            continue
        some = max(1, BLOCK_BYTES // width)
        items += [
            (code.given(position).distance, row * step, row * pitch + start,
             min(some, rows - row), step, pitch, width - isa.vector_bytes)
            for row in range(0, rows, some)
        ]  # fmt: skip
        for name, of, first, to_next in (("part", meta, 0, step), ("result", y, start, pitch)):
            span = torch.tensor((rows - 1) * to_next + width)
            code.require_inside(name, torch.tensor(first), span, of.extent)
        start += width

    def numbers(*tensors: torch.Tensor) -> tuple[int, ...]:
        return tuple(t.data_ptr() for t in tensors)

    few = rows * whole <= ALONE_BYTES
    return code.Launch(_machine_code(isa, len(problem.given)), code.Table(items), numbers, few=few)


@functools.lru_cache(MOST_PARTS)
def _machine_code(isa: InstructionSet, parts: int) -> code.MachineCode:
    return code.MachineCode(_written(isa, parts).code())


def _written(isa: InstructionSet, parts: int) -> Assembler:
    """The code.

    rdi: the call; rbx: the item; rsi, r9: a part's row and the result's; rcx: rows that are left;
    rdx: how far in them; r10: where the last vector begins.
    """
    a, vector = Assembler(isa), isa.vector_bytes

    def item(number: int) -> At:
        return At(base="rbx", distance=number)

    with a.function(), code.each_item(a, "rbx", ITEM):
        a.load("rsi", item(PART))
        a.add("rsi", "rdi")
        a.load("rsi", At(base="rsi"))
        a.add_stored("rsi", item(FROM))
        a.load("r9", code.given(parts))
        a.add_stored("r9", item(TO))
        a.load("r10", item(LAST))
        a.load("rcx", item(ROWS))
        with a.counted("row", "rcx"):
            a.set("rdx", 0)
            a.label("vector")
            a.compare("rdx", "r10")
            a.jump_if("jge", "last")
            a.load_vector(0, At(base="rsi", index="rdx"))
            a.store_vector(At(base="r9", index="rdx"), 0)
            a.add("rdx", vector)
            a.jump("vector")
            a.label("last")
            a.move("rdx", "r10")
            a.load_vector(0, At(base="rsi", index="rdx"))
            a.store_vector(At(base="r9", index="rdx"), 0)
            a.add_stored("rsi", item(FROM_PITCH))
            a.add_stored("r9", item(TO_PITCH))
    return a
