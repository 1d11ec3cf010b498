"""Mean average precision, and F1 at thresholds that the split decides.

A class's threshold is the score, halfway to the next lower one, at which its F1 on the validation
split is highest. That F1 flatters, since the split has chosen the threshold: ``f1_at_half`` is the
mean F1 at probability one half, which nothing was fitted to.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from torch import Tensor

from tessella.core.record import to_plain
from tessella.core.task import TaskRecord
from tessella.tasks.known import Floats, mean_known
from tessella.tasks.task import Resampled, Rows, Targets

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
CHUNK = 4096  # images whose targets are unfolded at a time
COUNTED = False
KEPT = ("scores", "resampled")  # what a report's JSON leaves out


@dataclass(frozen=True, kw_only=True)
class LabelReport:
    """One class: average precision, and precision, recall and F1 at its threshold.

    Attributes:
        threshold: the least probability that counts.
        f1_at_half: F1 at probability one half.
        support: images with the class. Without any, the average precision is None.
    """

    label: str
    average_precision: float | None
    threshold: float
    precision: float
    recall: float
    f1: float
    f1_at_half: float
    support: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The measures on a split of N images and K classes.

    Attributes:
        map: mean of the average precisions of classes that occur.
        f1, f1_at_half: means over the classes that occur, at the thresholds and at one half.
        exact: share of images all of whose classes are right at the thresholds.
        loss: mean binary cross entropy.
        scores: float32 N×K, the network's outputs in the split's order.
    """

    count: int
    map: float
    f1: float
    f1_at_half: float
    exact: float
    loss: float
    classes: tuple[LabelReport, ...]
    scores: npt.NDArray[np.float32]
    resampled: Resampled = field(repr=False, compare=False)

    @property
    def values(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("map", "f1", "f1_at_half", "exact", "loss")}

    @property
    def numbers(self) -> dict[str, tuple[float, ...]]:
        return {"threshold": tuple(c.threshold for c in self.classes)}

    def to_json(self) -> dict[str, Any]:
        return {k: to_plain(v) for k, v in vars(self).items() if k not in KEPT}

    def table(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        header = ("class", "images", "AP", "threshold", "precision", "recall", "F1")
        return header, [
            (c.label, c.support, c.average_precision, c.threshold, c.precision, c.recall, c.f1)
            for c in self.classes
        ]


def width(classes: int) -> int:
    return classes


def rows(outputs: Tensor, targets: Tensor, classes: int) -> Tensor:
    return outputs


def measure(rows_NR: Rows, targets: Targets, labels: tuple[str, ...]) -> Evaluation:
    """The ``Evaluation`` of logits N×K."""
    count = len(rows_NR)
    truth_NK = np.zeros(rows_NR.shape, bool)
    losses_N = np.zeros(count)
    for start in range(0, count, CHUNK):
        part = np.arange(start, min(start + CHUNK, count))
        hot = targets.batch(part)
        truth_NK[part] = hot > 0.5
        logits = rows_NR[part].astype(np.float64)
        losses_N[part] = (np.logaddexp(0.0, logits) - logits * hot).mean(axis=1)
    ranked = [_ranked(rows_NR[:, k], truth_NK[:, k]) for k in range(len(labels))]
    again = functools.partial(_drawn, ranked, losses_N)
    once = np.ones((count, 1))
    values = {name: float(value[0]) for name, value in again(once).items()}
    return Evaluation(
        count=count,
        classes=tuple(_report(c.drawn(once), n) for c, n in zip(ranked, labels, strict=True)),
        scores=rows_NR,
        resampled=again,
        **values,
    )


def losses(
    rows_NR: Rows, targets: Targets, record: TaskRecord, classes: int
) -> npt.NDArray[np.float64]:
    """The mean binary cross entropy of each image."""
    hot_NK = targets.batch(np.arange(len(rows_NR)))
    logits = rows_NR.astype(np.float64)
    each_N: npt.NDArray[np.float64] = (np.logaddexp(0.0, logits) - logits * hot_NK).mean(axis=1)
    return each_N


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """One class in S draws; of a draw without the class ``average_precision`` alone is NaN."""

    average_precision: Floats
    threshold: Floats
    precision: Floats
    recall: Floats
    f1: Floats
    f1_at_half: Floats
    support: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ranked:
    """The images of a split by their score for a class, the highest first.

    Precision and recall are told at the M distinct scores that images of the class have: between
    these F1 falls, and recall stays.

    Attributes:
        scores: of the images, in the split's order.
        order: their places in the split.
        hits: the places in the split of the images of the class, in that order.
        last: the place in ``hits`` of the last one of each score, [M].
        ends: how many images have each score, or a higher one, [M].
    """

    scores: Floats
    truth: Bools
    order: Ints
    hits: Ints
    last: Ints
    ends: Ints

    def drawn(self, drawn_NS: Floats) -> _Drawn:
        """The measures of draws."""
        support_S = drawn_NS[self.hits].sum(axis=0)
        positive_N = self.scores >= 0
        right_S, shown_S = np.stack([positive_N & self.truth, positive_N]) @ drawn_NS
        at_half_S = 2 * right_S / np.maximum(shown_S + support_S, 1)
        if not len(self.hits):
            zero_S = np.zeros(drawn_NS.shape[1])
            return _Drawn(
                average_precision=zero_S + np.nan, threshold=zero_S + 0.5, precision=zero_S,
                recall=zero_S, f1=zero_S, f1_at_half=at_half_S, support=support_S,
            )  # fmt: skip
        hits_MS = np.cumsum(drawn_NS[self.hits], axis=0)[self.last]
        shown_MS = self._shown(drawn_NS)
        precision_MS = hits_MS / np.maximum(shown_MS, 1)
        recall_MS = hits_MS / np.maximum(support_S, 1)
        f1_MS = 2 * hits_MS / np.maximum(shown_MS + support_S, 1)
        best_S = f1_MS.argmax(axis=0)
        area_S = (precision_MS * np.diff(recall_MS, axis=0, prepend=0.0)).sum(axis=0)
        there_S = support_S > 0
        precision_S, recall_S, f1_S = (
            np.take_along_axis(v, best_S[None], axis=0)[0] for v in (precision_MS, recall_MS, f1_MS)
        )
        return _Drawn(
            average_precision=np.where(there_S, area_S, np.nan),
            threshold=np.where(there_S, self._threshold(self.ends[best_S]), 0.5),
            precision=precision_S,
            recall=recall_S,
            f1=f1_S,
            f1_at_half=at_half_S,
            support=support_S,
        )

    def _shown(self, drawn_NS: Floats) -> Floats:
        """How many images have each of the M scores, or a higher one, [M, S]."""
        chosen = self.order[: self.ends[-1]]
        shape = (len(self.ends), len(drawn_NS))
        between = sparse.csr_matrix((np.ones(len(chosen)), chosen, np.append(0, self.ends)), shape)
        return np.asarray(np.cumsum(between @ drawn_NS, axis=0))

    def _threshold(self, ends_S: Ints) -> Floats:
        """The probability halfway between the last score that counts and the next one.

        An image that a draw lacks may be next: the same images of the draw count.
        """
        cut_S = self.scores[self.order[ends_S - 1]]
        low_S = self.scores[np.append(self.order, self.order[-1])[ends_S]]
        middle_S = (cut_S + np.where(ends_S < len(self.order), low_S, cut_S - 1.0)) / 2
        made = 1 / (1 + np.exp(-np.clip(middle_S, -700, 700)))
        return np.asarray(np.clip(made, 1e-12, 1 - 1e-12))


def _ranked(scores_N: Rows, truth_N: Bools) -> _Ranked:
    order = np.argsort(-scores_N, kind="stable")
    scores = scores_N.astype(np.float64)
    places = np.flatnonzero(truth_N[order])
    sorted_N = scores[order]
    own = sorted_N[places]
    last = np.append(np.flatnonzero(np.diff(own)), len(own) - 1) if len(own) else places
    ends = np.searchsorted(-sorted_N, -own[last], side="right")
    return _Ranked(
        scores=scores, truth=truth_N, order=order, hits=order[places], last=last, ends=ends
    )


def _drawn(ranked: list[_Ranked], losses_N: Floats, drawn_NS: Floats) -> dict[str, Floats]:
    """The measures of draws: means over the classes that occur."""
    found = [c.drawn(drawn_NS) for c in ranked]
    right_NS = np.ones(drawn_NS.shape, bool)
    for c, made in zip(ranked, found, strict=True):
        right_NS &= (c.scores[:, None] >= _logit(made.threshold)) == c.truth[:, None]
    known_KS = np.stack([made.support > 0 for made in found])
    count_S = drawn_NS.sum(axis=0)

    def mean(name: str) -> Floats:
        values_KS = np.stack([getattr(made, name) for made in found])
        return np.nan_to_num(mean_known(np.where(known_KS, values_KS, np.nan)))

    return {
        "map": mean("average_precision"),
        "f1": mean("f1"),
        "f1_at_half": mean("f1_at_half"),
        "exact": np.einsum("ns,ns->s", right_NS, drawn_NS) / count_S,
        "loss": losses_N @ drawn_NS / count_S,
    }


def _report(made: _Drawn, label: str) -> LabelReport:
    """A class of the split itself, the only draw."""
    support = int(made.support[0])
    return LabelReport(
        label=label,
        average_precision=float(made.average_precision[0]) if support else None,
        threshold=float(made.threshold[0]),
        precision=float(made.precision[0]),
        recall=float(made.recall[0]),
        f1=float(made.f1[0]),
        f1_at_half=float(made.f1_at_half[0]),
        support=support,
    )


def _logit(probability_S: Floats) -> Floats:
    return np.asarray(np.log(probability_S) - np.log1p(-probability_S))
