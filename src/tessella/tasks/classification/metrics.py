"""Accuracy, top-5, the confusion matrix, and precision, recall and F1 of each class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.core.record import to_plain
from tessella.core.task import TaskRecord
from tessella.tasks.classification.examples import Labels
from tessella.tasks.task import Rows, Targets

COUNTED = True


@dataclass(frozen=True, kw_only=True)
class ClassReport:
    """The measures of one class; 0 where one is undefined, as the precision without predictions."""

    label: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The measures on a split of N images and K classes.

    Attributes:
        count: N.
        accuracy, top5: share of images whose class is the first, or among the first five.
        loss: mean cross entropy, without class weights.
        confusion: K rows (true class) of K counts (predicted class).
        classes: precision, recall, F1 and support of each class.
        scores: float32 N×K, the network's outputs in the split's order.
        predictions: int64 N, the class with the highest score (the first of equal ones).
    """

    count: int
    accuracy: float
    top5: float
    loss: float
    confusion: tuple[tuple[int, ...], ...]
    classes: tuple[ClassReport, ...]
    scores: npt.NDArray[np.float32]
    predictions: npt.NDArray[np.int64]

    @property
    def values(self) -> dict[str, float]:
        return {"accuracy": self.accuracy, "loss": self.loss}

    @property
    def numbers(self) -> dict[str, tuple[float, ...]]:
        return {}

    @property
    def resampled(self) -> None:
        return None

    def to_json(self) -> dict[str, Any]:
        """All but the scores, ready for ``json.dumps``."""
        return {
            "count": self.count,
            "accuracy": self.accuracy,
            "top5": self.top5,
            "loss": self.loss,
            "confusion": to_plain(self.confusion),
            "labels": [c.label for c in self.classes],
            "per_class": to_plain(self.classes),
            "predictions": self.predictions.tolist(),
        }

    def table(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        rows = [(c.label, c.support, c.precision, c.recall, c.f1) for c in self.classes]
        return ("class", "images", "precision", "recall", "F1"), list(rows)


def width(classes: int) -> int:
    return classes


def rows(outputs: Tensor, targets: Tensor, classes: int) -> Tensor:
    return outputs


def measure(rows_NR: Rows, targets: Targets, labels: tuple[str, ...]) -> Evaluation:
    """The ``Evaluation`` of logits N×K."""
    assert isinstance(targets, Labels)
    return measured(rows_NR, targets.labels_N, labels)


def losses(
    rows_NR: Rows, targets: Targets, record: TaskRecord, classes: int
) -> npt.NDArray[np.float64]:
    """The cross entropy of each image."""
    assert isinstance(targets, Labels)
    logits, truth = torch.from_numpy(rows_NR).double(), torch.from_numpy(targets.labels_N.copy())
    each_N: npt.NDArray[np.float64] = F.cross_entropy(logits, truth, reduction="none").numpy()
    return each_N


def measured(
    scores_NK: Rows, truth_N: npt.NDArray[np.int64], labels: tuple[str, ...]
) -> Evaluation:
    """The ``Evaluation`` of logits N×K and labels N."""
    predicted_N = scores_NK.argmax(axis=1)
    # An image is among the first five when fewer than five classes are ahead of its own. Of equal
    # scores the first is ahead, as in argmax.
    own_N1 = np.take_along_axis(scores_NK, truth_N[:, None], axis=1)
    earlier_NK = np.arange(scores_NK.shape[1]) < truth_N[:, None]
    ahead_N = ((scores_NK > own_N1) | ((scores_NK == own_N1) & earlier_NK)).sum(axis=1)
    confusion_KK = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(confusion_KK, (truth_N, predicted_N), 1)
    return Evaluation(
        count=len(truth_N),
        accuracy=float((ahead_N < 1).mean()),
        top5=float((ahead_N < 5).mean()),
        loss=_mean_loss(scores_NK, truth_N),
        confusion=tuple(tuple(int(n) for n in row) for row in confusion_KK),
        classes=_class_reports(confusion_KK, labels),
        scores=scores_NK,
        predictions=predicted_N,
    )


def _mean_loss(scores_NK: Rows, truth_N: npt.NDArray[np.int64]) -> float:
    logits, truth = torch.from_numpy(scores_NK).double(), torch.from_numpy(truth_N.copy())
    return float(F.cross_entropy(logits, truth))


def _class_reports(
    confusion_KK: npt.NDArray[np.int64], labels: tuple[str, ...]
) -> tuple[ClassReport, ...]:
    hits_K = confusion_KK.diagonal()
    predicted_K, support_K = confusion_KK.sum(axis=0), confusion_KK.sum(axis=1)
    precision_K = hits_K / np.maximum(predicted_K, 1)
    recall_K = hits_K / np.maximum(support_K, 1)
    # F1 is the harmonic mean of the two: 2·hits / (predicted + support)
    f1_K = 2 * hits_K / np.maximum(predicted_K + support_K, 1)
    return tuple(
        ClassReport(
            label=label,
            precision=float(precision_K[k]),
            recall=float(recall_K[k]),
            f1=float(f1_K[k]),
            support=int(support_K[k]),
        )
        for k, label in enumerate(labels)
    )
