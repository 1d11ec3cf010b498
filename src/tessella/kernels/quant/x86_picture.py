"""``quantize`` of pictures, whose channels lie in planes, to int8 whose channels lie together, on a
CPU with AVX-512 or AVX2: torch rounds first and moves then (224×224 270 µs, here 40).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2, Assembler, At, InstructionSet
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.x86 import Constants, to_integers
from tessella.kernels.quant import x86
from tessella.kernels.shared import planes
from tessella.kernels.shared.planes import ROW
from tessella.operations.problem import Problem

CHANNELS = 3
LANE = 16  # bytes that vpshufb works on
SCALE, BYTE, PLACES, ORDER, STORED, LEAST = range(15, 9, -1)  # vectors


def fits(problem: Problem) -> str | None:
    x, scale, y = problem["input"], problem["scale"], problem.output
    if (x.dtype, scale.dtype, y.dtype) != ("float32", "float32", "int8"):
        return "makes int8 of float32"
    if problem.get("zero_point") is not None or math.prod(scale.shape) != 1:
        return "one scale, and no zero point"
    if problem.is_constant("input"):
        return "its input is a constant"
    if not problem.is_constant("scale"):
        return "scale must be constant"
    return planes.refusal(problem, code.require_instructions().lanes, (CHANNELS,))


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    problem.require_constants(constants)
    isa, x = code.require_instructions(), problem["input"]
    scale = constants[1].reshape(1).clone()
    table, divisor = code.Table(planes.items(problem, isa.lanes), scale), scale.data_ptr()

    def numbers(x: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
        return x.data_ptr(), out.data_ptr(), divisor

    few = math.prod(x.shape) <= x86.ALONE_NUMBERS
    plane = x.itemsize * math.prod(x.shape[2:])
    return code.Launch(_machine_code(isa, plane), table, numbers, few=few)


@functools.lru_cache(64)
def _machine_code(isa: InstructionSet, plane: int) -> code.MachineCode:
    """rbx: the item; r8, rdx, rsi: its pixels in each plane, so many bytes apart; r9: the results;
    rcx: how many vectors of pixels are left.
    """
    a, constants, made = Assembler(isa), Constants(isa), CHANNELS * isa.lanes
    lanes = range(isa.lanes)
    places = torch.tensor([p for p in range(LANE) if p % 4 < CHANNELS] + [255] * 4)
    places = places.to(torch.uint8).repeat(isa.vector_bytes // LANE).view(torch.float32)
    filled = [i for i in lanes if i % 4 < CHANNELS]
    order = torch.tensor(filled + [i for i in lanes if i not in filled], dtype=torch.int32)
    a.enter()
    a.load("rax", code.given(2))
    a.broadcast(SCALE, At(base="rax"))
    code.take_item(a, "rbx", ROW)
    constants.begin(a)
    a.load_vector(
        BYTE, constants.held("byte", torch.tensor(255, dtype=torch.int32).view(torch.float32))
    )
    a.load_vector(LEAST, constants.at(-128.0))
    a.load_vector(PLACES, constants.held("places", places))
    a.load_vector(ORDER, constants.held("order", order.view(torch.float32)))
    if isa == AVX2:
        a.load_vector(STORED, constants.first(made // 4))
    else:
        a.set("rdx", (1 << made) - 1)
        a.mask(1, "rdx")
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
            a.vector("vdivps", v, v, SCALE)
            a.vector("vmaxps", v, LEAST, v)  # a NaN stays one, and becomes 127 as elsewhere
            to_integers(a, constants, v)
            a.vector("vandps", v, v, BYTE)
            if v:
                a.shift_left(v, v, 8 * v)
                a.vector("vorps", 0, 0, v)
            a.add(register, isa.vector_bytes)
        a.vector("vpshufb", 0, 0, PLACES)
        a.vector("vpermd", 0, ORDER, 0)
        if isa == AVX2:
            a.store_some(At(base="r9"), 0, STORED)
        else:
            a.store_vector(At(base="r9"), 0, 1)
        a.add("r9", made)
    a.jump("next")
    a.label("done")
    a.leave()
    return code.MachineCode(a.code(), constants)
