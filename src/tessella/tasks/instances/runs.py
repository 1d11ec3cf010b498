"""Masks of one size as runs of pixels, column by column, and how far they overlap.

Imports no torch: the studio measures overlaps without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessella.annotations import rle
from tessella.tasks.known import Floats

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """``count`` masks on one line of pixels, on which no two touch.

    Attributes:
        begins, ends: of runs, ascending; pixel p of mask m lies at m · ``stride`` + p.
        height: pixels of a column.
    """

    begins: Ints
    ends: Ints
    count: int
    height: int
    stride: int

    def firsts(self) -> Ints:
        """The first run of each mask, and the number of all runs."""
        return np.searchsorted(self.begins, np.arange(self.count + 1) * self.stride)

    def areas(self) -> Ints:
        """The pixels of each mask."""
        sums = np.concatenate([[0], np.cumsum(self.ends - self.begins)])
        return np.diff(sums[self.firsts()])

    def _columns(self) -> tuple[Ints, Ints]:
        """The first and the last column of each mask; of one without pixels no column."""
        firsts = self.firsts()
        some = firsts[1:] > firsts[:-1]
        left, right = np.zeros(self.count, np.int64), np.full(self.count, -1)
        left[some] = self.begins[firsts[:-1][some]] % self.stride // self.height
        right[some] = (self.ends[firsts[1:][some] - 1] - 1) % self.stride // self.height
        return left, right

    def reached(self, first_D: Ints, behind_D: Ints) -> Bools:
        """Which masks have pixels between columns, [D, count]: the first of these, and that behind
        the last.
        """
        left, right = self._columns()
        found: Bools = (first_D[:, None] <= right) & (left < behind_D[:, None])
        return found

    def shares(self, others: Runs, crowds_G: Bools, chosen_DG: Bools) -> Floats:
        """Of each mask and each of others that are of the same size: the pixels in both over those
        in one; where the other is a crowd, over its own; 0 where the pair is not chosen.
        """
        left, right = self._columns()
        one_P, other_P = np.nonzero(chosen_DG & others.reached(left, right + 1))
        common_P = self._common(others, one_P, other_P)
        mine_P, theirs_P = self.areas()[one_P], others.areas()[other_P]
        either_P = np.where(crowds_G[other_P], mine_P, mine_P + theirs_P - common_P)
        found = np.zeros(chosen_DG.shape)
        found[one_P, other_P] = common_P / either_P
        return found

    def _common(self, others: Runs, one_P: Ints, other_P: Ints) -> Ints:
        """The pixels in both masks of pairs."""
        firsts = self.firsts()
        lengths = np.diff(firsts)[one_P]
        ends = np.cumsum(lengths)
        run = np.arange(lengths.sum()) + np.repeat(firsts[one_P] - ends + lengths, lengths)
        shift = np.repeat((other_P - one_P) * self.stride, lengths)
        covered = others._before(self.ends[run] + shift) - others._before(self.begins[run] + shift)
        sums = np.concatenate([[0], np.cumsum(covered)])
        return np.asarray(sums[ends] - sums[ends - lengths])

    def _before(self, places: Ints) -> Ints:
        """How many pixels of all masks lie before places of the line."""
        if not len(self.begins):
            return np.zeros(len(places), np.int64)
        sums = np.concatenate([[0], np.cumsum(self.ends - self.begins)])
        run = np.searchsorted(self.begins, places, side="right") - 1
        inside = np.minimum(places, self.ends[run]) - self.begins[run]
        return np.where(run >= 0, sums[run] + inside, 0)


def of_counts(counts: Sequence[rle.Counts], size: tuple[int, int]) -> Runs:
    """Masks of a height and width, of their run lengths."""
    stride = size[0] * size[1] + 1
    begins, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for number, runs in enumerate(counts):
        edges = number * stride + np.cumsum(runs[: len(runs) // 2 * 2])
        begins.append(edges[0::2])
        ends.append(edges[1::2])
    first, last = rle.joined(np.concatenate(begins), np.concatenate(ends))
    return Runs(begins=first, ends=last, count=len(counts), height=size[0], stride=stride)
