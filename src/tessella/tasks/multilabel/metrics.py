"""Mean average precision, and F1 at thresholds that the split decides.

A class's threshold is the score, halfway to the next lower one, at which its F1 on the validation
split is highest. That F1 flatters, since the split has chosen the threshold: ``f1_at_half`` is the
mean F1 at probability one half, which nothing was fitted to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tessella.core.record import to_plain
from tessella.core.task import TaskRecord
from tessella.tasks.task import Rows, Targets

CHUNK = 4096  # images whose targets are unfolded at a time
COUNTED = False


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

    @property
    def values(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("map", "f1", "f1_at_half", "exact", "loss")}

    @property
    def numbers(self) -> dict[str, tuple[float, ...]]:
        return {"threshold": tuple(c.threshold for c in self.classes)}

    @property
    def resampled(self) -> None:
        return None

    def to_json(self) -> dict[str, Any]:
        return {k: to_plain(v) for k, v in vars(self).items() if k != "scores"}

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
    loss = 0.0
    for start in range(0, count, CHUNK):
        part = np.arange(start, min(start + CHUNK, count))
        hot = targets.batch(part)
        truth_NK[part] = hot > 0.5
        logits = rows_NR[part].astype(np.float64)
        loss += float((np.logaddexp(0.0, logits) - logits * hot).sum())
    reports = [_of_class(rows_NR[:, k], truth_NK[:, k], label) for k, label in enumerate(labels)]
    cuts = np.array([_logit(r.threshold) for r in reports])
    known = [r for r in reports if r.average_precision is not None]
    return Evaluation(
        count=count,
        map=_mean([r.average_precision or 0.0 for r in known]),
        f1=_mean([r.f1 for r in known]),
        f1_at_half=_mean([r.f1_at_half for r in known]),
        exact=float(((rows_NR >= cuts) == truth_NK).all(axis=1).mean()),
        loss=loss / rows_NR.size,
        classes=tuple(reports),
        scores=rows_NR,
    )


def losses(
    rows_NR: Rows, targets: Targets, record: TaskRecord, classes: int
) -> npt.NDArray[np.float64]:
    """The mean binary cross entropy of each image."""
    hot_NK = targets.batch(np.arange(len(rows_NR)))
    logits = rows_NR.astype(np.float64)
    each_N: npt.NDArray[np.float64] = (np.logaddexp(0.0, logits) - logits * hot_NK).mean(axis=1)
    return each_N


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _of_class(scores_N: Rows, truth_N: npt.NDArray[np.bool_], label: str) -> LabelReport:
    hits_M, shown_M, cuts_M = _curve(scores_N, truth_N)
    support = int(truth_N.sum())
    precision_M, recall_M = hits_M / shown_M, hits_M / max(support, 1)
    f1_M = 2 * hits_M / (shown_M + support)
    best = int(f1_M.argmax())
    positive_N = scores_N >= 0
    right = int((positive_N & truth_N).sum())
    steps_M = np.diff(recall_M, prepend=0.0)
    return LabelReport(
        label=label,
        average_precision=float((precision_M * steps_M).sum()) if support else None,
        threshold=_threshold(cuts_M, best) if support else 0.5,
        precision=float(precision_M[best]) if support else 0.0,
        recall=float(recall_M[best]),
        f1=float(f1_M[best]),
        f1_at_half=float(2 * right / max(int(positive_N.sum()) + support, 1)),
        support=support,
    )


def _curve(
    scores_N: Rows, truth_N: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Right ones, and all that are shown, when every score from one of M distinct ones on counts.

    Highest score first, as scikit-learn's ``precision_recall_curve`` has them from its end.
    """
    order = np.argsort(-scores_N, kind="stable")
    scores = scores_N[order].astype(np.float64)
    last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)
    return np.cumsum(truth_N[order])[last], last + 1, scores[last]


def _threshold(cuts_M: npt.NDArray[np.float64], best: int) -> float:
    """The probability halfway between the last logit that counts and the next one."""
    low = cuts_M[best + 1] if best + 1 < len(cuts_M) else cuts_M[best] - 1.0
    middle = (cuts_M[best] + low) / 2
    return float(np.clip(1 / (1 + np.exp(-np.clip(middle, -700, 700))), 1e-12, 1 - 1e-12))


def _logit(probability: float) -> float:
    return float(np.log(probability) - np.log1p(-probability))
