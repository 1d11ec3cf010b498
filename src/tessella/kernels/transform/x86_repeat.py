"""``interpolate`` on a CPU with AVX-512 or AVX2 where each pixel becomes as many as the next: each
vector of a pixel is read once and written to all its places, perhaps in a slice of the channels of
a larger tensor.

A thread takes some lines at a time; a pixel's last vector ends with it, and so may hold again what
the one before wrote. Pixels of fewer bytes than a vector are read and written under a mask.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX512, Assembler, At, InstructionSet
from tessella.kernels.catalog import Call
from tessella.kernels.shared.x86_tiles import pixel_bytes
from tessella.operations.problem import Problem

BLOCK_BYTES = 2**15  # of the result, that one thread takes at a time
ALONE_BYTES = 2**14  # so few are not worth waking a thread
MOST_TIMES = 16  # as often as a pixel is written: torch rounds its place in float32
# of an item: distances in the input and in the result, and how many lines of the input
FROM, TO, LINES = (i * code.NUMBER for i in range(3))
ITEM = 3
PART = 1  # the mask of a pixel


def fits(problem: Problem) -> str | None:
    x, y, attrs = problem["input"], problem.output, problem.attrs
    if len(x.shape) != 4 or attrs["mode"] != "nearest" or attrs["size"] is None:
        return "pictures alone, the nearest pixel, to a size"
    if problem.constant or x.dtype != y.dtype or 0 in y.shape:
        return "one element type, no constants"
    if x.pixel_pitch is None or y.pixel_pitch is None:
        return "channels_last, or a slice of its channels"
    if any(m % n or m // n > MOST_TIMES for n, m in zip(x.shape[2:], y.shape[2:], strict=True)):
        return f"each pixel as often as the others, {MOST_TIMES} times at most"
    if max(math.prod(m.shape) // m.shape[1] * pixel_bytes(m) for m in (x, y)) > code.MAX_BYTES:
        return "distances have 32 bits"
    isa = code.require_instructions()
    if isa != AVX512 and x.shape[1] * x.itemsize < isa.vector_bytes:
        return f"pixels of {isa.vector_bytes} bytes at least"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    isa, x, y = code.require_instructions(), problem["input"], problem.output
    images, channels, height, width = x.shape
    down, along = (made // given for given, made in zip(x.shape[2:], y.shape[2:], strict=True))
    own, read, written = channels * x.itemsize, pixel_bytes(x), pixel_bytes(y)
    line = y.shape[3] * written
    lines, some = images * height, max(1, BLOCK_BYTES // (own * down * along * width))
    items = [
        (at * width * read, at * down * line, min(some, lines - at)) for at in range(0, lines, some)
    ]
    for name, meta, pitch in (("input", x, read), ("result", y, written)):
        pixels = images * meta.shape[2] * meta.shape[3]
        span = torch.tensor((pixels - 1) * pitch + own)
        code.require_inside(name, torch.tensor(0), span, meta.extent)

    def numbers(image: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
        return image.data_ptr(), out.data_ptr()

    places = tuple(i * line + j * written for i in range(down) for j in range(along))
    made = _machine_code(isa, own, read, width, along * written, places)
    return code.Launch(made, code.Table(items), numbers, few=y.nbytes <= ALONE_BYTES)


@functools.lru_cache(64)
def _machine_code(
    isa: InstructionSet, own: int, read: int, width: int, step: int, places: tuple[int, ...]
) -> code.MachineCode:
    return code.MachineCode(_written(isa, own, read, width, step, places).code())


def _written(
    isa: InstructionSet, own: int, read: int, width: int, step: int, places: tuple[int, ...]
) -> Assembler:
    """The code.

    rdi: the call; rbx: the item; rsi, r9: a pixel of the input, and the first that it becomes; r10,
    r11: a vector of these; rcx, rdx, r8: lines, pixels and vectors that are left.

    Args:
        own: bytes of a pixel; ``read``: from a pixel of the input to the next.
        width: pixels of a line of the input.
        step: bytes from what a pixel becomes to what the next one does, in a line of the result.
        places: where a pixel is written, from the first place on.
    """
    a, vector = Assembler(isa), isa.vector_bytes
    lines_written = len({place // (width * step) for place in places})

    def copy(distance: int, mask: int = 0) -> None:
        a.load_vector(0, At(base="r10", distance=distance), mask)
        for place in places:
            a.store_vector(At(base="r11", distance=place + distance), 0, mask)

    with a.function():
        if own < vector:
            a.set("rax", (1 << own) - 1)
            a.mask(PART, "rax")
        with code.each_item(a, "rbx", ITEM):
            for register, number, distance in (("rsi", 0, FROM), ("r9", 1, TO)):
                a.load(register, code.given(number))
                a.add_stored(register, At(base="rbx", distance=distance))
            a.load("rcx", At(base="rbx", distance=LINES))
            with a.counted("line", "rcx"):
                a.set("rdx", width)
                with a.counted("pixel", "rdx"):
                    a.move("r10", "rsi")
                    a.move("r11", "r9")
                    if own < vector:
                        copy(0, PART)
                    else:
                        a.set("r8", own // vector)
                        with a.counted("vector", "r8"):
                            copy(0)
                            a.add("r10", vector)
                            a.add("r11", vector)
                        if own % vector:
                            copy(own % vector - vector)
                    a.add("rsi", read)
                    a.add("r9", step)
                if lines_written > 1:
                    a.add("r9", (lines_written - 1) * width * step)
    return a
