"""``peak_boxes`` on a CPU by NumPy: the peaks first, and everything else of them alone.

Between a network's layers a call of torch takes 10 to 100 µs, as its code is cold, and a map needs
twenty: 500 µs of a detector of 1,500.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from tessella.kernels.catalog import Call
from tessella.kernels.shared.numpy_views import Seen
from tessella.operations.problem import Problem
from tessella.operations.reference.detect import CENTRE, KINDS, MOST_LOG, SIDES, places

Floats = npt.NDArray[np.float32]


def fits(problem: Problem) -> str | None:
    if {m.dtype for m in (problem["input"], problem.output)} != {"float32"} or problem.constant:
        return "float32 alone"
    if problem["input"].format == "strided" or problem.output.format != "contiguous":
        return "a whole map, and a whole result"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    rows, columns = problem["input"].shape[2:]
    down, along = problem.attrs["down"], problem.attrs["along"]
    peaks = _Peaks(rows, columns)
    at_P4 = places(rows, columns, torch.device("cpu"), down=down, along=along)
    at_4P = np.ascontiguousarray(at_P4.numpy().T)
    far_4 = np.array([[-along], [-down], [along], [down]], np.float32) * 2

    def answer(centres_HW: Floats, told_PC: Floats, into_M: Floats) -> None:
        found = peaks.surest(centres_HW, len(into_M))
        # peaks along the rows, as NumPy's loops want them; a result is what stands behind a centre
        told = told_PC.take(found, 0).T.copy()
        kinds, sides = told[KINDS:], told[SIDES:KINDS]
        np.negative(told[CENTRE], told[CENTRE])
        kinds -= kinds.max(0)
        np.minimum(sides, MOST_LOG, out=sides)
        np.exp(told, told)
        kinds /= (told[CENTRE] + 1) * kinds.sum(0)
        sides *= far_4
        sides += at_4P.take(found, 1)
        np.maximum(sides, 0, out=sides)
        np.minimum(sides, 1, out=sides)
        into_M[: len(found)] = told[SIDES:].T
        into_M[len(found) :] = 0.0

    def read(x: torch.Tensor) -> list[tuple[Floats, Floats]]:
        maps = x.numpy().transpose(0, 2, 3, 1)
        return [(m[:, :, CENTRE], m.reshape(-1, m.shape[2])) for m in maps]

    seen = Seen(read, lambda out: list(out.numpy()))

    def run(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        with np.errstate(over="ignore", invalid="ignore"):  # as torch has them: told by nobody
            for (centres_HW, told_PC), into_M in zip(*seen.views(x, out), strict=True):
                answer(centres_HW, told_PC, into_M)
        return out

    return run


class _Peaks:
    """The places of a map that none of the 8 around exceeds; not for two threads at once.

    The map lies in a frame, row behind row, so that each maximum is one loop over all of it.
    """

    def __init__(self, rows: int, columns: int) -> None:
        wide = columns + 2
        framed = np.full((rows + 2) * wide, -np.inf, np.float32)
        along = np.empty(len(framed) - 2, np.float32)
        self._inner = framed.reshape(-1, wide)[1:-1, 1:-1]
        self._around = around = np.empty(len(along) - 2 * wide, np.float32)
        # three beside each other, then three of these below each other
        self._maxima = (
            (framed[:-2], framed[1:-1], along),
            (along, framed[2:], along),
            (along[: -2 * wide], along[wide:-wide], around),
            (around, along[2 * wide :], around),
        )
        self._centres = framed[wide + 1 : len(framed) - wide - 1]
        self._lower = np.empty(len(around), np.bool_)
        # the number of each of these places; the frame beside a number that is none tells of it
        row, column = np.divmod(np.arange(len(around)) + wide + 1, wide)
        column = np.clip(column - 1, 0, columns - 1)
        self._places = np.clip(row - 1, 0, rows - 1) * columns + column

    def surest(self, centres_HW: Floats, most: int) -> npt.NDArray[np.intp]:
        """The numbers of the highest peaks, the highest first: ``most`` or fewer."""
        self._inner[...] = centres_HW
        for one, other, higher in self._maxima:
            np.maximum(one, other, out=higher)
        # "not lower" and not "as high": so a number that is none is a peak, and is told
        np.less(self._centres, self._around, self._lower)
        np.logical_not(self._lower, self._lower)
        found = self._lower.nonzero()[0]
        heights = self._centres.take(found)
        if len(found) > most:
            order = np.argpartition(heights, len(found) - most)[len(found) - most :]
            found, heights = found.take(order), heights.take(order)
        found = found.take(heights.argsort()[::-1])
        surest: npt.NDArray[np.intp] = self._places.take(found)
        return surest
