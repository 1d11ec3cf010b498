"""A histogram of magnitudes that grows, and where to cut it off: the four ways to choose a scale.

Zero is exact under every scale, so its count stands apart from the bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

BINS = 2048
LEVELS = 127  # magnitudes that int8 has besides zero; up to 255 where zero is not in the middle
FEWEST = 128  # bins that a threshold keeps, by entropy and by mean-square error
STRIDE = 8  # bins between two thresholds that are tried

Counts = npt.NDArray[np.float64]


class Histogram:
    """Counts of magnitudes in ``BINS`` bins of one width, which doubles as often as it must.

    Doubling adds neighbours up, so the counts are those of the final width from the start.
    """

    def __init__(self) -> None:
        self.counts: Counts = np.zeros(BINS)
        self.zeros = 0
        self.largest = 0.0
        self.lowest = 0.0  # the smallest number, if any is below zero
        self.width = 0.0  # of a bin; 0 before the first number that is not zero

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's magnitudes; they must be finite."""
        if tensor.numel():
            self.lowest = min(self.lowest, float(tensor.min()))
        magnitudes = tensor.detach().float().abs().flatten()
        magnitudes = magnitudes[magnitudes > 0]
        self.zeros += tensor.numel() - magnitudes.numel()
        if not magnitudes.numel():
            return
        largest = float(magnitudes.max())
        self.largest = max(self.largest, largest)
        self._reach(largest)
        # exact: the width is a power of two. What lies on the upper edge belongs to the last bin
        bins = (magnitudes / self.width).int().clamp_(max=BINS - 1)
        self.counts += torch.bincount(bins, minlength=BINS).cpu().numpy()

    def _reach(self, largest: float) -> None:
        if self.width == 0.0:  # a power of two: dividing by it is exact
            self.width = 2.0 ** math.ceil(math.log2(largest)) / BINS
        while self.width * BINS < largest:
            self.counts = np.concatenate(
                [self.counts.reshape(-1, 2).sum(1), np.zeros(BINS - BINS // 2)]
            )
            self.width *= 2

    @property
    def filled(self) -> int:
        """Bins up to the last one that is not empty."""
        return int(np.flatnonzero(self.counts)[-1]) + 1 if self.counts.any() else 0

    def edge(self, bins: int) -> float:
        """The upper edge of so many bins, or what was largest, if that is less."""
        return min(bins * self.width, self.largest)


def min_max(histogram: Histogram, levels: int = LEVELS) -> float:
    """The largest magnitude seen: nothing is cut off."""
    return histogram.largest


def percentile(histogram: Histogram, levels: int = LEVELS, *, share: float = 99.99) -> float:
    """The least edge of a bin that has ``share`` percent of all numbers below it."""
    seen = histogram.zeros + histogram.counts.cumsum()
    if not histogram.counts.any():
        return 0.0
    return histogram.edge(int(np.searchsorted(seen, share / 100 * seen[-1])) + 1)


def mean_square(histogram: Histogram, levels: int = LEVELS) -> float:
    """The threshold with the least mean-square error, each bin standing for its middle."""
    middles = (np.arange(BINS, dtype=np.float64) + 0.5) * histogram.width
    return _best(histogram, levels, lambda bins: _square_error(histogram, middles, bins, levels))


def _square_error(histogram: Histogram, middles: Counts, bins: int, levels: int) -> float:
    step = histogram.edge(bins) / levels
    rounded = np.minimum(np.rint(middles / step), levels) * step
    return float(histogram.counts @ (middles - rounded) ** 2)


def entropy(histogram: Histogram, levels: int = LEVELS) -> float:
    """The threshold whose levels tell least less than the bins: Kullback and Leibler.

    P is the histogram up to the threshold, with all that lies above it in the last bin. Q is the
    same part without what lies above, each level's count spread evenly over its bins that are not
    empty; a bin that is empty in Q alone counts as half a sample. (Migacz, GTC 2017.)
    """
    return _best(histogram, levels, lambda bins: divergence(histogram.counts, bins, levels))


def divergence(counts: Counts, bins: int, levels: int = LEVELS) -> float:
    """The divergence of ``entropy`` for a threshold after so many bins."""
    inside = counts[:bins]
    p = inside.copy()
    p[-1] += counts[bins:].sum()
    starts = np.arange(levels) * bins // levels
    level = np.repeat(np.arange(levels), np.diff(np.append(starts, bins)))
    occupied = np.add.reduceat((inside > 0).astype(float), starts)
    share = np.add.reduceat(inside, starts) / np.maximum(occupied, 1)
    q = np.where(inside > 0, share[level], 0.0)
    there = p > 0
    p, q = p[there], np.maximum(q[there], 0.5)
    return float(p @ np.log((p / p.sum()) / (q / q.sum())) / p.sum())


def _best(histogram: Histogram, levels: int, cost: Callable[[int], float]) -> float:
    """The edge with the least cost; among equal ones the widest."""
    filled, fewest = histogram.filled, max(FEWEST, levels)
    if filled <= fewest:
        return histogram.largest
    tried = [filled, *range(filled - filled % STRIDE, fewest - 1, -STRIDE)]
    costs = [cost(bins) for bins in tried]
    return histogram.edge(tried[int(np.argmin(costs))])


METHODS: dict[str, Callable[[Histogram, int], float]] = {
    "min-max": min_max,
    "percentile": percentile,
    "entropy": entropy,
    "mse": mean_square,
}
