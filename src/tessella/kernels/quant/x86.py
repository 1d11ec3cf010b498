"""``quantize`` from float32 to int8 by one scale, on a CPU with AVX2.

torch divides, rounds, clamps and converts in four passes (200,000 numbers 120 µs, here 40).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import numpy as np
import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2, Assembler, At
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.x86 import Constants, store_int8, to_integers
from tessella.operations.problem import Problem

TOGETHER = 16  # numbers: two vectors, 16 bytes of results
BLOCK_NUMBERS = 2**14  # that one thread takes at a time
ALONE_NUMBERS = 2**15  # so few are not worth waking a thread
MAX_BYTES = 2**31 - 1


def fits(problem: Problem) -> str | None:
    x, scale, y = problem["input"], problem["scale"], problem.output
    if (x.dtype, scale.dtype, y.dtype) != ("float32", "float32", "int8"):
        return "makes int8 of float32"
    if problem.get("zero_point") is not None or math.prod(scale.shape) != 1:
        return "one scale, and no zero point"
    if not problem.is_constant("scale"):
        return "scale must be constant"
    if "strided" in (x.format, y.format) or not x.has(y.format):
        return "both must be dense, in one format"
    if not TOGETHER <= math.prod(x.shape) <= MAX_BYTES // x.itemsize:
        return f"{TOGETHER} numbers at least, and distances have 32 bits"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    problem.require_constants(constants)
    count = math.prod(problem["input"].shape)
    begins = np.arange(0, count // TOGETHER * TOGETHER, BLOCK_NUMBERS)
    times = np.minimum(BLOCK_NUMBERS, count - begins) // TOGETHER
    items = np.stack((begins, times), 1)
    if count % TOGETHER:  # the last ones begin earlier: some are rounded twice
        items = np.concatenate((items, [(count - TOGETHER, 1)]))
    begin, spans = torch.from_numpy(items[:, 0]), TOGETHER * torch.from_numpy(items[:, 1])
    code.require_inside("image", 4 * begin, 4 * spans, problem["input"].extent)
    code.require_inside("result", begin, spans, problem.output.extent)
    scale = constants[1].reshape(1).clone()
    table, divisor = code.Table(items, scale), scale.data_ptr()

    def numbers(x: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
        return x.data_ptr(), out.data_ptr(), divisor

    return code.Launch(_machine_code(), table, numbers, few=count <= ALONE_NUMBERS)


@functools.cache
def _machine_code() -> code.MachineCode:
    """rbx: the item; r8, r9: the numbers and the results; rcx: how often sixteen are left."""
    a, constants, vectors = Assembler(AVX2), Constants(AVX2), (0, 1)
    scale, spare = 15, 14
    a.enter()
    a.load("rax", code.given(2))
    a.broadcast(scale, At(base="rax"))
    code.take_item(a, "rbx", 2)
    constants.begin(a)
    a.load("rcx", At(base="rbx"))
    a.load("r9", code.given(1))
    a.add("r9", "rcx")
    a.multiply("rcx", 4)
    a.load("r8", code.given(0))
    a.add("r8", "rcx")
    a.load("rcx", At(base="rbx", distance=code.NUMBER))
    a.label("numbers")
    for v in vectors:
        a.load_vector(v, At(base="r8", distance=v * AVX2.vector_bytes))
        a.vector("vdivps", v, v, scale)
        to_integers(a, constants, v)
    store_int8(a, At(base="r9"), vectors, spare)
    a.add("r8", 4 * TOGETHER)
    a.add("r9", TOGETHER)
    a.subtract("rcx", 1)
    a.jump_if("jne", "numbers")
    a.jump("next")
    a.label("done")
    a.leave()
    return code.MachineCode(a.code(), constants)
