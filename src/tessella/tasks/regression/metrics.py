"""Coefficient of determination, mean absolute error and root mean square error of each number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tessella.core.record import to_plain
from tessella.core.task import TaskRecord
from tessella.tasks.regression.examples import Values
from tessella.tasks.task import Rows, Targets

COUNTED = False


@dataclass(frozen=True, kw_only=True)
class NumberReport:
    """One number, in its own unit.

    Attributes:
        r2: 1 − squared error / variance: 1 is perfect, 0 what the split's mean would get.
        mae, rmse: mean absolute and root mean square error.
        support: images for which the number is known.
    """

    label: str
    r2: float
    mae: float
    rmse: float
    support: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The measures on a split of N images and K numbers.

    Attributes:
        r2: mean over the numbers.
        mae: mean over the numbers, each in its own unit.
        loss: mean over the numbers of squared error / variance: 1 − r2.
        values_NK: float32, the answers in the split's order.
    """

    count: int
    r2: float
    mae: float
    loss: float
    classes: tuple[NumberReport, ...]
    values_NK: npt.NDArray[np.float32]

    @property
    def values(self) -> dict[str, float]:
        return {"r2": self.r2, "mae": self.mae, "loss": self.loss}

    @property
    def numbers(self) -> dict[str, tuple[float, ...]]:
        return {}

    @property
    def resampled(self) -> None:
        return None

    def to_json(self) -> dict[str, Any]:
        return {k: to_plain(v) for k, v in vars(self).items() if k != "values_NK"}

    def table(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        rows = [(c.label, c.support, c.r2, c.mae, c.rmse) for c in self.classes]
        return ("number", "images", "R²", "mean error", "root mean square"), list(rows)


def width(classes: int) -> int:
    return classes


def rows(outputs: Tensor, targets: Tensor, classes: int) -> Tensor:
    return outputs


def measure(rows_NR: Rows, targets: Targets, labels: tuple[str, ...]) -> Evaluation:
    """The ``Evaluation`` of answers N×K in the user's units."""
    assert isinstance(targets, Values)
    reports = [
        _of_number(rows_NR[:, k].astype(np.float64), targets.values_NK[:, k], label)
        for k, label in enumerate(labels)
    ]
    known = [r for r in reports if r.support]
    r2 = float(np.mean([r.r2 for r in known])) if known else 0.0
    return Evaluation(
        count=len(rows_NR),
        r2=r2,
        mae=float(np.mean([r.mae for r in known])) if known else 0.0,
        loss=1 - r2,
        classes=tuple(reports),
        values_NK=rows_NR,
    )


def losses(
    rows_NR: Rows, targets: Targets, record: TaskRecord, classes: int
) -> npt.NDArray[np.float64]:
    """The mean over an image's known numbers of squared error / variance on the split."""
    assert isinstance(targets, Values)
    truth_NK = np.asarray(targets.values_NK, np.float64)
    known_NK = ~np.isnan(truth_NK)
    count_K = np.maximum(known_NK.sum(axis=0), 1)
    mean_K = np.where(known_NK, truth_NK, 0.0).sum(axis=0) / count_K
    variance_K = (np.where(known_NK, truth_NK - mean_K, 0.0) ** 2).sum(axis=0) / count_K
    squares_NK = np.where(known_NK, rows_NR - truth_NK, 0.0) ** 2
    scaled_NK = squares_NK / np.where(variance_K > 0, variance_K, 1.0)
    each_N: npt.NDArray[np.float64] = scaled_NK.sum(axis=1) / np.maximum(known_NK.sum(axis=1), 1)
    return each_N


def _of_number(
    answers_N: npt.NDArray[np.float64], truth_N: npt.NDArray[np.float64], label: str
) -> NumberReport:
    known_N = ~np.isnan(truth_N)
    answers, truth = answers_N[known_N], truth_N[known_N]
    if not len(truth):
        return NumberReport(label=label, r2=0.0, mae=0.0, rmse=0.0, support=0)
    errors = answers - truth
    squares = float((errors**2).sum())
    total = float(((truth - truth.mean()) ** 2).sum())
    # A number that never varies: right everywhere is 1, else 0, as scikit-learn has it.
    r2 = 1 - squares / total if total > 0 else float(squares == 0)
    return NumberReport(
        label=label,
        r2=r2,
        mae=float(np.abs(errors).mean()),
        rmse=float(np.sqrt(squares / len(truth))),
        support=len(truth),
    )
