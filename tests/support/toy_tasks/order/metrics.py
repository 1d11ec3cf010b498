"""The share of all pairs of a split that are in the right order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tessella.core.task import TaskRecord
from tessella.tasks.task import Rows, Targets

COUNTED = False


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    count: int
    concordance: float

    @property
    def values(self) -> dict[str, float]:
        return {"concordance": self.concordance}

    @property
    def numbers(self) -> dict[str, tuple[float, ...]]:
        return {}

    @property
    def resampled(self) -> None:
        return None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def table(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        return ("concordance",), [(self.concordance,)]


def width(classes: int) -> int:
    return 1


def rows(outputs: Tensor, targets: Any, classes: int) -> Tensor:
    return outputs


def measure(rows_NR: Rows, targets: Targets, labels: tuple[str, ...]) -> Evaluation:
    place = targets.batch(np.arange(len(targets)))[:, 0]
    score = rows_NR[:, 0]
    wanted = np.sign(place[:, None] - place)
    right = (np.sign(score[:, None] - score) == wanted)[wanted != 0]
    return Evaluation(count=len(place), concordance=float(right.mean()))


def losses(rows_NR: Rows, targets: Targets, record: TaskRecord, classes: int) -> np.ndarray:
    return np.abs(rows_NR[:, 0].argsort().argsort() - targets.batch(np.arange(len(targets)))[:, 0])
