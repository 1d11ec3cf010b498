"""``to`` of pictures, whose channels lie in planes, to bfloat16 whose channels lie together, on a
CPU with AVX-512 and BF16: torch goes pixel by pixel. Subnormal numbers become 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX512, Assembler, At
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.x86 import Constants
from tessella.kernels.shared import planes
from tessella.kernels.shared.planes import CHANNELS, ROW
from tessella.operations.problem import Problem

ALONE_NUMBERS = 2**14  # so few are not worth waking a thread
FIRST, SECOND = 30, 31  # vectors: which number of two vectors comes where


def fits(problem: Problem) -> str | None:
    if (problem["input"].dtype, problem.output.dtype) != ("float32", "bfloat16"):
        return "makes bfloat16 of float32"
    if problem.constant:
        return "takes no constants"
    return planes.refusal(problem, AVX512.lanes)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    x = problem["input"]
    table = code.Table(planes.items(problem, AVX512.lanes))

    def numbers(x: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
        return x.data_ptr(), out.data_ptr()

    few = math.prod(x.shape) <= ALONE_NUMBERS
    plane = x.itemsize * math.prod(x.shape[2:])
    return code.Launch(_machine_code(plane), table, numbers, few=few)


@functools.lru_cache(64)
def _machine_code(plane: int) -> code.MachineCode:
    """rbx: the item; r8, rdx, rsi: its pixels in each plane, so many bytes apart; r9: the results;
    rcx: how many vectors of pixels are left.
    """
    a, constants, lanes = Assembler(AVX512), Constants(AVX512), AVX512.lanes
    number = torch.arange(CHANNELS * lanes + lanes)  # of two vectors of 16 bits: planes 0, 1; 2, -
    order = (number // CHANNELS + number % CHANNELS * lanes).to(torch.int16).view(torch.float32)
    with a.function():
        constants.begin(a)
        a.load_vector(FIRST, constants.held("first", order[:lanes]))
        a.load_vector(SECOND, constants.held("second", order[lanes:]))
        with code.each_item(a, "rbx", ROW):
            a.load("r9", At(base="rbx", distance=code.NUMBER))
            a.add_stored("r9", code.given(1))
            for i, register in enumerate(("r8", "rdx", "rsi")):
                a.load(register, At(base="rbx"))
                a.add(register, i * plane)
                a.add_stored(register, code.given(0))
            a.load("rcx", At(base="rbx", distance=2 * code.NUMBER))
            with a.counted("pixels", "rcx"):
                for v, register in enumerate(("r8", "rdx", "rsi")):
                    a.load_vector(v, At(base=register))
                    a.add(register, AVX512.vector_bytes)
                a.vector("vcvtne2ps2bf16", 0, 1, 0)
                a.vector("vcvtne2ps2bf16", 2, 2, 2)
                a.copy_vector(3, 0)
                a.pick_words(0, FIRST, 2)
                a.pick_words(3, SECOND, 2)
                a.store_vector(At(base="r9"), 0)
                a.store_half(At(base="r9", distance=AVX512.vector_bytes), 3)
                a.add("r9", CHANNELS * lanes * 2)
    return code.MachineCode(a.code(), constants)
