"""Bytes of images to a network's input on a CPU with AVX-512 or AVX2, in one pass: torch takes
three, and among the steps of a LeNet its code for 784 bytes is 10 µs, 36 where it is cold.

Pixels of the image and of the result lie alike, so both are rows of numbers, and gains and offsets
repeat with each pixel. Product and sum are rounded one by one, as the operation says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import numpy as np
import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import Assembler, At, InstructionSet
from tessella.device.x86.code import MAX_BYTES
from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem

MOST_VECTORS = 4  # of numbers, after which gains and offsets begin again
BLOCK_NUMBERS = 2**14  # that one thread takes at a time
ALONE_NUMBERS = 2**14  # so few are not worth waking a thread


def fits(problem: Problem) -> str | None:
    x, y = problem["input"], problem.output
    if problem.constant:
        return "takes no constants"
    if x.dtype != "uint8" or x.format != "contiguous":
        return f"takes dense uint8, not {x.format} {x.dtype}"
    if y.dtype != "float32" and (y.dtype != "bfloat16" or not code.has_bfloat16()):
        return "makes float32, or bfloat16 where the processor rounds to it"
    if not y.has("channels_last"):
        return "pixels of the result must lie as in the image"
    if not len(problem.attrs["gain"]) == len(problem.attrs["offset"]) == x.shape[3]:
        return "takes one gain and one offset for each channel"  # it loads whole vectors of them
    isa = code.require_instructions()
    if _vectors(x.shape[3], isa) > MOST_VECTORS:
        return f"{x.shape[3]} channels repeat after more than {MOST_VECTORS} vectors"
    least = _vectors(x.shape[3], isa) * isa.lanes
    if not least <= math.prod(x.shape) <= MAX_BYTES // 4:
        return f"{least} numbers at least, and distances have 32 bits"
    return None


def _vectors(channels: int, isa: InstructionSet) -> int:
    """After how many vectors the first number of one is of the first channel again."""
    return channels // math.gcd(channels, isa.lanes)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    x, isa = problem["input"], code.require_instructions()
    count, channels = math.prod(x.shape), x.shape[3]
    together = _vectors(channels, isa) * isa.lanes
    begins = np.arange(0, count // together * together, BLOCK_NUMBERS // together * together)
    times = np.minimum(BLOCK_NUMBERS // together, count // together - begins // together)
    items = np.stack((begins, times), 1)
    if count % together:  # the last pixels begin earlier: some are made twice
        items = np.concatenate((items, [(count - together, 1)]))
    begin, spans = torch.from_numpy(items[:, 0]), together * torch.from_numpy(items[:, 1])
    for name, meta in (("image", x), ("result", problem.output)):
        code.require_inside(name, meta.itemsize * begin, meta.itemsize * spans, meta.extent)
    scaling = torch.tensor([problem.attrs["gain"], problem.attrs["offset"]], dtype=torch.float32)
    scaling = scaling.repeat(1, together // channels).contiguous()
    table, address = code.Table(items, scaling), scaling.data_ptr()

    def numbers(x: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
        return x.data_ptr(), out.data_ptr(), address

    made = _machine_code(isa, together // isa.lanes, problem.output.itemsize)
    return code.Launch(made, table, numbers, few=count <= ALONE_NUMBERS)


@functools.cache
def _machine_code(isa: InstructionSet, vectors: int, size: int) -> code.MachineCode:
    """rbx: the item; r8, r9: the image and the result; rcx: how often all vectors are left."""
    a, each = Assembler(isa), range(vectors)
    gains, offsets = vectors, 2 * vectors  # the first vector of each
    with a.function():
        a.load("rax", code.given(2))
        for v in range(2 * vectors):
            a.load_vector(gains + v, At(base="rax", distance=v * isa.vector_bytes))
        with code.each_item(a, "rbx", 2):
            a.load("r8", At(base="rbx"))
            a.move("r9", "r8")
            a.multiply("r9", size)
            a.add_stored("r8", code.given(0))
            a.add_stored("r9", code.given(1))
            a.load("rcx", At(base="rbx", distance=code.NUMBER))
            with a.counted("numbers", "rcx"):
                for v in each:
                    a.load_uint8(v, At(base="r8", distance=v * isa.lanes))
                    a.convert("vcvtdq2ps", v, v)
                    a.vector("vmulps", v, v, gains + v)
                    a.vector("vaddps", v, v, offsets + v)
                    to = At(base="r9", distance=v * isa.lanes * size)
                    (a.store_vector if size == 4 else a.store_bfloat16)(to, v)
                a.add("r8", vectors * isa.lanes)
                a.add("r9", vectors * isa.lanes * size)
    return code.MachineCode(a.code())
