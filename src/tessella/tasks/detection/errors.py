"""What a detector gets wrong: what it told beside the things that are there, by kind of error.

The kinds are TIDE's (Bolya et al. 2020); what hits what is decided as COCO decides it. All of it is
computed from the rows of ``metrics.rows``, so that another threshold asks no network. Imports no
torch: the studio does without.

Letters of shapes: N images, D told boxes, T things, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from tessella.tasks.detection.answers import thresholds
from tessella.tasks.detection.examples import BoxSets
from tessella.tasks.detection.examples import overlap as overlap_of
from tessella.tasks.task import Rows, Targets

Kind = Literal["missed", "false", "class", "place", "both", "twice"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TITLES: dict[Kind, str] = {
    "missed": "missed", "false": "false", "class": "wrong class", "place": "wrong place",
    "both": "wrong class and place", "twice": "told twice",
}  # fmt: skip
FIELDS = 6  # of a told box in a row: x0 y0 x1 y1 in fractions of the input, score, label
NEAR = 0.1  # a told box that overlaps with a thing by no more has nothing to do with it
OVERLAP = 0.5  # from which a told box hits a thing, where nobody says more
MOST_POINTS = 200  # of a curve
RECALLS = np.linspace(0, 1, 101)  # at which COCO averages precision
HIT, IGNORED, MISSED, FALSE, CLASS, PLACE, BOTH, TWICE = -2, -1, *range(len(KINDS))

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Outlines = tuple[tuple[float, ...], ...]
# The overlaps [D, T] of an image's told rows [D, …], the surest first, with its things [T, 7]; of a
# crowd the share of what is told that lies in it.
Overlaps = Callable[[int, Rows, Floats], Floats]

__all__ = [
    "FIELDS", "KINDS", "OVERLAP", "TITLES", "ErrorReport", "Matched", "match", "thresholds",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ClassErrors:
    """A class at its threshold; None of a measure: there is nothing to count.

    Attributes:
        average_precision: at the report's overlap, over all thresholds, as COCO counts it.
        things, hits, told: how many are there, are found, and are told (in no crowd).
        errors: how many of each kind; of what is told the told class counts, else the thing's.
    """

    label: str
    threshold: float
    average_precision: float | None
    precision: float | None
    recall: float | None
    things: int
    hits: int
    told: int
    errors: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """How often a detector errs in each way, at an overlap and a threshold for each class."""

    overlap: float
    errors: dict[str, int]
    classes: tuple[ClassErrors, ...]

    def table(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        """Titles and rows for people: one row a class."""
        titles = ("class", "things", "AP", "precision", "recall", "threshold")
        rows: list[tuple[object, ...]] = [
            (
                c.label, c.things, c.average_precision, c.precision, c.recall, c.threshold,
                *c.errors.values(),
            )
            for c in self.classes
        ]  # fmt: skip
        return (*titles, *TITLES.values()), rows


@dataclass(frozen=True, kw_only=True)
class Error:
    """One error: a told box, a thing, or both (−1: there is none), and how bad it is.

    Attributes:
        loss: the score of a box that should not be told so; of a missed thing 1 less the score of
            the box that would have hit it.
    """

    kind: Kind
    image: int
    told: int
    thing: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Precision and recall where every score from a threshold on counts, the highest first."""

    thresholds: tuple[float, ...]
    precision: tuple[float, ...]
    recall: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Matched:
    """Every told box and every thing of a split, matched at an overlap.

    A threshold changes none of it: the surer box goes first, so those below decide nothing above.

    Attributes:
        boxes, there: x0 y0 x1 y1 of told boxes and of things, in pixels of the stored pictures.
        verdicts: of each told box: ``HIT``, ``IGNORED`` (in a crowd), or a place in ``KINDS``.
        hits: the thing that a told box hits, or is an error about; −1: none.
        numbers: where each told box stands in the row of its image.
    """

    overlap: float
    images: Ints = field(repr=False)
    boxes: Floats = field(repr=False)
    scores: Floats = field(repr=False)
    labels: Ints = field(repr=False)
    verdicts: Ints = field(repr=False)
    hits: Ints = field(repr=False)
    numbers: Ints = field(repr=False)
    there_images: Ints = field(repr=False)
    there: Floats = field(repr=False)
    there_labels: Ints = field(repr=False)
    crowds: Bools = field(repr=False)

    def told_outlines(self, told: int) -> Outlines:
        """The outlines of what is told, in pixels of the stored picture: a box has none."""
        return ()

    def thing_outlines(self, thing: int) -> Outlines:
        """The outlines of a thing, in the same pixels."""
        return ()

    def counted(self, least_K: Floats) -> Bools:
        """The told boxes that reach the threshold of their class, bool [D]."""
        return np.asarray(self.scores >= least_K[self.labels])

    def missed(self, least_K: Floats) -> Bools:
        """The things that no box hits, nor is an error about: in their class or place alone."""
        about = self.counted(least_K) & np.isin(self.verdicts, (HIT, CLASS, PLACE))
        missed = ~self.crowds
        missed[self.hits[about]] = False
        return missed

    def report(self, names: Sequence[str], least_K: Floats) -> ErrorReport:
        """How often each class is told, found and mistaken."""
        counted, missed = self.counted(least_K), self.missed(least_K)
        classes = []
        for k, name in enumerate(names):
            mine = counted & (self.labels == k)
            things = int((~self.crowds & (self.there_labels == k)).sum())
            hits = int((self.verdicts[mine] == HIT).sum())
            told = int((self.verdicts[mine] != IGNORED).sum())
            errors: dict[str, int] = {
                kind: int((self.verdicts[mine] == n).sum()) for n, kind in enumerate(KINDS)
            }
            errors["missed"] = int((missed & (self.there_labels == k)).sum())
            classes.append(
                ClassErrors(
                    label=name,
                    threshold=float(least_K[k]),
                    average_precision=self.average_precision(k),
                    precision=hits / told if told else None,
                    recall=hits / things if things else None,
                    things=things,
                    hits=hits,
                    told=told,
                    errors=errors,
                )
            )
        total: dict[str, int] = {n: sum(c.errors[n] for c in classes) for n in KINDS}
        return ErrorReport(overlap=self.overlap, errors=total, classes=tuple(classes))

    def losses(self, least_K: Floats, count: int) -> Floats:
        """1 − F1 of what is told of each of ``count`` images; 0 where nothing is told or there."""
        counted = self.counted(least_K)
        hits_N, told_N, things_N = (
            np.bincount(images, minlength=count)
            for images in (
                self.images[counted & (self.verdicts == HIT)],
                self.images[counted & (self.verdicts != IGNORED)],
                self.there_images[~self.crowds],
            )
        )
        both_N = told_N + things_N
        return np.where(both_N > 0, 1 - 2 * hits_N / np.maximum(both_N, 1), 0.0)

    def listed(
        self, least_K: Floats, *, kind: Kind | None = None, label: int | None = None, most: int
    ) -> list[Error]:
        """The worst errors, perhaps of one kind, or about one class, be it told or there."""
        told = np.flatnonzero(self.counted(least_K) & (self.verdicts >= 0))
        lost = np.flatnonzero(self.missed(least_K))
        best = np.zeros(len(self.there))  # score of the box that would hit a missed thing
        hit = self.verdicts == HIT
        np.maximum.at(best, self.hits[hit], self.scores[hit])
        kinds = np.concatenate([self.verdicts[told], np.full(len(lost), MISSED)])
        images = np.concatenate([self.images[told], self.there_images[lost]])
        things = np.concatenate([self.hits[told], lost])
        boxes = np.concatenate([told, np.full(len(lost), -1)])
        losses = np.concatenate([self.scores[told], 1 - best[lost]])
        chosen = np.ones(len(kinds), bool) if kind is None else kinds == KINDS.index(kind)
        if label is not None:
            about = np.append(self.there_labels, -1)[things] == label
            chosen &= about | (np.append(self.labels, -1)[boxes] == label)
        worst = np.flatnonzero(chosen)
        worst = worst[np.argsort(-losses[worst], kind="stable")][:most].tolist()
        return [
            Error(
                kind=KINDS[kinds[i]],
                image=int(images[i]),
                told=int(boxes[i]),
                thing=int(things[i]),
                loss=float(losses[i]),
            )
            for i in worst
        ]

    def average_precision(self, label: int) -> float | None:
        """The mean of precision at recalls 0.00, 0.01, … 1.00, as COCO has it; None: no things."""
        _, precision, recall = self._ranked(label)
        if not (~self.crowds & (self.there_labels == label)).any():
            return None
        rising = np.maximum.accumulate(precision[::-1])[::-1]
        places = np.searchsorted(recall, RECALLS, side="left")
        return float(np.append(rising, 0.0)[places].mean())

    def curve(self, label: int | None = None) -> Curve:
        """The curve of a class, or of all told boxes together."""
        scores, precision, recall = self._ranked(label)
        if not len(scores):
            return Curve(thresholds=(), precision=(), recall=())
        last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)  # of equal scores
        if len(last) > MOST_POINTS:
            last = last[np.unique(np.linspace(0, len(last) - 1, MOST_POINTS).round().astype(int))]
        return Curve(
            thresholds=tuple(scores[last].tolist()),
            precision=tuple(precision[last].tolist()),
            recall=tuple(recall[last].tolist()),
        )

    def _ranked(self, label: int | None) -> tuple[Floats, Floats, Floats]:
        """Scores, the highest first, with precision and recall down to each."""
        mine = self.verdicts != IGNORED
        things = ~self.crowds
        if label is not None:
            mine, things = mine & (self.labels == label), things & (self.there_labels == label)
        order = np.argsort(-self.scores[mine], kind="stable")
        hits = np.cumsum((self.verdicts[mine] == HIT)[order])
        told = np.arange(1, len(hits) + 1)
        return self.scores[mine][order], hits / told, hits / max(1, int(things.sum()))


