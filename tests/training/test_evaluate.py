from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tessella.artifacts.dataset import Dataset
from tessella.core.errors import DataError, TrainError
from tests.support.training import PREPROCESS, evaluate, write_dataset


def test_runs_over_a_split_in_its_order(dataset):
    split = Dataset(dataset).val
    weights = torch.randn(12 * 12, 3, generator=torch.Generator().manual_seed(0))
    found = evaluate(lambda images: images.flatten(1) @ weights, split, batch_size=7)
    images = np.stack([PREPROCESS(example.content) for example in split])
    expected = torch.from_numpy(images).flatten(1) @ weights
    np.testing.assert_allclose(found.scores, expected, rtol=1e-4, atol=1e-4)
    assert found.count == 18
    text = json.dumps(found.to_json(), allow_nan=False)
    assert set(json.loads(text)) == {
        *("count", "accuracy", "top5", "loss", "confusion", "labels"),
        *("per_class", "predictions"),
    }


def test_tells_progress(dataset):
    events = []
    evaluate(
        lambda images: torch.zeros(len(images), 3),
        Dataset(dataset).val,
        batch_size=8,
        emit=events.append,
    )
    assert [e.values["done"] for e in events] == [8, 16, 18]


def test_what_cannot_be_measured_is_an_error(dataset, tmp_path):
    split = Dataset(dataset).val

    def run(predict):
        return evaluate(predict, split, batch_size=10)

    with pytest.raises(TrainError, match=r"not of shape \[10, 3\].*\[10, 4\]"):
        run(lambda images: torch.zeros(len(images), 4))
    with pytest.raises(TrainError, match=r"no number for 18 of 18 images.*val/0.png"):
        run(lambda images: torch.full((len(images), 3), float("nan")))
    empty = Dataset(write_dataset(tmp_path, train=3, val=0)).val
    with pytest.raises(DataError, match="val split is empty"):
        evaluate(lambda images: images, empty, batch_size=10)
