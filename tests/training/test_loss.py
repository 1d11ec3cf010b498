from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

from tessella.artifacts.dataset import Dataset
from tessella.core.errors import DataError
from tessella.training.loss import balanced_weights, check_labels, classification_loss, not_finite
from tests.support.training import recipe


def test_balanced_weights_are_scikit_learns():
    truth = np.repeat([0, 1, 2], [50, 3, 17])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=truth)
    np.testing.assert_allclose(balanced_weights([50, 3, 17]), expected, rtol=1e-6)


def test_a_class_without_images_weighs_nothing():
    assert balanced_weights([4, 0]).tolist() == [0.5, 0.0]


def test_weighted_loss_by_hand():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.1, 0.0], [0.0, 0.0, 3.0], [1.0, 1.0, 1.0]])
    labels = torch.tensor([0, 1, 2, 1])
    weights = torch.tensor([0.5, 2.0, 1.0])
    p = torch.softmax(logits.double(), 1)
    by_hand = -sum(
        w * torch.log(p[i, y])
        for i, (y, w) in enumerate(zip([0, 1, 2, 1], [0.5, 2.0, 1.0, 2.0], strict=True))
    )
    loss = classification_loss(logits, labels, weights)
    assert loss.item() == pytest.approx(by_hand.item() / 4, rel=1e-6)
    # the loss of a batch is the mean of the losses of its halves, weighted or not
    halves = [classification_loss(logits[h], labels[h], weights) for h in ([0, 1], [2, 3])]
    assert loss.item() == pytest.approx(torch.stack(halves).mean().item(), rel=1e-6)
    plain = classification_loss(logits, labels, None)
    assert plain.item() == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-6
    )


def test_smoothed_loss_by_hand():
    logits, labels = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 3, 1, 1, 2])
    targets = 0.9 * torch.eye(4, dtype=torch.float64)[labels] + 0.1 / 4
    by_hand = -(targets * torch.log_softmax(logits, 1)).sum(1).mean()
    loss = classification_loss(logits, labels, None, smoothing=0.1)
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)


def test_half_precision_logits_give_a_float32_loss():
    logits = torch.randn(4, 3).half()
    assert classification_loss(logits, torch.tensor([0, 1, 2, 0]), None).dtype == torch.float32


def test_labels_out_of_range(dataset):
    split = Dataset(dataset).train
    check_labels(split, 3)
    with pytest.raises(DataError, match=r"label 2 of train/2.png, 2 classes"):
        check_labels(split, 2)


def test_divergence_says_where_and_what_to_do():
    text = str(not_finite(float("nan"), 17, 0.25, recipe("data", precision="fp16")))
    for part in ("nan at step 17", "learning rate 0.25", "lr=0.001", "precision fp32", "warmup"):
        assert part in text
