"""1×1 convolutions to fewer channels than a vector has lanes, on a CPU with AVX-512 or AVX2: what a
network that knows few classes ends with, and what squeezes a mean of each channel to a few numbers.

One vector holds all sums of a pixel. MKL's way to ten of them is 10 µs among the steps of a LeNet
and 30 where its code is cold; this is 1. Among those of an EfficientNet torch's took 80.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import numpy as np
import torch

from tessella.device.packing import packed
from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX512, Assembler, At, InstructionSet
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.x86 import TEMPORARIES, Constants, activate
from tessella.kernels.shared import pointwise_convolution, x86_convolution
from tessella.kernels.shared.x86_tiles import pixel_bytes
from tessella.operations.problem import Problem

SUMS = 4  # at a time: one would wait for itself
BLOCK_NUMBERS = 2**15  # of rows, that one thread takes at a time
ALONE_NUMBERS = 2**14  # so few are not worth waking a thread
FIRST, KEPT = SUMS, 2 * SUMS + TEMPORARIES  # vectors of a row's numbers; AVX2's mask
MASK = 1


def fits(problem: Problem) -> str | None:
    isa = code.require_instructions()
    if why := x86_convolution.refusal(problem) or pointwise_convolution.window_refusal(problem):
        return why
    if problem.epilogue.residual is not None:
        return "adds no residual"
    if problem["weight"].shape[0] >= isa.lanes:
        return f"makes fewer than {isa.lanes} numbers a row"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    problem.require_constants(constants)
    isa, x, y = code.require_instructions(), problem["input"], problem.output
    images, channels, *spatial = x.shape
    made, rows = y.shape[1], images * math.prod(spatial)
    pitches = pixel_bytes(x), pixel_bytes(y)
    some = max(1, BLOCK_NUMBERS // channels)
    begins = np.arange(0, rows, some)
    items = np.stack((begins, np.minimum(some, rows - begins)), 1)
    for name, meta, pitch in (("rows", x, pitches[0]), ("result", y, pitches[1])):
        begin, count = map(torch.from_numpy, items.T)
        spans = (count - 1) * pitch + meta.shape[1] * meta.itemsize
        code.require_inside(name, begin * pitch, spans, meta.extent)
    weight = packed(constants[1], ("conv2d.few", isa), lambda w: _in_lanes(w[:, :, 0, 0].T, isa))
    bias = _in_lanes(constants.get(2, torch.zeros(made, dtype=torch.float32))[None], isa)
    table = code.Table(items, weight, bias)
    held = weight.data_ptr(), bias.data_ptr()

    def numbers(x: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
        return x.data_ptr(), out.data_ptr(), *held

    machine_code = _machine_code(
        isa, channels, made, x.itemsize, pitches, problem.epilogue.activation
    )
    return code.Launch(machine_code, table, numbers, few=rows * channels <= ALONE_NUMBERS)


def _in_lanes(rows: torch.Tensor, isa: InstructionSet) -> torch.Tensor:
    """Each row in float32, with zeros up to a vector's lanes."""
    made = torch.zeros(len(rows), isa.lanes, dtype=torch.float32)
    made[:, : rows.shape[1]] = rows.detach()
    return made


@functools.lru_cache(64)
def _machine_code(
    isa: InstructionSet,
    channels: int,
    made: int,
    size: int,
    pitches: tuple[int, int],
    activation: str | None,
) -> code.MachineCode:
    """rbx: the item; r8, r9: the row and its result; r10: the weights; rcx: rows that are left;
    rdx: how far the row is read, in bytes.
    """
    a, constants = Assembler(isa), Constants(isa)
    rounds, rest = divmod(channels, SUMS)
    with a.function():
        if isa == AVX512:
            a.set("rax", (1 << (made if size == 2 else 4 * made)) - 1)
            a.mask(MASK, "rax")
        with code.each_item(a, "rbx", 2):
            for number, register in enumerate(("r8", "r9")):
                a.load(register, At(base="rbx"))
                a.multiply(register, pitches[number])
                a.add_stored(register, code.given(number))
            a.load("rcx", At(base="rbx", distance=code.NUMBER))
            constants.begin(a)
            with a.counted("row", "rcx"):
                a.load("r10", code.given(3))
                a.load_vector(0, At(base="r10"))
                a.load("r10", code.given(2))
                for v in range(1, SUMS):
                    a.vector("vxorps", v, v, v)
                a.set("rdx", 0)
                if rounds:
                    with a.stepped("numbers", "rdx", SUMS * size, rounds * SUMS * size):
                        _products(a, SUMS, size)
                        a.add("r10", SUMS * isa.vector_bytes)
                _products(a, rest, size)
                for one, other in ((0, 1), (2, 3), (0, 2)):
                    a.vector("vaddps", one, one, other)
                activate(a, activation, constants, 0, FIRST)
                _store(a, constants, made, size)
                a.add("r8", pitches[0])
                a.add("r9", pitches[1])
    return code.MachineCode(a.code(), constants)


def _products(a: Assembler, count: int, size: int) -> None:
    """The next numbers of the row, each times its weights, to sums of their own."""
    spread = a.broadcast if size == 4 else a.broadcast_bfloat16
    for v in range(count):
        spread(FIRST + v, At(base="r8", index="rdx", distance=v * size))
        weights = At(base="r10", distance=v * a.instructions.vector_bytes)
        a.vector("vfmadd231ps", v, FIRST + v, weights)


def _store(a: Assembler, constants: Constants, made: int, size: int) -> None:
    to = At(base="r9")
    if size == 2:
        a.store_bfloat16(to, 0, MASK)
    elif a.instructions == AVX512:
        a.store_vector(to, 0, MASK)
    else:
        a.load_vector(KEPT, constants.first(made))
        a.store_some(to, 0, KEPT)
