from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics
from sklearn.utils.class_weight import compute_class_weight

from tessella.core.task import CLASSIFICATION
from tessella.tasks import LossSettings, Query
from tessella.tasks.classification import answers
from tessella.tasks.classification.loss import balanced
from tessella.tasks.classification.loss import loss as loss_of
from tessella.tasks.classification.metrics import measured


@pytest.fixture
def noise():
    return np.random.default_rng(0)


def test_balanced_weights_are_scikit_learns():
    truth = np.repeat([0, 1, 2], [50, 3, 17])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=truth)
    np.testing.assert_allclose(balanced([50, 3, 17], 70), expected, rtol=1e-6)


def test_a_class_without_images_weighs_nothing():
    assert balanced([4, 0], 4).tolist() == [0.5, 0.0]


def test_weighted_loss_by_hand():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.1, 0.0], [0.0, 0.0, 3.0], [1.0, 1.0, 1.0]])
    labels = torch.tensor([0, 1, 2, 1])
    weights = torch.tensor([0.5, 2.0, 1.0])
    p = torch.softmax(logits.double(), 1)
    by_hand = -sum(
        w * torch.log(p[i, y])
        for i, (y, w) in enumerate(zip([0, 1, 2, 1], [0.5, 2.0, 1.0, 2.0], strict=True))
    )
    loss = loss_of(logits, labels, LossSettings(weights_K=weights))
    assert loss.item() == pytest.approx(by_hand.item() / 4, rel=1e-6)
    # the loss of a batch is the mean of the losses of its halves, weighted or not
    halves = [
        loss_of(logits[h], labels[h], LossSettings(weights_K=weights)) for h in ([0, 1], [2, 3])
    ]
    assert loss.item() == pytest.approx(torch.stack(halves).mean().item(), rel=1e-6)
    plain = loss_of(logits, labels, LossSettings())
    assert plain.item() == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-6
    )


def test_smoothed_loss_by_hand():
    logits, labels = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 3, 1, 1, 2])
    targets = 0.9 * torch.eye(4, dtype=torch.float64)[labels] + 0.1 / 4
    by_hand = -(targets * torch.log_softmax(logits, 1)).sum(1).mean()
    loss = loss_of(logits, labels, LossSettings(smoothing=0.1))
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)


def test_half_precision_logits_give_a_float32_loss():
    logits = torch.randn(4, 3).half()
    assert loss_of(logits, torch.tensor([0, 1, 2, 0]), LossSettings()).dtype == torch.float32


@pytest.mark.parametrize("classes", [3, 9])
def test_numbers_are_scikit_learns(noise, classes):
    truth = noise.integers(0, classes, 200)
    truth[truth == classes - 1] = 0  # a class without images …
    logits = noise.normal(size=(200, classes)).astype(np.float32)
    logits[:, 1] -= 20  # … and one that is never predicted
    labels = tuple(f"class {k}" for k in range(classes))
    found = measured(logits, truth, labels)

    predicted = logits.argmax(1)
    assert found.accuracy == metrics.accuracy_score(truth, predicted)
    np.testing.assert_array_equal(
        found.confusion, metrics.confusion_matrix(truth, predicted, labels=range(classes))
    )
    precision, recall, f1, support = metrics.precision_recall_fscore_support(
        truth, predicted, labels=range(classes), zero_division=0
    )
    np.testing.assert_allclose([c.precision for c in found.classes], precision)
    np.testing.assert_allclose([c.recall for c in found.classes], recall)
    np.testing.assert_allclose([c.f1 for c in found.classes], f1)
    assert [c.support for c in found.classes] == support.tolist()
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(1, keepdims=True)
    assert found.loss == pytest.approx(metrics.log_loss(truth, p, labels=range(classes)), rel=1e-9)
    top5 = 1.0
    if classes > 5:
        top5 = metrics.top_k_accuracy_score(truth, logits, k=5, labels=range(classes))
    assert found.top5 == top5
    np.testing.assert_array_equal(found.predictions, predicted)


def test_of_equal_scores_the_first_class_wins():
    found = measured(np.zeros((4, 3), np.float32), np.array([0, 1, 2, 0]), ("a", "b", "c"))
    assert found.accuracy == 0.5
    assert found.predictions.tolist() == [0, 0, 0, 0]


def test_the_best_classes_are_those_of_a_sort(noise):
    """Equal scores keep their order, and no number is behind all."""
    for count in (1, 4, 9, 300):
        few = noise.integers(0, max(2, count // 4), (40, count)).astype(np.float32)
        few[::5, noise.integers(count)] = np.inf
        few[::3, : count // 2] = np.nan
        for top in (1, 5, 400):
            with np.errstate(invalid="ignore"):  # of infinity less infinity
                told = answers.answer(few, (), CLASSIFICATION, Query(top=top))
            expected = np.argsort(-few.astype(np.float64), axis=1, kind="stable")[:, :top]
            assert [[one["index"] for one in row] for row in told] == expected.tolist()
