"""Pictures whose size is not like that of the others: banners, icons, posters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_ODD = 1000
SHAPE = 2.5  # times as long beside its width as the usual picture, or as short
SIDE = 4.0  # times as large as the usual picture, or as small: the square root of its pixels
FEWEST = 10  # pictures that say what is usual

Sides = tuple[int, int]


class OddSizes:
    """A collection of all pictures' sides (height, width), as far as their headers tell them."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._sides: list[Sides] = []

    def add(self, number: int, sides: Sides) -> None:
        """Add a picture; ``number`` identifies it in ``found``."""
        self._numbers.append(number)
        self._sides.append(sides)

    def found(self) -> list[tuple[int, Sides]]:
        """Number and sides of each picture that has an unusual shape or size, in order.

        The usual picture has the median of all; a turned one has the same shape.
        """
        if len(self._sides) < FEWEST:
            return []
        far = _far(_shapes(self._sides), SHAPE) | _far(_lengths(self._sides), SIDE)
        return [(self._numbers[i], self._sides[i]) for i in np.flatnonzero(far)]


def _shapes(sides: Sequence[Sides]) -> npt.NDArray[np.float64]:
    ordered = np.sort(np.array(sides, np.float64), axis=1)
    return np.asarray(ordered[:, 1] / ordered[:, 0])


def _lengths(sides: Sequence[Sides]) -> npt.NDArray[np.float64]:
    return np.asarray(np.array(sides, np.float64).prod(1) ** 0.5)


def _far(values: npt.NDArray[np.float64], times: float) -> npt.NDArray[np.bool_]:
    ratio = values / np.median(values)
    return np.asarray((ratio > times) | (ratio < 1 / times))