def match(rows_NR: Rows, targets: Targets, overlap: float = OVERLAP) -> Matched:
    """The told boxes of rows N×(boxes · FIELDS) beside the things of their images.

    ``overlap`` is an intersection over union, above ``NEAR`` and at most 1.
    """
    assert isinstance(targets, BoxSets)

    def overlaps_of(image: int, told: Rows, things: Floats) -> Floats:
        return overlaps(told[:, :4].astype(np.float64), things[:, :4], things[:, 5] > 0)

    return matched(rows_NR.reshape(len(rows_NR), -1, FIELDS), targets, overlap, overlaps_of)


def matched(
    rows_NPF: Rows, targets: BoxSets, overlap: float, overlaps_of: Overlaps,
    least_K: Floats | None = None,
) -> Matched:  # fmt: skip
    """What rows of ``FIELDS`` and more numbers tell of each image beside the image's things.

    ``least_K``: scores below which nothing is matched; None: everything is.
    """
    pieces, there, first = [], [], 0
    for image, rows in enumerate(rows_NPF):
        least_P = 0.0 if least_K is None else least_K[rows[:, 5].astype(np.int64)]
        numbers = np.flatnonzero((rows[:, 4] > 0) & (rows[:, 4] >= least_P))
        numbers = numbers[np.argsort(-rows[numbers, 4], kind="stable")]
        told, things = rows[numbers, :FIELDS].astype(np.float64), targets.evaluated(image)
        shares = np.zeros((len(told), len(things)))
        if shares.size:
            shares = overlaps_of(image, rows[numbers], things)
        verdicts, hits = _judged(shares, told[:, 5], things, overlap)
        top, left, height, width = targets.views[image].tolist()
        for boxes in (told, things):
            boxes[:, :4] = boxes[:, :4] * [width, height, width, height] + [left, top, left, top]
        hits = np.where(hits >= 0, hits + first, -1)
        pieces.append((np.full(len(told), image), told, verdicts, hits, numbers))
        there.append((np.full(len(things), image), things))
        first += len(things)
    images, told, verdicts, hits, numbers = (np.concatenate(p) for p in zip(*pieces, strict=True))
    there_images, things = (np.concatenate(p) for p in zip(*there, strict=True))
    return Matched(
        overlap=overlap,
        images=images.astype(np.int64),
        boxes=told[:, :4],
        scores=told[:, 4],
        labels=told[:, 5].astype(np.int64),
        verdicts=verdicts.astype(np.int64),
        hits=hits.astype(np.int64),
        numbers=numbers,
        there_images=there_images.astype(np.int64),
        there=things[:, :4],
        there_labels=things[:, 4].astype(np.int64),
        crowds=things[:, 5].astype(bool),
    )


