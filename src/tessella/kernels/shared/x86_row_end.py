"""Rows of numbers in machine code: whole vectors, and the end that fills none."""

from __future__ import annotations

from dataclasses import dataclass

from tessella.device.x86.assembler import AVX512, Assembler, At, InstructionSet
from tessella.kernels.epilogue.x86 import Constants

LANES, BYTES = 1, 2  # AVX-512's masks of the end: its numbers, and their bytes as float32


@dataclass(frozen=True)
class RowEnd:
    """How a row's last numbers are loaded and stored, and nothing behind them.

    Attributes:
        vector: AVX2's mask, which has to stay.
    """

    isa: InstructionSet
    vector: int

    def begin(self, a: Assembler, constants: Constants, count: int) -> None:
        """Make the masks of so many numbers. AVX-512 overwrites rax; AVX2 reads the constants."""
        if self.isa != AVX512:
            a.load_vector(self.vector, constants.first(count))
            return
        for mask, bits in ((LANES, count), (BYTES, 4 * count)):
            a.set("rax", (1 << bits) - 1)
            a.mask(mask, "rax")

    def load(self, a: Assembler, to: int, at: At, size: int, *, is_end: bool) -> None:
        """A vector of float32, or of bfloat16 where a number has 2 bytes; 0 behind the end."""
        if size == 2:
            a.load_bfloat16(to, at, LANES if is_end else 0)
        elif not is_end:
            a.load_vector(to, at)
        elif self.isa == AVX512:
            a.load_vector(to, at, BYTES)
        else:
            a.load_some(to, at, self.vector)

    def store(self, a: Assembler, at: At, source: int, size: int, *, is_end: bool) -> None:
        if size == 2:
            a.store_bfloat16(at, source, LANES if is_end else 0)
        elif not is_end:
            a.store_vector(at, source)
        elif self.isa == AVX512:
            a.store_vector(at, source, BYTES)
        else:
            a.store_some(at, source, self.vector)
