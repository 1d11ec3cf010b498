"""Average precision as COCO counts it, of a split and of its images drawn anew.

What is told is matched with what is there once, at each overlap and for each size of things. How
often an image counts changes nothing of that: sums of the matches give the precision of a thousand
draws together. Imports no torch.

Letters of shapes: N images, S draws, K classes, D told things, G things that are there, A sizes,
T overlaps, H told things that hit one, R recalls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import sparse

from tessella.tasks.known import Floats

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

OVERLAPS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
SIZES = ("small", "medium", "large")  # below 32², below 96², and above, in pixels of the picture's
AREAS = np.array([[0, 1e10], [0, 32**2], [32**2, 96**2], [96**2, 1e10]])  # every size, then SIZES
EVERY_SIZE = 0
MOST = 100  # told things of a class in an image
HIT, IGNORED = 1, 2  # of what is told: it hits a thing, or one that does not count
EVEN = 1 - 1e-10  # the overlap of two that are the same may be rounded below one
NEARLY = 1e-9  # of a hundredth: less than two shares of whole numbers differ by


@dataclass(frozen=True, kw_only=True, eq=False)
class There:
    """Things that are there, ``areas`` in the unit of ``AREAS``; in a crowd nothing is wrong."""

    images: Ints
    labels: Ints
    areas: Floats
    crowds: Bools


@dataclass(frozen=True, kw_only=True, eq=False)
class Told:
    """Things that a network tells."""

    images: Ints
    labels: Ints
    areas: Floats
    scores: Floats


# The overlaps of told things with things, whose places in the split are given in pairs [M]: those
# of one image and class together, and of these all things with the first one told, and so on.
Overlaps = Callable[[Ints, Ints], Floats]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassMatches:
    """What is told of a class, the surest first, and what is there of it.

    Attributes:
        images, scores: of what is told.
        inside_AD: whether it has the size in question.
        matches_ATD: 0 where it hits nothing, else ``HIT`` or ``IGNORED``.
        there: images of the things; ``counts_AG``: those of the size in question, without crowds.
    """

    images: Ints
    scores: Floats
    inside_AD: Bools
    matches_ATD: npt.NDArray[np.int8]
    there: Ints
    counts_AG: Bools

    def precisions(self, drawn_NS: Floats) -> tuple[Floats, Floats]:
        """Average precision [A, T, S], and the recall of things of every size [T, S]; NaN where
        there is nothing to find.

        Args:
            drawn_NS: how often each image counts.
        """
        every, every_NS = self._copied(drawn_NS)
        return every._precisions(drawn_NS, every_NS)

    def _copied(self, drawn_NS: Floats) -> tuple[ClassMatches, Floats]:
        """With a copy of what an image tells in one score for each time that the image is drawn.

        The second copy begins behind the last of the first, so that hits and others alternate. A
        copy has an image of its own, which counts once where so many are drawn.
        """
        same = np.zeros(len(self.images) + 1, bool)
        same[1:-1] = (np.diff(self.images) == 0) & (np.diff(self.scores) == 0)
        begins = np.flatnonzero(~same[:-1])
        lengths = np.diff(np.append(begins, len(self.images)))
        tied = lengths > 1
        if len(begins):  # of what hits nothing the order does not matter
            tied &= np.logical_or.reduceat(self.matches_ATD.any(axis=(0, 1)), begins)
        most = int(drawn_NS.max(initial=0))
        if most < 2 or not tied.any():
            return self, drawn_NS
        copies = np.where(tied, most, 1)
        counts = lengths * copies
        at = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        copy, place = np.divmod(at, np.repeat(lengths, counts))
        rows = np.repeat(begins, counts) + place
        images, of_copies = self.images[rows], np.repeat(tied, counts)
        owners, owner = np.unique(images[of_copies], return_inverse=True)
        images[of_copies] = len(drawn_NS) + owner * most + copy[of_copies]
        times_NS = drawn_NS[owners][:, None] > np.arange(most)[:, None]
        made = replace(
            self,
            images=images,
            scores=self.scores[rows],
            inside_AD=self.inside_AD[:, rows],
            matches_ATD=self.matches_ATD[:, :, rows],
        )
        times = times_NS.reshape(-1, drawn_NS.shape[1]).astype(np.float64)
        return made, np.concatenate([drawn_NS, times])

    def _precisions(self, things_NS: Floats, drawn_NS: Floats) -> tuple[Floats, Floats]:
        """``precisions`` where things are drawn by the first counts and what is told by others."""
        draws = drawn_NS.shape[1]
        average = np.full((len(AREAS), len(OVERLAPS), draws), np.nan)
        recall = np.full((len(OVERLAPS), draws), np.nan)
        rows = np.flatnonzero(self.matches_ATD.any(axis=(0, 1)))
        weights_HS = drawn_NS[self.images[rows]]
        for a, (inside_D, counts_G) in enumerate(zip(self.inside_AD, self.counts_AG, strict=True)):
            things_S = things_NS[self.there[counts_G]].sum(axis=0)
            told_HS = self._told(rows, inside_D, drawn_NS)
            for t, matches_D in enumerate(self.matches_ATD[a]):
                matches_H = matches_D[rows]
                hits = np.flatnonzero(matches_H == HIT)
                # what is shown: all of this size that hits nothing, and of any size what hits
                shift_H = (matches_H == HIT) * 1.0 - (inside_D[rows] & (matches_H != 0))
                shown_HS = told_HS[hits]
                if len(shifted := np.flatnonzero(shift_H)):
                    sums = np.cumsum(shift_H[shifted, None] * weights_HS[shifted], axis=0)
                    sums = np.concatenate([np.zeros((1, draws)), sums])
                    shown_HS += sums[np.searchsorted(shifted, hits, side="right")]
                hits_HS = np.cumsum(weights_HS[hits], axis=0)
                average[a, t] = _average(hits_HS, shown_HS, things_S)
                if a == EVERY_SIZE:
                    found_S = hits_HS[-1] if len(hits_HS) else np.zeros(draws)
                    recall[t] = np.where(things_S > 0, found_S / np.maximum(things_S, 1), np.nan)
        return average, recall

    def _told(self, rows: Ints, inside_D: Bools, drawn_NS: Floats) -> Floats:
        """How much of a size is told down to each of the rows, [H, S]."""
        chosen = np.flatnonzero(inside_D)
        ends = np.searchsorted(chosen, rows, side="right")
        images = self.images[chosen[: ends[-1]]] if len(ends) else chosen[:0]
        shape = (len(rows), len(drawn_NS))
        between = sparse.csr_matrix((np.ones(len(images)), images, np.append(0, ends)), shape)
        return np.asarray(np.cumsum(between @ drawn_NS, axis=0))

    def curve(self, t: int) -> tuple[Floats, Floats]:
        """Precision and score at each of ``RECALLS``, of things of every size at an overlap; both
        0 where recall does not go so far."""
        matches_D = self.matches_ATD[EVERY_SIZE, t]
        shown = matches_D != IGNORED
        hits_D = np.cumsum((matches_D == HIT)[shown])
        recall_D = hits_D / max(1, int(self.counts_AG[EVERY_SIZE].sum()))
        precision_D = hits_D / np.arange(1, len(hits_D) + 1)
        best_D = np.maximum.accumulate(precision_D[::-1])[::-1]
        places = np.searchsorted(recall_D, RECALLS, side="left")
        return np.append(best_D, 0.0)[places], np.append(self.scores[shown], 0.0)[places]


def _average(hits_HS: Floats, shown_HS: Floats, things_S: Floats) -> Floats:
    """The mean over ``RECALLS`` of the best precision from there on, [S].

    A thing that is drawn several times is found several times in a row. Precision rises along
    these, so that the best of each is that of the last.
    """
    best_HS = np.maximum.accumulate((hits_HS / np.maximum(shown_HS, 1))[::-1], axis=0)[::-1]
    share_HS = hits_HS / np.maximum(things_S, 1)
    reached_HS = (share_HS * (len(RECALLS) - 1) + NEARLY).astype(np.int64)
    reached_HS -= RECALLS[reached_HS] > share_HS
    steps_HS = np.diff(reached_HS, axis=0, prepend=-1)
    mean_S = (best_HS * steps_HS).sum(axis=0) / len(RECALLS)
    return np.where(things_S > 0, mean_S, np.nan)


def matched(there: There, told: Told, classes: int, overlaps: Overlaps) -> list[ClassMatches]:
    """Everything told with what it hits, by class."""
    things = np.lexsort((there.images, there.labels))
    told_keys = told.labels * (1 + _last(told.images, there.images)) + told.images
    keys = there.labels[things] * (1 + _last(told.images, there.images)) + there.images[things]
    order = np.lexsort((-told.scores, told_keys))
    first = np.searchsorted(told_keys[order], told_keys[order], side="left")
    order = order[np.arange(len(order)) - first < MOST]
    low, high = (np.searchsorted(keys, told_keys[order], side=s) for s in ("left", "right"))
    matches = np.zeros((len(AREAS), len(OVERLAPS), len(order)), np.int8)
    _match(there, things, low, high, order, overlaps, matches)
    inside_AM = inside(told.areas)
    counts: Bools = inside(there.areas) & ~there.crowds
    found = []
    for k in range(classes):
        mine = np.flatnonzero(told.labels[order] == k)
        mine = mine[np.argsort(-told.scores[order[mine]], kind="stable")]
        own = np.flatnonzero(there.labels == k)
        rows = order[mine]
        found.append(
            ClassMatches(
                images=told.images[rows],
                scores=told.scores[rows],
                inside_AD=inside_AM[:, rows],
                matches_ATD=matches[:, :, mine],
                there=there.images[own],
                counts_AG=counts[:, own],
            )
        )
    return found


def _last(*images: Ints) -> int:
    return max((int(i.max()) for i in images if len(i)), default=0)


def inside(areas_M: Floats) -> Bools:
    """Whether areas lie in each of ``AREAS``, [A, M]."""
    found: Bools = (areas_M >= AREAS[:, :1]) & (areas_M <= AREAS[:, 1:])
    return found


def _match(
    there: There, things: Ints, low: Ints, high: Ints, order: Ints, overlaps: Overlaps,
    matches: npt.NDArray[np.int8],
) -> None:  # fmt: skip
    """Write what each told thing hits: it may hit ``things[low:high]``.

    The told things of an image and class that may hit equally many are matched together: first the
    surest of each, then the next.
    """
    counts = high - low
    ends = np.cumsum(counts)
    rows = np.repeat(np.arange(len(order)), counts)
    place = np.arange(len(rows)) - np.repeat(ends - counts, counts) + low[rows]
    values = overlaps(order[rows], things[place])
    near = np.zeros(len(order), bool)
    near[rows[values >= OVERLAPS[0]]] = True
    crowds = there.crowds[things]
    ignored: Bools = ~inside(there.areas[things]) | crowds
    for count in np.unique(counts[near]).tolist():
        mine = np.flatnonzero(near & (counts == count))
        values_DG = values[(ends[mine] - count)[:, None] + np.arange(count)]
        starts = low[mine]  # one for each image and class: these lie together
        turn = np.arange(len(mine)) - np.searchsorted(starts, starts, side="left")
        pairs, pair = np.unique(starts, return_inverse=True)
        where_PG = pairs[:, None] + np.arange(count)
        crowds_PG, ignored_PAG = crowds[where_PG], ignored[:, where_PG].transpose(1, 0, 2)
        free_PATG = np.ones((len(pairs), len(AREAS), len(OVERLAPS), count), bool)
        for step in range(int(turn.max()) + 1):
            now = np.flatnonzero(turn == step)
            mark_PAT, taken_PATG = _hit(
                values_DG[now], free_PATG[pair[now]], ignored_PAG[pair[now]]
            )
            matches[:, :, mine[now]] = mark_PAT.transpose(1, 2, 0)
            free_PATG[pair[now]] &= ~taken_PATG | crowds_PG[pair[now], None, None]


def _hit(
    values_PG: Floats, free_PATG: Bools, ignored_PAG: Bools
) -> tuple[npt.NDArray[np.int8], Bools]:
    """What one told thing of each image hits: a mark [P, A, T], and the thing that is taken.

    Of things that count, and are free, that with the largest overlap; only without any, of those
    that do not count. Of equal ones the last, as COCO takes it.
    """
    least_T = np.minimum(OVERLAPS, EVEN)
    fits_PATG = free_PATG & np.greater_equal(values_PG[:, None, None], least_T[:, None])
    counting_PATG = np.logical_and(fits_PATG, ~ignored_PAG[:, :, None])
    good_PAT = np.logical_or.reduce(counting_PATG, axis=3)
    chosen_PATG = np.where(good_PAT[..., None], counting_PATG, fits_PATG)
    backwards = np.where(chosen_PATG, values_PG[:, None, None], -1.0)[..., ::-1]
    best_PAT = backwards.shape[3] - 1 - backwards.argmax(axis=3)
    hit_PAT = np.logical_or.reduce(chosen_PATG, axis=3)
    taken_PATG = hit_PAT[..., None] & (np.arange(backwards.shape[3]) == best_PAT[..., None])
    return np.where(good_PAT, HIT, np.where(hit_PAT, IGNORED, 0)).astype(np.int8), taken_PATG