def _judged(overlaps: Floats, labels_D: Floats, things: Floats, least: float) -> tuple[Ints, Ints]:
    """The verdict on each box of an image, the surest first, and the thing that it is about."""
    verdicts, about = np.full(len(overlaps), FALSE), np.full(len(overlaps), -1)
    if not overlaps.size:
        return verdicts, about
    crowds = things[:, 5] > 0
    same = labels_D[:, None] == things[:, 4]
    least = min(least, 1 - 1e-10)
    free = same & ~crowds
    for d in np.flatnonzero((overlaps * same >= least).any(axis=1)):
        best = _last_best(np.where(free[d], overlaps[d], -1.0))
        if free[d, best] and overlaps[d, best] >= least:
            verdicts[d], about[d] = HIT, best
            free[:, best] = False
        elif (overlaps[d] >= least)[crowds & same[d]].any():
            verdicts[d] = IGNORED
    own, others = (np.where(s & ~crowds, overlaps, 0.0) for s in (same, ~same))
    own_best, other_best = own.max(axis=1), others.max(axis=1)
    # TIDE's order: the first that fits
    tests = (
        (PLACE, (own_best >= NEAR) & (own_best < least), own),
        (CLASS, other_best >= least, others),
        (TWICE, own_best >= least, own),
        (BOTH, other_best > NEAR, others),
    )
    undecided = verdicts == FALSE
    for verdict, fits, where in tests:
        chosen = undecided & fits
        verdicts[chosen], about[chosen] = verdict, where.argmax(axis=1)[chosen]
        undecided &= ~fits
    return verdicts, about


def _last_best(values: Floats) -> int:
    """The place of the largest value, of equal ones the last, as COCO takes it."""
    return len(values) - 1 - int(values[::-1].argmax())


def overlaps(one_N4: Floats, other_M4: Floats, crowds_M: Bools) -> Floats:
    """Intersection over union [N, M]; over the told box alone where a crowd is there."""
    shares = overlap_of(one_N4, other_M4)
    one, other = ((b[:, 2:] - b[:, :2]).prod(axis=1) for b in (one_N4, other_M4))
    common = shares * (one[:, None] + other) / (1 + shares)
    return np.where(crowds_M, common / np.maximum(one[:, None], 1e-12), shares)
