"""The numbers by name, in the user's units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tessella.core.task import TaskRecord
from tessella.tasks.classification.answers import drawn, marked, taught, things
from tessella.tasks.regression.examples import scale
from tessella.tasks.task import Outputs, Query

__all__ = [
    "HEADER", "SLOW", "VERB", "answer", "changes", "drawn", "lines", "marked", "said", "same",
    "taught", "things", "truth",
]  # fmt: skip

VERB = "predict"
SLOW = False
HEADER: tuple[str, ...] = ("name", "value")
CLOSE = 0.01  # standard deviations: two answers that are nearer say the same


def answer(
    outputs: Outputs, labels: tuple[str, ...], record: TaskRecord, query: Query
) -> list[Any]:
    values_BK = outputs.reshape(len(outputs), -1)
    named = len(labels) == values_BK.shape[1]
    return [
        [
            {"name": labels[k] if named else None, "value": float(value)}
            for k, value in enumerate(row)
        ]
        for row in values_BK.tolist()
    ]


def lines(answer: Any) -> list[tuple[str, ...]]:
    return [(str(a["name"]), f"{a['value']:.6g}") for a in answer]


def same(one: Outputs, other: Outputs, record: TaskRecord) -> npt.NDArray[np.bool_]:
    std = scale(record.numbers, "std", one.shape[1])
    apart = np.abs(one.astype(np.float64) - other.astype(np.float64))
    return np.asarray((apart <= CLOSE * std).all(axis=1))


def said(output: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    return truth(tuple(output.tolist()), labels)


def changes(one: Outputs, other: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    std = scale(record.numbers, "std", len(one))
    apart = np.abs(one.astype(np.float64) - other.astype(np.float64)) > CLOSE * std
    numbers = zip(labels, one.tolist(), other.tolist(), apart.tolist(), strict=True)
    return ", ".join(f"{name} {old:.4g} → {new:.4g}" for name, old, new, far in numbers if far)


def truth(target: Sequence[float | None], labels: tuple[str, ...]) -> str:
    """The numbers by name. A missing one is NaN, in a stranger's dataset perhaps nothing."""
    known = ("unknown" if v is None or math.isnan(v) else f"{v:.6g}" for v in target)
    return ", ".join(f"{name} {text}" for name, text in zip(labels, known, strict=True))
