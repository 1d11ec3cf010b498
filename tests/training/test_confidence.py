"""Intervals, tests and curves beside sums written out, scikit-learn, scipy and torchmetrics."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics
from torchmetrics.functional.classification import multiclass_calibration_error

from tessella.training.confidence import (
    bootstrapped,
    calibration,
    curve_of,
    exact_share,
    fitted_temperature,
    mcnemar,
    softmax,
)


def at_least(right: int, count: int, p: float) -> float:
    return sum(comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(right, count + 1))


@pytest.mark.parametrize(("right", "count"), [(0, 10), (1, 10), (7, 10), (10, 10), (93, 120)])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_an_exact_interval_is_where_the_tails_are_as_likely_as_said(right, count, level):
    found, tail = exact_share(right, count, level), (1 - level) / 2
    assert found.value == right / count
    if right:
        assert at_least(right, count, found.low) == pytest.approx(tail, rel=1e-6)
    else:
        assert found.low == 0
    if right < count:
        assert 1 - at_least(right + 1, count, found.high) == pytest.approx(tail, rel=1e-6)
    else:
        assert found.high == 1


@pytest.mark.parametrize(("one", "other"), [(0, 0), (5, 5), (9, 2), (0, 7), (1, 30)])
def test_mcnemar_is_the_sum_over_splits_as_uneven(one, other):
    right = np.array([True] * one + [False] * other + [True] * 4 + [False] * 3)
    rival = np.array([False] * one + [True] * other + [True] * 4 + [False] * 3)
    n = one + other
    tail = sum(comb(n, k) for k in range(min(one, other) + 1)) / 2**n
    found = mcnemar(right, rival)
    assert found[:2] == (one, other)
    assert found[2] == pytest.approx(min(1.0, 2 * tail))


def test_a_bootstrap_is_scipys():
    values = np.random.default_rng(0).exponential(size=200)
    (found,) = bootstrapped(
        lambda drawn: values[None] @ drawn / 200, 200, level=0.9, resamples=4000, seed=1
    )
    theirs = stats.bootstrap(
        (values,), np.mean, confidence_level=0.9, n_resamples=4000, method="percentile", rng=2
    ).confidence_interval
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.015)


@pytest.mark.parametrize(("bias", "low", "high"), [(0.5, -2.14, 1.14), (-0.5, -1.14, 2.14)])
def test_a_bootstrap_of_what_rises_when_images_count_twice_is_corrected(bias, low, high):
    """Draws of N(bias, 1) around a value of 0: then the interval is −bias ± 1.645."""
    normal = bias + stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000)
    parts = iter(np.split(normal[None], 200, axis=1))

    def measured(drawn):
        return next(parts) if drawn.shape[1] > 1 else np.zeros((1, 1))

    (found,) = bootstrapped(measured, 5, level=0.9, resamples=20_000, seed=0)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.01)


def test_an_interval_holds_its_value_where_every_draw_lies_above():
    def measured(drawn):
        return np.linspace(2, 3, 100)[None] if drawn.shape[1] > 1 else np.ones((1, 1))

    (found,) = bootstrapped(measured, 5, level=0.9, resamples=100, seed=0)
    assert found.low == found.value == 1.0 < found.high


@pytest.fixture(scope="module")
def scored():
    """Scores of 500 images and 4 classes that are right more often than not, and too sure."""
    generator = np.random.default_rng(0)
    truth = generator.integers(0, 4, 500)
    scores = generator.normal(size=(500, 4)).astype(np.float32)
    scores[np.arange(500), truth] += 1.0
    return 3 * scores, truth


def test_the_calibration_error_is_torchmetrics(scored):
    scores, truth = scored
    error, bins = calibration(softmax(scores), truth)
    theirs = multiclass_calibration_error(
        torch.from_numpy(softmax(scores)), torch.from_numpy(truth), num_classes=4, n_bins=15
    )
    assert error == pytest.approx(theirs.item(), abs=1e-6)
    assert sum(b.count for b in bins) == 500


def test_the_temperature_is_where_the_loss_is_flat(scored):
    scores, truth = scored
    found = fitted_temperature(scores, truth)
    temperature = torch.tensor(found, dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(
        torch.from_numpy(scores).double() / temperature, torch.from_numpy(truth)
    )
    loss.backward()
    assert abs(temperature.grad.item()) < 1e-5
    assert found > 2  # they are about three times too sure
    assert fitted_temperature(scores, scores.argmax(axis=1)) is None  # nothing is wrong: no end
    assert calibration(softmax(scores / found), truth)[0] < calibration(softmax(scores), truth)[0]


def test_curves_are_scikit_learns(scored):
    scores, truth = scored
    probabilities = softmax(scores)[:, 2].round(2)  # with ties
    curve = curve_of("c", probabilities, truth == 2)
    area = metrics.average_precision_score(truth == 2, probabilities)
    assert curve.average_precision == pytest.approx(area)
    precision, recall, cuts = metrics.precision_recall_curve(truth == 2, probabilities)
    theirs = {t: (p, r) for t, p, r in zip(cuts, precision, recall, strict=False)}
    assert 2 < len(curve.thresholds) <= 100
    for t, p, r in zip(curve.thresholds, curve.precision, curve.recall, strict=True):
        assert (p, r) == pytest.approx(theirs[t])
    assert curve_of("none", probabilities, truth == 9).average_precision is None
    many = curve_of("many", softmax(scores)[:, 2], truth == 2)
    assert len(many.thresholds) == 100
    assert many.recall[-1] == 1.0
