"""``group_factors`` on a CPU with AVX-512 or AVX2: statistics of channels that lie last.

A thread takes some pixels at a time, and adds up each channel's numbers and their squares, as they
differ from the middle one of its first, its middle and its last pixel's, so that neither a large
mean nor an odd pixel there costs digits. What these sums say of all pixels is put together in
float64, in a fixed order: the result depends on no number of threads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2, AVX512, Assembler, At, InstructionSet
from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem

Numbers = npt.NDArray[np.float64]
BLOCK_NUMBERS = 2**14  # that one thread takes at a time, and that float32 adds up
WORD = 4
SUMS = 3  # of a vector: what is subtracted, the sums, those of squares
TOGETHER = {AVX512: 8, AVX2: 4}  # vectors that are added up at a time, at most
IMAGE, RESULT = map(code.given, range(2))
# of an item: where its pixels begin, where their sums go, how many there are, and how far from the
# first its middle pixel and its last lie
ITEM = OF_PIXELS, OF_SUMS, COUNT, TO_MIDDLE, TO_LAST = range(0, 5 * code.NUMBER, code.NUMBER)


def fits(problem: Problem) -> str | None:
    x, isa = problem["input"], code.require_instructions()
    if x.dtype != "float32":
        return "float32"
    if x.pixel_pitch is None:
        return "a pixel's channels must lie together"
    if x.shape[1] % isa.lanes:
        return f"channels by {isa.lanes}"
    if problem.is_constant("input"):
        return "its input is a constant"
    if not problem.operation.shapes(problem.inputs).keys() - {"input"} <= set(problem.constants):
        return "weight and bias must be constants"
    if 0 in x.shape:
        return "nothing to normalize"
    return None


def bind(problem: Problem, constants: Mapping[int, Tensor]) -> Call:
    x, isa = problem["input"], code.require_instructions()
    images, channels, *sides = x.shape
    pixels, pitch = math.prod(sides), (x.pixel_pitch or channels) * WORD
    some = max(1, BLOCK_NUMBERS // channels)
    begins = np.arange(0, pixels, some)
    counts = np.minimum(some, pixels - begins)
    of_pixels = (np.arange(images)[:, None] * pixels + begins).flatten() * pitch
    sums_bytes = SUMS * channels * WORD
    count = np.tile(counts, images)
    of_sums = np.arange(len(of_pixels)) * sums_bytes
    items = np.stack((of_pixels, of_sums, count, count // 2 * pitch, (count - 1) * pitch), 1)
    spans = (items[:, 2] - 1) * pitch + channels * WORD
    code.require_inside("pixels", torch.from_numpy(of_pixels), torch.from_numpy(spans), x.extent)
    table, made = code.Table(items), _machine_code(isa, channels, pitch)
    launch = code.Launch(made, table, lambda x, out: (x.data_ptr(), out.data_ptr()))
    sizes = counts.astype(np.float64)[:, None]
    groups, eps = problem.attrs["num_groups"], float(problem.attrs["eps"])
    weight, bias = (None if t is None else t.double().numpy() for t in map(constants.get, (1, 2)))
    shape = problem.outputs[0].shape

    def factors(x: Tensor) -> tuple[Tensor, Tensor]:
        sums = torch.empty(images, len(begins), SUMS, channels, dtype=torch.float32)
        launch(x, out=sums)
        # NumPy: of so few numbers torch's calls take three times as long
        mean, variance = _moments(sums.numpy().astype(np.float64), sizes, groups)
        factor = 1 / np.sqrt(variance + eps)
        factor = factor if weight is None else factor * weight
        shift = -mean * factor if bias is None else bias - mean * factor
        made = (torch.from_numpy(t.astype(np.float32)).reshape(shape) for t in (factor, shift))
        return next(made), next(made)

    return factors


def _moments(sums: Numbers, sizes: Numbers, groups: int) -> tuple[Numbers, Numbers]:
    """Mean and variance of each channel's group, [N, C] each.

    Args:
        sums: [N, parts of an image, SUMS, C].
        sizes: pixels of each part, [parts, 1].
    """
    middle, apart, squares = sums[:, :, 0], sums[:, :, 1], sums[:, :, 2]
    each = sums.shape[-1] // groups

    def of_groups(numbers: Numbers) -> Numbers:
        total: Numbers = numbers.sum(1) / (each * sizes.sum())
        if each > 1:
            total = total.reshape(-1, groups, each).sum(2).repeat(each, 1)
        return total

    means = middle + apart / sizes
    mean = of_groups(means * sizes)
    inside = squares - apart * apart / sizes
    return mean, of_groups(inside + (means - mean[:, None]) ** 2 * sizes)


@functools.lru_cache(64)
def _machine_code(isa: InstructionSet, channels: int, pitch: int) -> code.MachineCode:
    return code.MachineCode(_Sums(isa=isa, channels=channels, pitch=pitch).written().code())


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Machine code for pixels ``pitch`` bytes apart."""

    isa: InstructionSet
    channels: int
    pitch: int

    @property
    def vectors(self) -> int:
        """That are added up at a time, a divisor of a pixel's."""
        return math.gcd(self.channels // self.isa.lanes, TOGETHER[self.isa])

    def written(self) -> Assembler:
        """The code.

        rdi: the call; rbx: the item; r8, r10, r11: its first, middle and last pixel; r9: where its
        sums go; rsi: a pixel; rcx: pixels that are left; rdx: the channel, in bytes.
        """
        a = Assembler(self.isa)
        with a.function(), code.each_item(a, "rbx", len(ITEM)):
            for to, base, of in (("r8", IMAGE, OF_PIXELS), ("r9", RESULT, OF_SUMS)):
                a.load(to, base)
                a.add_stored(to, At(base="rbx", distance=of))
            for to, of in (("r10", TO_MIDDLE), ("r11", TO_LAST)):
                a.move(to, "r8")
                a.add_stored(to, At(base="rbx", distance=of))
            a.set("rdx", 0)
            step = self.vectors * self.isa.vector_bytes
            with a.stepped("channels", "rdx", step, self.channels * WORD):
                self._add_up(a)
        return a

    def _add_up(self, a: Assembler) -> None:
        """Some vectors of channels of all pixels; behind the sums are two vectors that are read."""
        count, vector = self.vectors, self.isa.vector_bytes
        middles, sums, squares = (range(i * count, (i + 1) * count) for i in range(SUMS))
        for v in range(count):
            one, other, third = (
                At(base=base, index="rdx", distance=v * vector) for base in ("r8", "r10", "r11")
            )
            middle, high = middles[v], sums[v]
            a.load_vector(middle, one)
            a.vector("vmaxps", high, middle, other)
            a.vector("vminps", high, high, third)
            a.vector("vminps", middle, middle, other)
            a.vector("vmaxps", middle, middle, high)
            for zero in (sums[v], squares[v]):
                a.vector("vxorps", zero, zero, zero)
        a.move("rsi", "r8")
        a.load("rcx", At(base="rbx", distance=COUNT))
        with a.counted("pixel", "rcx"):
            for v in range(count):
                read = SUMS * count + v % 2
                a.load_vector(read, At(base="rsi", index="rdx", distance=v * vector))
                a.vector("vsubps", read, read, middles[v])
                a.vector("vaddps", sums[v], sums[v], read)
                a.vector("vfmadd231ps", squares[v], read, read)
            a.add("rsi", self.pitch)
        for place, held in enumerate((middles, sums, squares)):
            for v in range(count):
                distance = place * self.channels * WORD + v * vector
                a.store_vector(At(base="r9", index="rdx", distance=distance), held[v])
