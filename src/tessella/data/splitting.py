"""Which images are held out: stratified by class, and decided by the seed alone."""

from __future__ import annotations

from collections.abc import Sequence
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


def hold_out_groups(
    labels: npt.NDArray[np.int64],
    groups: Sequence[str],
    *,
    val: float,
    test: float,
    seed: int,
) -> npt.NDArray[np.int8]:
    """As ``hold_out``, but images of one group (a patient, a scene) stay in one split.

    Groups come one after another, those first whose classes are least even, by chance among equals;
    each goes where the classes' shares then are nearest to those asked for.
    """
    names, group_N = np.unique(np.asarray(groups), return_inverse=True)
    classes = int(labels.max()) + 1 if len(labels) else 0
    counts_GK = np.zeros((len(names), classes), np.int64)
    np.add.at(counts_GK, (group_N, labels), 1)
    shares_S = np.array([1 - val - test, val, test])
    total_K = counts_GK.sum(axis=0)
    missing_SK = shares_S[:, None] * total_K
    order = _generator(seed, 0).permutation(len(names))
    order = order[np.argsort(-counts_GK[order].std(axis=1), kind="stable")]
    split_G = np.full(len(names), TRAIN, np.int8)
    for group in order.tolist():
        # the square of what is missing falls by 2·missing·count − count² where the group goes
        gain_SK = (2 * missing_SK - counts_GK[group]) * counts_GK[group]
        gain_S = np.where(shares_S > 0, (gain_SK / np.maximum(total_K, 1) ** 2).sum(1), -np.inf)
        split_G[group] = int(gain_S.argmax())
        missing_SK[split_G[group]] -= counts_GK[group]
    return split_G[group_N]


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
