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
LEVELS = 127  # magnitudes that int8 has besides zero
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
        self.width = 0.0  # of a bin; 0 before the first number that is not zero

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's magnitudes; they must be finite."""
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


def min_max(histogram: Histogram) -> float:
    """The largest magnitude seen: nothing is cut off."""
    return histogram.largest


def percentile(histogram: Histogram, share: float = 99.99) -> float:
    """The least edge of a bin that has ``share`` percent of all numbers below it."""
    seen = histogram.zeros + histogram.counts.cumsum()
    if not histogram.counts.any():
        return 0.0
    return histogram.edge(int(np.searchsorted(seen, share / 100 * seen[-1])) + 1)


def mean_square(histogram: Histogram) -> float:
    """The threshold with the least mean-square error, each bin standing for its middle."""
    middles = (np.arange(BINS, dtype=np.float64) + 0.5) * histogram.width
    return _best(histogram, lambda bins: _square_error(histogram, middles, bins))


def _square_error(histogram: Histogram, middles: Counts, bins: int) -> float:
    step = histogram.edge(bins) / LEVELS
    rounded = np.minimum(np.rint(middles / step), LEVELS) * step
    return float(histogram.counts @ (middles - rounded) ** 2)


def entropy(histogram: Histogram) -> float:
    """The threshold whose ``LEVELS`` levels tell least less than the bins: Kullback and Leibler.

    P is the histogram up to the threshold, with all that lies above it in the last bin. Q is the
    same part without what lies above, each level's count spread evenly over its bins that are not
    empty; a bin that is empty in Q alone counts as half a sample. (Migacz, GTC 2017.)
    """
    return _best(histogram, lambda bins: divergence(histogram.counts, bins))


def divergence(counts: Counts, bins: int) -> float:
    """The divergence of ``entropy`` for a threshold after so many bins."""
    inside = counts[:bins]
    p = inside.copy()
    p[-1] += counts[bins:].sum()
    starts = np.arange(LEVELS) * bins // LEVELS
    level = np.repeat(np.arange(LEVELS), np.diff(np.append(starts, bins)))
    occupied = np.add.reduceat((inside > 0).astype(float), starts)
    share = np.add.reduceat(inside, starts) / np.maximum(occupied, 1)
    q = np.where(inside > 0, share[level], 0.0)
    there = p > 0
    p, q = p[there], np.maximum(q[there], 0.5)
    return float(p @ np.log((p / p.sum()) / (q / q.sum())) / p.sum())


def _best(histogram: Histogram, cost: Callable[[int], float]) -> float:
    """The edge with the least cost; among equal ones the widest."""
    filled = histogram.filled
    if filled <= FEWEST:
        return histogram.largest
    tried = [filled, *range(filled - filled % STRIDE, FEWEST - 1, -STRIDE)]
    costs = [cost(bins) for bins in tried]
    return histogram.edge(tried[int(np.argmin(costs))])


METHODS: dict[str, Callable[[Histogram], float]] = {
    "min-max": min_max,
    "percentile": percentile,
    "entropy": entropy,
    "mse": mean_square,
}
