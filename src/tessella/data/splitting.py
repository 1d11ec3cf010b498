"""Which images are held out: stratified by class, and decided by the seed alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

TRAIN, VAL, TEST = range(3)


def hold_out(
    labels: npt.NDArray[np.int64], *, val: float, test: float, seed: int
) -> npt.NDArray[np.int8]:
    """A split for each image: ``TRAIN``, ``VAL`` or ``TEST``.

    Each class gives the same fraction, rounded so that all together give that fraction of all. A
    class always keeps an image for training; one with a single image gives none.

    Args:
        labels: class of each image, [N].
        val, test: fractions, 0 to 1, together below 1.
    """
    splits = np.full(len(labels), TRAIN, np.int8)
    counts = np.bincount(labels) if len(labels) else np.zeros(0, np.int64)
    val_counts = _apportion(counts * val, np.maximum(counts - 1, 0))
    test_counts = _apportion(counts * test, np.maximum(counts - 1 - val_counts, 0))
    members = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    for label, rows in enumerate(members):
        order = rows[_generator(seed, label).permutation(len(rows))]
        first, second = val_counts[label], val_counts[label] + test_counts[label]
        splits[order[:first]] = VAL
        splits[order[first:second]] = TEST
    return splits


def _generator(seed: int, label: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, label], np.uint64)))


def _apportion(
    shares: npt.NDArray[np.floating[Any]], limit: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Whole numbers near ``shares`` whose sum is the rounded sum: the largest remainders go up."""
    given: npt.NDArray[np.int64] = np.minimum(np.floor(shares + 1e-9).astype(np.int64), limit)
    total = int(np.floor(shares.sum() + 0.5))
    if shares.sum() > 0:
        total = max(1, total)
    remainders = np.where(given < limit, shares - given, -1.0)
    for label in np.argsort(-remainders, kind="stable")[: max(0, total - int(given.sum()))]:
        given[label] += remainders[label] >= 0
    return given
