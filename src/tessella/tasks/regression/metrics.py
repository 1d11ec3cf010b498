"""Coefficient of determination, mean absolute error and root mean square error of each number."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tessella.core.record import to_plain
from tessella.core.task import TaskRecord
from tessella.tasks.known import Floats, mean_known
from tessella.tasks.regression.examples import Values
from tessella.tasks.task import Resampled, Rows, Targets

COUNTED = False
KEPT = ("values_NK", "resampled")  # what a report's JSON leaves out
CANCELLED = 0.1  # of a sum of squares: what is left of it has lost more than a digit


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
    resampled: Resampled = field(repr=False, compare=False)

    @property
    def values(self) -> dict[str, float]:
        return {"r2": self.r2, "mae": self.mae, "loss": self.loss}

    @property
    def numbers(self) -> dict[str, tuple[float, ...]]:
        return {}

    def to_json(self) -> dict[str, Any]:
        return {k: to_plain(v) for k, v in vars(self).items() if k not in KEPT}

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
    each = _each(rows_NR, targets.values_NK, np.ones((len(rows_NR), 1)))
    reports = []
    for label, made in zip(labels, each[..., 0].tolist(), strict=True):
        r2, mae, rmse, support = made
        reports.append(NumberReport(label=label, r2=r2, mae=mae, rmse=rmse, support=int(support)))
    return Evaluation(
        count=len(rows_NR),
        classes=tuple(reports),
        values_NK=rows_NR,
        resampled=functools.partial(_drawn, rows_NR, targets.values_NK),
        **{name: float(value[0]) for name, value in _means(each).items()},
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


def _drawn(rows_NR: Rows, truth_NK: Floats, drawn_NS: Floats) -> dict[str, Floats]:
    """The measures of draws."""
    return _means(_each(rows_NR, truth_NK, drawn_NS))


def _means(each: Floats) -> dict[str, Floats]:
    """The means of [K, 4, S] over the numbers that are known somewhere."""
    r2_KS, mae_KS, _, support_KS = each.swapaxes(0, 1)
    none_KS = np.where(support_KS > 0, 0.0, np.nan)
    r2_S, mae_S = (np.nan_to_num(mean_known(v + none_KS)) for v in (r2_KS, mae_KS))
    return {"r2": r2_S, "mae": mae_S, "loss": 1 - r2_S}


def _each(rows_NR: Rows, truth_NK: Floats, drawn_NS: Floats) -> Floats:
    """R², mean absolute and root mean square error and support of each number, [K, 4, S]."""
    columns = zip(rows_NR.T.astype(np.float64), truth_NK.T, strict=True)
    return np.stack([_of_number(answers, truth, drawn_NS) for answers, truth in columns])


def _of_number(answers_N: Floats, truth_N: Floats, drawn_NS: Floats) -> Floats:
    known_N = ~np.isnan(truth_N)
    if not known_N.any():
        return np.zeros((4, drawn_NS.shape[1]))
    errors_N = np.where(known_N, answers_N - truth_N, 0.0)
    # from the median no mean is farther than a standard deviation, so that little is cancelled
    apart_N = np.where(known_N, truth_N - np.median(truth_N[known_N]), 0.0)
    sums = np.stack([known_N, np.abs(errors_N), errors_N**2, apart_N, apart_N**2]) @ drawn_NS
    support_S, absolute_S, squares_S, sum_S, total_S = sums
    count_S = np.maximum(support_S, 1)
    mean_S = sum_S / count_S
    left_S = total_S - sum_S * mean_S
    lost = left_S < CANCELLED * total_S
    if lost.any():  # a draw may lie far from the median
        again_NL = np.where(known_N[:, None], apart_N[:, None] - mean_S[lost], 0.0)
        left_S[lost] = (again_NL**2 * drawn_NS[:, lost]).sum(axis=0)
    # A number that never varies: right everywhere is 1, else 0, as scikit-learn has it.
    varies_S = left_S > 0
    r2_S = np.where(varies_S, 1 - squares_S / np.where(varies_S, left_S, 1.0), squares_S == 0)
    r2_S = np.where(support_S > 0, r2_S, 0.0)
    return np.stack([r2_S, absolute_S / count_S, np.sqrt(squares_S / count_S), support_S])
