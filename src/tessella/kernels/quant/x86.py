"""``quantize`` from float32 to int8 by one scale and zero point, and back, on a CPU with AVX-512 or
AVX2.

torch divides, rounds, clamps and converts in four passes (200,000 numbers 120 µs, here 40); back it
takes two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import numpy as np
import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2, Assembler, At, InstructionSet
from tessella.device.x86.code import MAX_BYTES
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.x86 import (
    Constants,
    load_order,
    pack_int8,
    store_int8,
    store_packed,
    to_integers,
)
from tessella.operations.problem import Problem

SCALE, SPARE = 15, 14  # vectors that hold the scale, and nothing or what packing needs
ZERO, MOST, LEAST = 13, 12, 11  # the zero point, and what is cut off before it is added
VECTORS = 2  # of numbers, whose results are stored together
BLOCK_NUMBERS = 2**14  # that one thread takes at a time
ALONE_NUMBERS = 2**15  # so few are not worth waking a thread


def fits(problem: Problem) -> str | None:
    x, scale, y = problem["input"], problem["scale"], problem.output
    types = ("float32", "int8") if problem.op == "quantize" else ("int8", "float32")
    if (x.dtype, y.dtype) != types or scale.dtype != "float32":
        return f"makes {types[1]} of {types[0]}"
    zero = problem.get("zero_point")
    if any(math.prod(meta.shape) != 1 for meta in (scale, zero or scale)):
        return "one scale, and one zero point or none"
    if problem.is_constant("input"):
        return "its input is a constant"
    if not problem.is_constant("scale") or (zero and not problem.is_constant("zero_point")):
        return "scale and zero point must be constants"
    if "strided" in (x.format, y.format) or not x.has(y.format):
        return "both must be dense, in one format"
    together = VECTORS * code.require_instructions().lanes
    if not together <= math.prod(x.shape) <= MAX_BYTES // 4:
        return f"{together} numbers at least, and distances have 32 bits"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    problem.require_constants(constants)
    isa = code.require_instructions()
    together = VECTORS * isa.lanes
    count = math.prod(problem["input"].shape)
    begins = np.arange(0, count // together * together, BLOCK_NUMBERS)
    times = np.minimum(BLOCK_NUMBERS, count - begins) // together
    items = np.stack((begins, times), 1)
    if count % together:  # the last ones begin earlier: some are rounded twice
        items = np.concatenate((items, [(count - together, 1)]))
    begin, spans = torch.from_numpy(items[:, 0]), together * torch.from_numpy(items[:, 1])
    for name, meta in (("image", problem["input"]), ("result", problem.output)):
        code.require_inside(name, meta.itemsize * begin, meta.itemsize * spans, meta.extent)
    scale, shifts = constants[1].reshape(1), 2 in constants
    zero = int(constants[2].reshape(())) if shifts else 0
    held = torch.cat((scale, torch.tensor([zero, 127 - zero, -128 - zero], dtype=torch.float32)))
    table, given = code.Table(items, held), held.data_ptr()

    def numbers(x: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
        return x.data_ptr(), out.data_ptr(), given

    machine_code = _machine_code(isa, problem.op, shifts)
    return code.Launch(machine_code, table, numbers, few=count <= ALONE_NUMBERS)


@functools.cache
def _machine_code(isa: InstructionSet, op: str, shifts: bool) -> code.MachineCode:
    """rbx: the item; r8, r9: the numbers and the results; rcx: how often two vectors are left."""
    a, constants = Assembler(isa), Constants(isa)
    sizes = {"r8": 4, "r9": 1} if op == "quantize" else {"r8": 1, "r9": 4}
    a.enter()
    a.load("rax", code.given(2))
    for i, vector in enumerate((SCALE, ZERO, MOST, LEAST) if shifts else (SCALE,)):
        a.broadcast(vector, At(base="rax", distance=4 * i))
    if shifts and op == "quantize":
        a.convert("vcvtps2dq", ZERO, ZERO)
    code.take_item(a, "rbx", 2)
    constants.begin(a)
    if isa != AVX2:
        load_order(a, constants, SPARE)
    for number, (register, size) in enumerate(sizes.items()):
        a.load(register, At(base="rbx"))
        a.multiply(register, size)
        a.add_stored(register, code.given(number))
    a.load("rcx", At(base="rbx", distance=code.NUMBER))
    with a.counted("numbers", "rcx"):
        if op == "quantize":
            _quantize(a, constants, shifts)
        else:
            _dequantize(a, shifts)
        for register, size in sizes.items():
            a.add(register, VECTORS * isa.lanes * size)
    a.jump("next")
    a.label("done")
    a.leave()
    return code.MachineCode(a.code(), constants)


def _quantize(a: Assembler, constants: Constants, shifts: bool) -> None:
    isa, vectors = a.instructions, range(VECTORS)
    for v in vectors:
        a.load_vector(v, At(base="r8", distance=v * isa.vector_bytes))
        a.vector("vdivps", v, v, SCALE)
        if shifts:
            a.vector("vmaxps", v, LEAST, v)  # a NaN stays one, and becomes 127 as elsewhere
            a.vector("vminps", v, v, MOST)
        to_integers(a, constants, v, bounded=shifts)
        if shifts:
            a.vector("vpaddd", v, v, ZERO)
    if isa == AVX2:
        store_int8(a, At(base="r9"), vectors, SPARE)
    else:
        store_packed(a, At(base="r9"), pack_int8(a, constants, vectors, SPARE), VECTORS)


def _dequantize(a: Assembler, shifts: bool) -> None:
    isa = a.instructions
    for v in range(VECTORS):
        a.load_int8(v, At(base="r8", distance=v * isa.lanes))
        a.convert("vcvtdq2ps", v, v)
        if shifts:
            a.vector("vsubps", v, v, ZERO)
        a.vector("vmulps", v, v, SCALE)
        a.store_vector(At(base="r9", distance=v * isa.vector_bytes), v)
