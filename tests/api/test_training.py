"""What ``train`` refuses before it says or reads anything, and what it leaves out for a task."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tessella import api
from tessella.artifacts.dataset import Dataset
from tessella.core.errors import UsageError
from tessella.core.events import Event
from tessella.data.importing import ImportSettings, import_images
from tests.support.training import write_dataset


@pytest.fixture(scope="module")
def stripes(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("training") / "stripes", train=12, val=6)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> Dataset:
    """How bright 16 grey pictures are."""
    folder = tmp_path_factory.mktemp("numbers")
    rows = [["path", "brightness"]]
    for number in range(16):
        Image.fromarray(np.full((16, 16), 16 * number, np.uint8)).save(folder / f"{number}.png")
        rows.append([f"{number}.png", str(number / 16)])
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    settings = ImportSettings(task="regression", size=16, channels=1, holdout=0.25)
    return import_images(folder / "table.csv", folder / "data", settings)


@pytest.mark.parametrize(
    ("network", "settings", "said"),
    [
        ("lenett", {}, "no network of this name.*use lenet"),
        ("lenet", {"gpus": 64}, "too few GPUs.*gpus=64, 0 here.*leave gpus out.*CUDA_VISIBLE_DEV"),
        ("unet", {}, "answers for each pixel"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_recipe_is_told(
    stripes, tmp_path, monkeypatch, network, settings, said
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told: list[Event] = []
    out = tmp_path / "run"
    for verb in (
        lambda: api.train(network, stripes, out=out, emit=told.append, **settings),
        lambda: api.forecast(network, stripes, emit=told.append, **settings),
        lambda: api.sweep(network, stripes, vary={"lr": "1e-4..1e-2 log"}, out=out, **settings),
    ):
        with pytest.raises(UsageError, match=said):
            verb()
    assert not told
    assert not out.exists()


def test_targets_that_are_not_smoothed(stripes, numbers, tmp_path) -> None:
    def said_of(dataset: Dataset | Path) -> tuple[float, str]:
        told: list[Event] = []
        run = api.train("lenet", dataset, out=tmp_path / "run", epochs=0.1, emit=told.append)
        (recipe,) = (e.text for e in told if e.name == "recipe")
        run.path.rename(tmp_path / Path(run.recipe.dataset).name)
        return run.recipe.label_smoothing, recipe

    share, recipe = said_of(stripes)
    assert (share, "label smoothing 0.1" in recipe) == (0.1, True)
    share, recipe = said_of(numbers)
    assert (share, "smoothing" in recipe) == (0.0, False)
    with pytest.raises(UsageError, match=r"targets of regression.*label_smoothing=0.1.*leave"):
        api.train("lenet", numbers, out=tmp_path / "other", label_smoothing=0.1)
