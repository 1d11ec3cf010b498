"""Weights that are asked for while the ones before them are multiplied.

A network's weights are more than any cache holds, so that each run reads them from memory. The
processor asks for them as the first tile of a panel reads them, faster than they can come; with one
line asked for in each round of the loop before, they are in the second cache by then.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessella.device.x86.assembler import Assembler, At

LINE = 64  # bytes


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """Code that asks for the bytes behind those that are read now, which are as many.

    An address that no tensor has does no harm: the processor asks for nothing there.

    Attributes:
        pointer: a register that nothing else uses between ``begin`` and the last ``pace``.
        step, end: places of a number each: how far the pointer goes on, and where it stops.
    """

    pointer: str
    step: At
    end: At

    def begin(self, a: Assembler, nbytes: int) -> None:
        """Where the pointer is so many bytes are read now."""
        a.add(self.pointer, 2 * nbytes)
        a.store(self.end, self.pointer)
        a.subtract(self.pointer, nbytes)
        a.store_number(self.step, LINE)

    def line(self, a: Assembler) -> None:
        """Ask for the next line."""
        a.prefetch(At(base=self.pointer), cache=2)
        a.add_stored(self.pointer, self.step)

    def pace(self, a: Assembler, label: str, spare: str) -> None:
        """Stay where the pointer is if that is the end or behind it: at most a tile's lines.

        Args:
            label: of the code behind, used nowhere else.
            spare: a register that is overwritten.
        """
        a.load(spare, self.end)
        a.compare(self.pointer, spare)
        a.jump_if("jl", label)
        a.store_number(self.step, 0)
        a.label(label)
