"""How many connections each of the processes has that take them from one socket.

Left to chance, one of six had 92 of 256 connections and another 15: the slowest of them is what
clients wait for.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

_MANY = 2**31 - 1  # of a process that takes none


class Counts:
    """The numbers of all processes, in memory that they share as they are forked from this one."""

    def __init__(self, processes: int) -> None:
        self._all = np.frombuffer(mmap.mmap(-1, 4 * processes), np.int32)

    def of(self, place: int) -> Counted:
        """The connections of a process, by its place among the others."""
        return Counted(self._all, place)


class Counted(set[Any]):
    """The connections of one process, whose number the others see."""

    def __init__(self, counts: np.ndarray, place: int) -> None:
        super().__init__()
        self._counts, self._place, self._takes = counts, place, True
        self._tell()

    def add(self, connection: Any) -> None:
        super().add(connection)
        self._tell()

    def discard(self, connection: Any) -> None:
        super().discard(connection)
        self._tell()

    def ahead(self, arriving: int) -> int:
        """How many more connections it has than the process that has fewest.

        Args:
            arriving: that it has taken, and that are not among its connections yet.
        """
        return len(self) + arriving - int(self._counts.min())

    def leave(self) -> None:
        """Take no more: nobody needs to wait for this process."""
        self._takes = False
        self._tell()

    def _tell(self) -> None:
        self._counts[self._place] = len(self) if self._takes else _MANY
