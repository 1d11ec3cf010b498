"""A block of a volume: what a network sees of it, for values and labels alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Sides = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a volume, perhaps mirrored.

    Attributes:
        first: the slice, row and column where it begins; negative where the volume is smaller.
        sides: how many slices, rows and columns it has.
        mirrored: the axes, 0 to 2, along which it is turned round.
    """

    first: Sides
    sides: Sides
    mirrored: tuple[int, ...] = ()

    def of(self, volume: npt.NDArray[Any], *, outside: int) -> npt.NDArray[Any]:
        """The block of an array [D, H, W, …], with ``outside`` where the volume has ended."""
        begins = [max(0, begin) for begin in self.first]
        ends = [
            min(there, begin + side)
            for there, begin, side in zip(volume.shape, self.first, self.sides)
        ]
        part = volume[tuple(map(slice, begins, ends))]
        if part.shape[:3] != self.sides:
            whole = np.full((*self.sides, *volume.shape[3:]), outside, volume.dtype)
            inside = [slice(b - f, e - f) for b, e, f in zip(begins, ends, self.first, strict=True)]
            whole[tuple(inside)] = part
            part = whole
        return np.ascontiguousarray(np.flip(part, self.mirrored) if self.mirrored else part)
