from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sklearn import metrics

from tessella.artifacts.dataset import Dataset
from tessella.core.errors import DataError, TrainError
from tessella.training.evaluate import evaluate, measure
from tests.support.training import CLASSES, PREPROCESS, write_dataset


class Labelled:
    """As much of a split as ``measure`` needs."""

    name = "val"

    def __init__(self, labels: np.ndarray) -> None:
        self.labels = labels


@pytest.mark.parametrize("classes", [3, 9])
def test_numbers_are_scikit_learns(noise, classes):
    truth = noise.integers(0, classes, 200)
    truth[truth == classes - 1] = 0  # a class without images …
    logits = noise.normal(size=(200, classes)).astype(np.float32)
    logits[:, 1] -= 20  # … and one that is never predicted
    labels = tuple(f"class {k}" for k in range(classes))
    found = measure(logits, Labelled(truth), labels)

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


def test_probabilities_give_the_loss_of_their_logits(noise):
    truth = noise.integers(0, 3, 50)
    logits = noise.normal(size=(50, 3)).astype(np.float32)
    probabilities = torch.softmax(torch.from_numpy(logits).double(), 1).float().numpy()
    one = measure(logits, Labelled(truth), CLASSES)
    other = measure(probabilities, Labelled(truth), CLASSES, outputs="probabilities")
    assert other.loss == pytest.approx(one.loss, rel=1e-6)
    assert other.confusion == one.confusion


def test_of_equal_scores_the_first_class_wins():
    found = measure(np.zeros((4, 3), np.float32), Labelled(np.array([0, 1, 2, 0])), CLASSES)
    assert found.accuracy == 0.5
    assert found.predictions.tolist() == [0, 0, 0, 0]


def test_runs_over_a_split_in_its_order(dataset):
    split = Dataset(dataset).val
    weights = torch.randn(12 * 12, 3, generator=torch.Generator().manual_seed(0))
    found = evaluate(
        lambda images: images.flatten(1) @ weights, split, PREPROCESS, CLASSES, batch_size=7
    )
    images = np.stack([PREPROCESS(example.content) for example in split])
    expected = torch.from_numpy(images).flatten(1) @ weights
    np.testing.assert_allclose(found.scores, expected, rtol=1e-4, atol=1e-4)
    assert found.count == 18
    text = json.dumps(found.to_json(), allow_nan=False)
    assert set(json.loads(text)) == {
        *("count", "accuracy", "top5", "loss", "confusion", "classes"),
    }


def test_tells_progress(dataset):
    events = []
    evaluate(
        lambda images: torch.zeros(len(images), 3),
        Dataset(dataset).val,
        PREPROCESS,
        CLASSES,
        batch_size=8,
        emit=events.append,
    )
    assert [e.values["done"] for e in events] == [8, 16, 18]


def test_what_cannot_be_measured_is_an_error(dataset, tmp_path):
    split = Dataset(dataset).val

    def run(predict):
        return evaluate(predict, split, PREPROCESS, CLASSES, batch_size=10)

    with pytest.raises(TrainError, match=r"one score a class, 3 in all.*\[10, 4\]"):
        run(lambda images: torch.zeros(len(images), 4))
    with pytest.raises(TrainError, match=r"no number for 18 of 18 images.*val/0.png"):
        run(lambda images: torch.full((len(images), 3), float("nan")))
    empty = Dataset(write_dataset(tmp_path, train=3, val=0)).val
    with pytest.raises(DataError, match="val split is empty"):
        evaluate(lambda images: images, empty, PREPROCESS, CLASSES)
