"""Triton's classification extension: the best classes of an output as ``score:index:label``."""

from __future__ import annotations

import numpy as np


def best(array: np.ndarray, count: int) -> np.ndarray:
    """Indices [batch, k] of the ``count`` highest scores of each sample, best first, NaN last.

    Scores are all elements of a sample, in row-major order; k is at most their number. Equal scores
    keep their order.
    """
    scores = _scores(array)
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def ranked(array: np.ndarray, count: int, labels: tuple[str, ...]) -> list[list[str]]:
    """``best`` as texts; the label is left out where the model has none for every class."""
    scores = _scores(array)
    named = len(labels) == scores.shape[1]
    return [
        [
            f"{row[i]:.9g}:{i}:{labels[i]}"
            if named
            else f"{row[i]:.9g}:{i}"  # 9 digits hold a float32
            for i in order
        ]
        for row, order in zip(scores, best(array, count), strict=True)
    ]


def _scores(array: np.ndarray) -> np.ndarray:
    return array.reshape(len(array), -1).astype(np.float64)
