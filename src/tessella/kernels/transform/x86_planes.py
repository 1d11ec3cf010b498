"""``to`` of pictures on a CPU with AVX-512: planes of float32 become pixels, float32 or bfloat16.

A thread takes some pixels: a vector of each plane, whose numbers are put among those of the others
in registers, and stored as they lie. Where pixels fill no last vector, it begins earlier. In
bfloat16, subnormal numbers become 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX512, Assembler, At
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.x86 import Constants
from tessella.kernels.shared import planes
from tessella.kernels.shared.planes import ROW
from tessella.operations.problem import Problem

CHANNELS = (2, 3, 4)
LANES = AVX512.lanes
ALONE_BYTES = 2**13  # so few are not worth waking a thread
PLANES = ("r8", "r9", "r10", "r11")  # where each is read
ORDERS = 8  # the first vector of those that say how numbers are put together


def fits(problem: Problem) -> str | None:
    x, y = problem["input"], problem.output
    if x.dtype != "float32" or y.dtype not in ("float32", "bfloat16"):
        return f"makes float32 or bfloat16 of float32, not {y.dtype} of {x.dtype}"
    if y.dtype == "bfloat16" and not code.has_bfloat16():
        return "this CPU has no bfloat16 instructions"
    if problem.constants:
        return "takes no constants"
    if x.strides or y.strides:
        return "makes dense pixels of dense planes"
    return planes.refusal(problem, LANES, CHANNELS)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    x, y = problem["input"], problem.output
    table, held = code.Table(planes.items(problem, LANES)), Constants(AVX512)
    written = _written(x.shape[1], math.prod(x.shape[2:]), y.itemsize, held)
    made = code.MachineCode(written.code(), held)

    def numbers(x: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
        return x.data_ptr(), out.data_ptr()

    return code.Launch(made, table, numbers, few=x.nbytes <= ALONE_BYTES)


def _written(channels: int, pixels: int, size: int, constants: Constants) -> Assembler:
    """The code.

    rdi: the call; rbx: the item; ``PLANES``, r14: what is read and written; rcx: vectors that are
    left. Vectors: the planes', what is made, then the orders: of a number among those that were
    made, or, from ``LANES`` on, of one of the next plane.
    """
    a, made = Assembler(AVX512), channels
    vector = AVX512.vector_bytes
    orders = {(of, plane): ORDERS + of * (channels - 1) + plane - 1
              for of in range(channels) for plane in range(1, channels)}  # fmt: skip
    with a.function():
        constants.begin(a)
        for (of, plane), at in orders.items():
            a.load_vector(at, constants.held((of, plane), _order(channels, of, plane)))
        with code.each_item(a, "rbx", ROW):
            a.load(PLANES[0], code.given(0))
            a.add_stored(PLANES[0], At(base="rbx"))
            for before, pointer in itertools.pairwise(PLANES[:channels]):
                a.move(pointer, before)
                a.add(pointer, 4 * pixels)
            a.load("r14", code.given(1))
            a.add_stored("r14", At(base="rbx", distance=code.NUMBER))
            a.load("rcx", At(base="rbx", distance=2 * code.NUMBER))
            with a.counted("pixels", "rcx"):
                for number, pointer in enumerate(PLANES[:channels]):
                    a.load_vector(number, At(base=pointer))
                    a.add(pointer, vector)
                for of in range(channels):
                    a.copy_vector(made, 0)
                    for plane in range(1, channels):
                        a.vector("vpermt2ps", made, orders[of, plane], plane)
                    to = At(base="r14", distance=of * LANES * size)
                    if size == 2:
                        a.store_bfloat16(to, made)
                    else:
                        a.store_vector(to, made)
                a.add("r14", channels * LANES * size)
    return a


def _order(channels: int, of: int, plane: int) -> torch.Tensor:
    """How the numbers of a plane are put among those before it, in one of a block's results."""
    place = torch.arange(LANES) + of * LANES
    pixel, channel = place // channels, place % channels
    known = pixel if plane == 1 else torch.arange(LANES)  # the first plane's, or in its place
    return torch.where(channel == plane, LANES + pixel, known).to(torch.int32).view(torch.float32)
