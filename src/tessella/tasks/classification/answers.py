"""The best classes of a picture, with their probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tessella.core.pictures import Pixels
from tessella.core.task import TaskRecord
from tessella.tasks.task import Outputs, Query
from tessella.tasks.thing import Thing

VERB = "classify"
SLOW = False
HEADER: tuple[str, ...] = ("label", "probability")
TOP = 5


def answer(
    outputs: Outputs, labels: tuple[str, ...], record: TaskRecord, query: Query
) -> list[Any]:
    """The best classes of logits [B, …]: raw scores, and their softmax."""
    scores_BK = outputs.reshape(len(outputs), -1).astype(np.float64)
    named = len(labels) == scores_BK.shape[1]
    powers_BK = np.exp(scores_BK - scores_BK.max(axis=1, keepdims=True))
    probabilities_BK = powers_BK / powers_BK.sum(axis=1, keepdims=True)
    top = query.top or TOP
    return [
        [
            {
                "index": k,
                "label": labels[k] if named else None,
                "score": float(scores_BK[row, k]),
                "probability": float(probabilities_BK[row, k]),
            }
            for k in _best(scores_K, top)
        ]
        for row, scores_K in enumerate(scores_BK)
    ]


def _best(scores_K: npt.NDArray[np.float64], top: int) -> list[int]:
    """The places of the highest scores, best first; equal ones in their order, NaN last."""
    places = np.arange(len(scores_K))
    if top < len(scores_K):  # to sort all of 1,000 takes nine times as long
        least = np.partition(-scores_K, top - 1)[top - 1]
        if not np.isnan(least):
            places = np.flatnonzero(-scores_K <= least)
    order = np.argsort(-scores_K[places], kind="stable")[:top]
    best: list[int] = places[order].tolist()
    return best


def lines(answer: Any) -> list[tuple[str, ...]]:
    return [(str(a["label"]), f"{100 * a['probability']:.2f} %") for a in answer]


def same(one: Outputs, other: Outputs, record: TaskRecord) -> npt.NDArray[np.bool_]:
    return np.asarray(one.argmax(1) == other.argmax(1))


def said(output: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    return labels[int(output.argmax())]


def changes(one: Outputs, other: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    return " → ".join(said(output, labels, record) for output in (one, other))


def truth(target: int, labels: tuple[str, ...]) -> str:
    return labels[target]


def drawn(picture: Pixels, answer: Any) -> None:
    return None


def things(answer: Any) -> tuple[Thing, ...]:
    return ()


def marked(target: Any, labels: tuple[str, ...]) -> tuple[Thing, ...]:
    return ()


def taught(picture: Pixels, target: Any, labels: tuple[str, ...]) -> Pixels:
    return picture
