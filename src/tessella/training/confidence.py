"""How far a measured number can be trusted: intervals, paired tests, calibration, curves.

Scores are measured on a sample of the world; what differs by chance alone must not be believed.
Letters of shapes: N images, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

BINS = 15  # of the calibration, as Guo et al. (2017) count them
COLDEST, HOTTEST = 1e-2, 1e2  # temperatures
MOST_POINTS = 100  # of a curve
TOGETHER = 100  # draws that are measured at a time
ROOM_BYTES = 1 << 26  # of their counts: 100 draws of a million images would take 800 MB


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measured value, and the interval in which the true one lies at the level asked for."""

    value: float
    low: float
    high: float


def exact_share(right: int, count: int, level: float) -> Measure:
    """A share with its exact interval (Clopper and Pearson 1934)."""
    found = stats.binomtest(right, count).proportion_ci(level, method="exact")
    return Measure(value=right / count, low=float(found.low), high=float(found.high))


def bootstrapped(
    measured: Callable[[Floats], Floats],
    count: int,
    *,
    level: float,
    resamples: int,
    seed: int,
    told: Callable[[int], None] = lambda done: None,
) -> list[Measure]:
    """Values with bias-corrected percentile intervals over samples drawn anew with replacement.

    Some measures rise where an image counts twice, as average precision does: of these the plain
    percentiles (Efron 1979) lie too high, and may all lie above the value. Corrected (Efron 1981),
    an interval at 95 % held the truth of a made detector's mAP in 87, 89 and 91 of 100 splits of
    10, 20 and 50 images, the plain one in 74, 83 and 88. Where a value lies outside of all draws,
    the interval reaches to it.

    Args:
        measured: values [V, S] of S draws, given how often each image counts in each, [N, S]; NaN
            where a draw has nothing to measure.
        told: called with the number of resamples that are done.
    """
    generator = np.random.default_rng(seed)
    made = []
    together = max(1, min(TOGETHER, ROOM_BYTES // (8 * count)))
    for first in range(0, resamples, together):
        drawn_NS = np.empty((count, min(together, resamples - first)))
        for column_N in drawn_NS.T:
            column_N[:] = np.bincount(generator.integers(0, count, count), minlength=count)
        made.append(measured(drawn_NS))
        told(first + drawn_NS.shape[1])
    values_V = measured(np.ones((count, 1)))[:, 0].tolist()
    sides = [(1 - level) / 2, (1 + level) / 2]
    found = []
    for value, drawn_S in zip(values_V, np.concatenate(made, axis=1), strict=True):
        known_S = drawn_S[~np.isnan(drawn_S)]
        low, high = _corrected(known_S, value, sides) if len(known_S) else (value, value)
        found.append(Measure(value=float(value), low=min(low, value), high=max(high, value)))
    return found


def _corrected(drawn_S: Floats, value: float, sides: list[float]) -> tuple[float, float]:
    """The quantiles of draws that are the sides of an interval around a value."""
    below = (np.mean(drawn_S < value) + np.mean(drawn_S <= value)) / 2
    least = 1 / (2 * len(drawn_S))
    shift = 2 * stats.norm.ppf(np.clip(below, least, 1 - least))
    low, high = np.quantile(drawn_S, stats.norm.cdf(shift + stats.norm.ppf(sides)))
    return float(low), float(high)


def mcnemar(right_N: Bools, other_N: Bools) -> tuple[int, int, float]:
    """Images that one or the other alone has right, and the exact two-sided p (McNemar 1947).

    The p is the probability of so uneven a split, or a more uneven one, if both were equally good.
    """
    one, other = int((right_N & ~other_N).sum()), int((other_N & ~right_N).sum())
    p = stats.binomtest(one, one + other).pvalue if one + other else 1.0
    return one, other, float(p)


def softmax(scores_NK: npt.NDArray[np.floating]) -> Floats:
    """Probabilities N×K in float64."""
    shifted = scores_NK.astype(np.float64) - scores_NK.max(axis=1, keepdims=True)
    powers = np.exp(shifted)
    made: Floats = powers / powers.sum(axis=1, keepdims=True)
    return made


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Images whose highest probability lies in one fifteenth: its mean, and how many are right."""

    count: int
    confidence: float
    accuracy: float


def calibration(probabilities_NK: Floats, truth_N: Indices) -> tuple[float, tuple[Bin, ...]]:
    """The expected calibration error (Naeini et al. 2015), and the bins that are not empty.

    The error is the mean of |share that is right − highest probability| over the bins, weighed by
    their images: 0 where of images with probability 0.8 80 % are right.
    """
    confidence_N = probabilities_NK.max(axis=1)
    right_N = probabilities_NK.argmax(axis=1) == truth_N
    number_N = np.clip(np.ceil(confidence_N * BINS).astype(int) - 1, 0, BINS - 1)
    bins = []
    for number in range(BINS):
        chosen = number_N == number
        if chosen.any():
            mean = float(confidence_N[chosen].mean())
            right = float(right_N[chosen].mean())
            bins.append(Bin(count=int(chosen.sum()), confidence=mean, accuracy=right))
    error = sum(b.count * abs(b.accuracy - b.confidence) for b in bins) / len(truth_N)
    return error, tuple(bins)


def fitted_temperature(scores_NK: npt.NDArray[np.float32], truth_N: Indices) -> float | None:
    """What scores are to be divided by so that their cross entropy is least (Guo et al. 2017).

    None where every answer is right: the colder the better then, without end.
    """
    if (scores_NK.argmax(axis=1) == truth_N).all():
        return None
    scores = scores_NK.astype(np.float64)

    def loss(log_temperature: float) -> float:
        scaled = scores / np.exp(log_temperature)
        own_N = scaled[np.arange(len(truth_N)), truth_N]
        highest_N = scaled.max(axis=1)
        powers = np.exp(scaled - highest_N[:, None]).sum(axis=1)
        return float((np.log(powers) + highest_N - own_N).mean())

    ends = (np.log(COLDEST), np.log(HOTTEST))
    found = optimize.minimize_scalar(loss, bounds=ends, method="bounded", options={"xatol": 1e-6})
    return float(np.exp(found.x))


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Precision and recall of a class where every probability from a threshold on counts.

    Attributes:
        average_precision: the sum of precision times the growth of recall over all thresholds;
            None where the class does not occur.
        thresholds, precision, recall: at most 100 points, from the highest threshold on.
    """

    label: str
    average_precision: float | None
    thresholds: tuple[float, ...]
    precision: tuple[float, ...]
    recall: tuple[float, ...]


def curve_of(label: str, probabilities_N: Floats, truth_N: Bools) -> Curve:
    """The curve of one class beside all others."""
    order = np.argsort(-probabilities_N, kind="stable")
    sorted_N = probabilities_N[order]
    last = np.append(np.flatnonzero(np.diff(sorted_N)), len(sorted_N) - 1)
    hits = np.cumsum(truth_N[order])[last]
    support = int(truth_N.sum())
    precision, recall = hits / (last + 1), hits / max(support, 1)
    area = float((precision * np.diff(recall, prepend=0.0)).sum())
    chosen = np.arange(len(last))
    if len(last) > MOST_POINTS:
        chosen = np.unique(np.linspace(0, len(last) - 1, MOST_POINTS).round().astype(int))
    return Curve(
        label=label,
        average_precision=area if support else None,
        thresholds=tuple(sorted_N[last][chosen].tolist()),
        precision=tuple(precision[chosen].tolist()),
        recall=tuple(recall[chosen].tolist()),
    )
