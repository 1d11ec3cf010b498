"""A picture that is larger than what a network sees, in tiles that overlap."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tessella.core.errors import UsageError
from tessella.core.integers import ceil_div
from tessella.core.pictures import Pixels

MOST = 1 << 16  # tiles of a picture


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a picture is cut.

    Attributes:
        height, width: of a tile, in the picture's pixels.
        overlap: pixels that neighbours have in common, at least: as wide as the things to be found,
            so that each is whole in one tile.
    """

    height: int
    width: int
    overlap: int

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < min(self.height, self.width):
            raise UsageError(
                "tiles have a height and a width, and overlap by less than either",
                seen=f"{self.height} × {self.width}, overlap {self.overlap}",
                fix="for example 512 × 512 with an overlap of 64",
            )

    def places(self, height: int, width: int) -> list[tuple[int, int]]:
        """Top and left of each tile of a picture of this size, row by row.

        Tiles lie inside of the picture; of one that is smaller there is a single one.

        Raises:
            UsageError: there are more than ``MOST``.
        """
        rows = starts(height, self.height, self.height - self.overlap)
        columns = starts(width, self.width, self.width - self.overlap)
        if len(rows) * len(columns) > MOST:
            raise UsageError(
                f"these are more than {MOST:,} tiles",
                seen=f"{len(rows):,} · {len(columns):,} of {height} × {width} pixels",
                fix="take larger tiles, or less overlap",
            )
        return list(itertools.product(rows, columns))

    def parts(self, pixels: Pixels) -> Iterator[tuple[int, int, Pixels]]:
        """Top, left and pixels of each tile of HWC; below and right of a small picture is grey."""
        for top, left in self.places(*pixels.shape[:2]):
            part = pixels[top : top + self.height, left : left + self.width]
            yield top, left, self.filled(part, (np.iinfo(pixels.dtype).max + 1) // 2)

    def filled(self, part: Pixels, value: int) -> Pixels:
        """A part of a picture as a whole tile, with a value below it and to its right."""
        if part.shape[:2] == (self.height, self.width):
            return part
        made = np.full((self.height, self.width, *part.shape[2:]), value, part.dtype)
        made[: part.shape[0], : part.shape[1]] = part
        return made


def starts(length: int, side: int, step: int) -> list[int]:
    """Where parts of a side begin along a length: as few as are at most ``step`` apart, evenly."""
    spare = length - side
    count = ceil_div(spare, max(1, step)) if spare > 0 else 0
    return [round(spare * n / count) for n in range(count + 1)] if count else [0]
