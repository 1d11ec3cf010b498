"""The classes whose probability reaches their threshold, the likeliest first."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tessella.core.task import TaskRecord
from tessella.tasks.classification.answers import drawn, marked, taught, things
from tessella.tasks.task import Outputs, Query

__all__ = [
    "HEADER", "SLOW", "VERB", "answer", "changes", "drawn", "lines", "marked", "said", "same",
    "taught", "things", "truth",
]  # fmt: skip

VERB = "classify"
SLOW = False
HEADER: tuple[str, ...] = ("label", "probability", "threshold")
HALF = 0.5  # where nothing was measured on a validation split


def thresholds(record: TaskRecord, classes: int) -> npt.NDArray[np.float64]:
    """The least probability of each class that counts."""
    known = record.numbers.get("threshold", ())
    return np.array(known) if len(known) == classes else np.full(classes, HALF)


def answer(
    outputs: Outputs, labels: tuple[str, ...], record: TaskRecord, query: Query
) -> list[Any]:
    """Of logits [B, K] the classes at or above their thresholds; with ``top`` the best in any case.

    The field ``present`` says whether the threshold is reached.
    """
    scores_BK = outputs.reshape(len(outputs), -1).astype(np.float64)
    count = scores_BK.shape[1]
    named = len(labels) == count
    least_K = thresholds(record, count)
    if query.threshold is not None:
        least_K = np.full(count, query.threshold)
    shares_BK = _shares(scores_BK)
    answers = []
    for row, order in enumerate(np.argsort(-scores_BK, axis=1, kind="stable").tolist()):
        shares = shares_BK[row]
        kept = order[: query.top] if query.top else [k for k in order if shares[k] >= least_K[k]]
        answers.append(
            [
                {
                    "index": k,
                    "label": labels[k] if named else None,
                    "score": float(scores_BK[row, k]),
                    "probability": float(shares[k]),
                    "threshold": float(least_K[k]),
                    "present": bool(shares[k] >= least_K[k]),
                }
                for k in kept
            ]
        )
    return answers


def lines(answer: Any) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (str(a["label"]), f"{100 * a['probability']:.2f} %", f"{100 * a['threshold']:.2f} %")
        for a in answer
    ]
    return rows or [("(none)", "", "")]


def _shares(scores: Outputs) -> npt.NDArray[np.float64]:
    """The probabilities of logits."""
    return np.asarray(1 / (1 + np.exp(-np.clip(scores.astype(np.float64), -700, 700))))


def _present(outputs: Outputs, record: TaskRecord) -> npt.NDArray[np.bool_]:
    return np.asarray(_shares(outputs) >= thresholds(record, outputs.shape[-1]))


def same(one: Outputs, other: Outputs, record: TaskRecord) -> npt.NDArray[np.bool_]:
    return np.asarray((_present(one, record) == _present(other, record)).all(axis=1))


def said(output: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    return truth(tuple(np.flatnonzero(_present(output, record)).tolist()), labels)


def changes(one: Outputs, other: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    """Classes with a sign: those that are there now, and those that are no longer."""
    old, new = (_present(output[None], record)[0] for output in (one, other))
    places = np.flatnonzero(old != new).tolist()
    return ", ".join(f"{'+' if new[k] else '−'}{labels[k]}" for k in places)


def truth(target: tuple[int, ...], labels: tuple[str, ...]) -> str:
    return " + ".join(labels[k] for k in target) or "(none)"
