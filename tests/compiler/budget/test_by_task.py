"""A budget in the score of a task: recomputed by hand from what the plans answer."""

from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch import nn

from tessella import compiler
from tessella.artifacts.dataset import Dataset
from tessella.compiler.budget import Front, Labelled, judging, search
from tessella.compiler.budget.judging import Judge
from tessella.compiler.samples import labelled
from tessella.core.errors import UsageError
from tessella.core.spec import DimRange, TensorSpec
from tessella.core.task import TaskRecord
from tessella.data.importing import ImportSettings, import_images
from tessella.graph import capture
from tessella.quickstart.scattered import write_scattered
from tessella.tasks import named
from tests.support.budgets import Table, run

SIDE, CLASSES = 12, 3
BATCH = DimRange(min=1, opt=8, max=8)
SPEC = TensorSpec(
    name="image", dtype="float32", shape=(DimRange(min=1, opt=8, max=8), 3, SIDE, SIDE)
)


@pytest.fixture(scope="module")
def painted(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Pictures whose pixels have the class of their strongest colour, but for one in ten."""
    root, rng = tmp_path_factory.mktemp("painted"), np.random.default_rng(0)
    for name in ("images", "masks"):
        (root / "s" / name).mkdir(parents=True)
    for number in range(30):
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        mask = pixels.argmax(2).astype(np.uint8)
        wrong = rng.random(mask.shape) < 0.1
        mask[wrong] = rng.integers(0, CLASSES, int(wrong.sum()))
        mask[0, :2] = 255
        Image.fromarray(pixels).save(root / "s" / "images" / f"{number}.png")
        Image.fromarray(mask).save(root / "s" / "masks" / f"{number}.png")
    settings = ImportSettings(task="segmentation", size=SIDE, holdout=0.8, workers=1)
    return import_images(root / "s", root / "d", settings)


def strongest() -> nn.Module:
    """Answers the channels of its picture, by two layers of which one undoes the other."""
    torch.manual_seed(0)
    wide, back = nn.Conv2d(3, 16, 1, bias=False), nn.Conv2d(16, 3, 1, bias=False)
    with torch.no_grad():
        back.weight[:, :, 0, 0] = torch.linalg.pinv(wide.weight[:, :, 0, 0])
    return nn.Sequential(wide, back).eval()


@pytest.fixture(scope="module")
def data(painted: Dataset) -> Labelled:
    record, task = painted.preprocess, TaskRecord(name="segmentation", score="miou")
    return labelled(painted.val, record, "image", painted.classes, task)


@pytest.fixture(scope="module")
def front(data: Labelled, tmp_path_factory: pytest.TempPathFactory) -> Front:
    return search(
        capture(strongest(), (SPEC,), outputs=("scores",)),
        target="cpu", batch=BATCH, data=data, run=run, budget=3.0, costs=Table(),
        about=compiler.About(built_from="painted", rebuild="tessella compile painted"),
        measuring=compiler.Measuring(
            cache=tmp_path_factory.mktemp("times") / "times.jsonl", budget_s=0.0
        ),
    )  # fmt: skip


def miou(masks: list[np.ndarray], said: list[np.ndarray]) -> float:
    """Mean intersection over union of all pixels that have a class."""
    truth, told = (
        np.concatenate([m.ravel() for m in masks]),
        np.concatenate([s.ravel() for s in said]),
    )
    told, truth = told[truth != 255], truth[truth != 255]
    shares = [
        ((told == k) & (truth == k)).sum() / ((told == k) | (truth == k)).sum()
        for k in range(CLASSES)
    ]
    return float(np.mean(shares))


def test_plans_are_judged_by_miou_and_the_changed_pixels_are_listed(
    front: Front, data: Labelled, painted: Dataset
) -> None:
    data, _ = data.parted()  # others calibrate
    files = [io.BytesIO(painted.val[i].label["mask"]) for i in data.places]
    masks = [np.asarray(Image.open(file)) for file in files]
    exact = None
    for point in (front.exact, *front):
        predict = run(point.plan)
        parts = [predict(batch)["scores"].numpy() for batch in data.batches(BATCH.max)]
        said = list(np.concatenate(parts).argmax(1))
        receipt = point.receipt
        assert receipt.metric == "miou"
        assert receipt.after == pytest.approx(miou(masks, said), abs=1e-6)
        exact = said if exact is None else exact
        shares = np.array([(a != b).mean() for a, b in zip(exact, said, strict=True)])
        assert receipt.flipped == int((shares > 0.001).sum())
        for flip in receipt.flips:
            share = shares[data.places.index(flip.index)]
            assert flip.change.startswith(f"{100 * share:.2f} % of the pixels")
            assert flip.path == painted.val[flip.index].path
            assert flip.probability is None
        assert receipt.low <= receipt.loss <= receipt.high
    assert front.exact.receipt.after > 0.8
    assert any(point.receipt.flipped for point in front)
    assert front[front.chosen].receipt.loss <= 3.0
    table = str(front)
    assert "miou %" in table
    assert "points of miou on" in table
    assert "points of miou" in str(front[front.chosen].receipt)


def test_a_score_of_drawn_samples_counts_one_as_often_as_it_was_drawn(
    data: Labelled, painted: Dataset
) -> None:
    assert data.score is not None
    scores = torch.randn(len(data), CLASSES, SIDE, SIDE, generator=torch.manual_seed(0))
    rows = data.score.rows({"scores": scores}, data.places)
    drawn = [3, 3, 0, 7, 3]
    labels = data.labels[[data.places[i] for i in drawn]].numpy()
    said = [scores[i].argmax(0).numpy() for i in drawn]
    found = data.score.score(rows[drawn], [data.places[i] for i in drawn])
    assert found == pytest.approx(miou(list(labels), said), abs=1e-6)


def test_answers_for_which_there_is_no_memory_are_refused(
    painted: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fewest samples, each with a score for every class and pixel, four times over."""
    needed = 4 * len(painted.val) * CLASSES * SIDE * SIDE * 4
    task = TaskRecord(name="segmentation", score="miou")

    def judging_with(free: int) -> Labelled:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
        return labelled(painted.val, painted.preprocess, "image", painted.classes, task)

    assert len(judging_with(needed)) == len(painted.val)
    with pytest.raises(UsageError, match=r"do not fit in memory.*GiB"):
        judging_with(needed - 1)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = tmp_path_factory.mktemp("digits")
    train, val = write_scattered(root / "s", count=2, val=8, size=64, most=1, digits=(7,))
    return import_images(
        train, root / "d", ImportSettings(task="detection", size=64, val_folder=val, workers=1)
    )


def test_boxes_are_judged_by_map_and_told_one_by_one(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight pictures with a thing each, half are answered right: 51 of 101 recalls count."""
    monkeypatch.setattr(judging, "SECONDS", 0.0)
    monkeypatch.setattr(judging, "LEAST_RESAMPLES", 40)
    record = TaskRecord(name="detection", score="map", numbers={"threshold": (0.5,)})
    data = labelled(digits.val, digits.preprocess, "image", digits.classes, record)
    right = torch.zeros(8, 100, 5)
    for place in range(8):
        ((x0, y0, x1, y1),) = digits.val[place].label["boxes"]
        right[place, 0] = torch.tensor([x0 / 64, y0 / 64, x1 / 64, y1 / 64, 0.9])
    made = right.clone()
    made[:4, 0, 4] = 0  # vanished
    made[4, 0, :4] += 0.04  # moved
    made[5, 1] = torch.tensor([0.0, 0.0, 0.1, 0.1, 0.55])  # appeared
    made[6, 0, 4] = 0.8  # less sure
    made[7] = made[7].roll(40, 0)  # the same, at another place of the output
    judge = Judge(data=data, before={"boxes": right})
    receipt = judge.receipt({"boxes": made}, 1.0)
    assert (receipt.metric, receipt.before) == ("map", pytest.approx(1.0))
    assert receipt.flipped == 7
    changes = [flip.change for flip in receipt.flips]
    assert changes[:4] == ["7 0.90 vanished"] * 4
    assert changes[4].startswith("7 0.90 moved (overlap 0.")
    assert changes[5:] == ["7 0.55 appeared", "7 0.90 → 0.80"]
    made[4:] = right[4:]
    half = judge.receipt({"boxes": made}, 1.0)
    assert half.after == pytest.approx(51 / 101)
    assert half.loss == pytest.approx(100 * 50 / 101)
    assert half.low < half.loss < half.high
    assert data.score is not None
    assert (
        data.score.aligned({"boxes": right}, {"boxes": right.roll(9, 1)})["boxes"] == right
    ).all()


def test_other_tasks_say_what_changed() -> None:
    def change(
        task: str, one: list[float], other: list[float], **numbers: tuple[float, ...]
    ) -> str:
        record = named(task).record(numbers)
        pair = (np.array(values, np.float32) for values in (one, other))
        return named(task).answers.changes(*pair, ("cat", "dog", "cow"), record)

    assert change("classification", [0.1, 3, 0], [4, 3, 0]) == "dog → cat"
    assert change("multilabel", [2.0, -2.0, 2.0], [2.0, 2.0, -2.0]) == "+dog, −cow"
    std = (1.0, 1.0, 1.0)
    assert change("regression", [1, 2, 3], [1, 2.5, 3], std=std, mean=(0.0,) * 3) == "dog 2 → 2.5"


def test_a_classification_keeps_its_exact_intervals() -> None:
    assert named("classification").metrics.COUNTED
    assert not any(
        named(task).metrics.COUNTED for task in ("detection", "segmentation", "regression")
    )
