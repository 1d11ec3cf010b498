"""What ``evaluate`` says of models whose answers are known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import metrics

import tessella as ts
from tessella import api
from tessella.api.evaluating import save_mistakes
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Run
from tessella.core.errors import UsageError
from tessella.core.events import Event
from tessella.core.preprocess import decode
from tessella.data.importing import ImportSettings, import_images
from tests.support.cli import in_process
from tests.support.training import write_dataset

SETTINGS = {"batch_size": 20, "seed": 7}


@pytest.fixture(scope="module")
def stripes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate") / "stripes"
    return write_dataset(folder, train=60, val=60, test=90)


@pytest.fixture(scope="module")
def better(stripes, tmp_path_factory) -> Run:
    return ts.train(
        "lenet", stripes, out=tmp_path_factory.mktemp("b") / "run", epochs=6, **SETTINGS
    )


@pytest.fixture(scope="module")
def worse(stripes, tmp_path_factory) -> Run:
    return ts.train(
        "lenet", stripes, out=tmp_path_factory.mktemp("w") / "run", epochs=1, **SETTINGS
    )


@pytest.fixture(scope="module")
def answers(stripes, worse):
    """Scores and truth of the test split, by hand."""
    predict, record, _ = api.predictor(api.open_checkpoint(worse))
    test = Dataset(stripes).test
    images = torch.from_numpy(np.stack([record(e.content) for e in test]))
    return predict(images).numpy(), test.labels


def test_measures_are_scikit_learns_and_lie_in_their_intervals(stripes, worse, answers):
    found = ts.evaluate(worse, stripes, resamples=200)
    scores, truth = answers
    said = scores.argmax(1)
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        truth, said, average="macro", zero_division=0
    )
    values = {name: m.value for name, m in found.measures.items()}
    assert values == pytest.approx(
        {
            "accuracy": metrics.accuracy_score(truth, said),
            "loss": torch.nn.functional.cross_entropy(
                torch.from_numpy(scores).double(), torch.from_numpy(truth.copy())
            ).item(),
            "macro_precision": precision,
            "macro_recall": recall,
            "macro_f1": f1,
        },
        rel=1e-6,
    )
    assert all(m.low < m.value < m.high for m in found.measures.values())
    assert found.value.high - found.value.low < 0.25
    assert (found.count, found.split, found.score) == (90, "test", "accuracy")
    assert found.calibration is not None
    assert found.calibration.temperature is not None
    assert [c.label for c in found.curves] == list(Dataset(stripes).classes)
    again = ts.evaluate(worse, stripes, resamples=200)
    assert again.to_json() == found.to_json()


def test_mistakes_come_by_their_loss_with_their_pictures(stripes, worse, answers, tmp_path):
    scores, truth = answers
    found = ts.evaluate(worse, stripes, resamples=1, errors=5)
    losses = torch.nn.functional.cross_entropy(
        torch.from_numpy(scores).double(), torch.from_numpy(truth.copy()), reduction="none"
    )
    order = losses.argsort(descending=True)[:5]
    assert [m.index for m in found.mistakes] == order.tolist()
    assert [m.loss for m in found.mistakes] == pytest.approx(losses[order].tolist(), rel=1e-5)
    dataset = Dataset(stripes)
    for mistake in found.mistakes:
        assert mistake.truth == dataset.classes[truth[mistake.index]]
        assert mistake.wrong == (mistake.said != mistake.truth)
    folder = save_mistakes(found, dataset, tmp_path / "wrong")
    files = sorted(folder.iterdir())
    assert len(files) == 5
    first = found.mistakes[0]
    assert files[0].name == f"001-{first.truth}-as-{first.said}.png"
    stored = decode(dataset.test[first.index].content, dataset.preprocess)
    assert np.array_equal(np.asarray(Image.open(files[0])), stored[:, :, 0])


def test_two_models_are_compared_image_by_image(stripes, better, worse):
    found = ts.evaluate(better, stripes, against=worse, resamples=300)
    beside = found.comparison
    assert beside is not None
    each = [ts.evaluate(run, stripes, resamples=1).value.value for run in (better, worse)]
    assert beside.difference.value == pytest.approx(each[0] - each[1])
    assert beside.other_value == pytest.approx(each[1])
    assert beside.only_this - beside.only_other == round(90 * beside.difference.value)
    assert beside.difference.low > 0
    assert beside.p_value < 0.01
    itself = ts.evaluate(better, stripes, against=better, resamples=10).comparison
    assert (itself.difference.low, itself.difference.high, itself.p_value) == (0, 0, 1)


def test_a_plan_is_measured_as_its_checkpoint_is(stripes, worse, tmp_path):
    ts.compile(worse, batch=(1, 8, 64), target="reference").save(tmp_path / "net.plan")
    found = ts.evaluate(tmp_path / "net.plan", stripes, against=worse, resamples=10)
    beside = found.comparison
    assert (beside.difference.value, beside.only_this, beside.only_other) == (0, 0, 0)
    mine = ts.evaluate(worse, stripes, resamples=10)
    assert found.measures["loss"].value == pytest.approx(mine.measures["loss"].value, rel=1e-4)
    assert [m.path for m in found.mistakes[:3]] == [m.path for m in mine.mistakes[:3]]


def test_nothing_but_evaluate_touches_the_test_split(stripes, worse, tmp_path):
    """Its shards are gone: training and calibrating do not miss them."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in stripes.iterdir():
        if not file.name.startswith("test"):
            (bare / file.name).write_bytes(file.read_bytes())
    run = ts.train("lenet", bare, out=tmp_path / "run", epochs=1, **SETTINGS)
    assert run.best().info.metrics == worse.best().info.metrics
    ts.calibrate(run.best(), bare)
    ts.evaluate(run, bare, split="val", resamples=1)
    with pytest.raises(Exception, match="test-00000"):
        ts.evaluate(run, bare)


def test_the_command_line_says_the_same(stripes, better, worse, tmp_path, monkeypatch, capsys):
    tessella = in_process(monkeypatch, capsys)
    given = ("evaluate", better.path, "--data", stripes, "--against", worse.path)
    told = tessella(*given, "--out", tmp_path / "all.json", "--pictures", tmp_path / "wrong")
    assert told.code == 0
    for words in ("on 90 images of test", "95% from", "McNemar", "calibration error", "largest"):
        assert words in told.out
    plain = tessella(*given, "--json").json
    assert plain == json.loads((tmp_path / "all.json").read_text())
    assert plain["measures"]["accuracy"].keys() == {"value", "low", "high"}
    assert len(list((tmp_path / "wrong").iterdir())) == 20
    alone = tessella("evaluate", better.path, "--against", worse.path, "--json").json
    assert alone == plain  # the run knows its dataset
    with monkeypatch.context() as inside:
        inside.chdir(better.latest().path)
        assert tessella("evaluate", ".", "--json").code == 0  # so does a checkpoint in it
    assert "no model here" in tessella("evaluate", tmp_path / "some.onnx").err
    (tmp_path / "some.onnx").touch()
    assert "--data FOLDER" in tessella("evaluate", tmp_path / "some.onnx").err
    lost = shutil.copytree(worse.path, tmp_path / "lost") / "run.json"
    lost.write_text(lost.read_text().replace(str(stripes), str(tmp_path / "gone")))
    told = tessella("evaluate", lost.parent)
    assert "is not where it was" in told.err
    assert "--data FOLDER" in told.err
    flattering = tessella("evaluate", worse.path, "--data", stripes, "--split", "val")
    assert "chosen by its val split" in flattering.err


def test_other_tasks_have_intervals_too(tmp_path):
    pictures, rng = tmp_path / "pictures", np.random.default_rng(0)
    pictures.mkdir()
    lines = ["path,level"]
    for number in range(60):
        level = int(rng.integers(0, 200))
        noise = rng.integers(0, 20, (12, 12))
        Image.fromarray((noise + level).astype(np.uint8)).save(pictures / f"{number}.png")
        lines.append(f"{number}.png,{level}")
    (pictures / "levels.csv").write_text("\n".join(lines))
    settings = ImportSettings(task="regression", size=12, channels=1, holdout=0.15, test=0.3)
    dataset = import_images(pictures / "levels.csv", tmp_path / "data", settings)
    run = ts.train("lenet", dataset, out=tmp_path / "run", epochs=4, batch_size=12)
    told: list[Event] = []
    ts.evaluate(run, dataset, split="val", resamples=10, emit=told.append)
    assert any("intervals of 9 images are too narrow" in event.text for event in told)
    told.clear()
    found = ts.evaluate(run, dataset, against=run, resamples=100, emit=told.append)
    assert not any("too narrow" in event.text for event in told)
    assert found.score == "r2"
    assert found.value.low < found.value.value < found.value.high
    assert found.comparison.difference.value == 0
    assert found.comparison.p_value is None
    assert found.mistakes[0].loss == max(m.loss for m in found.mistakes)


def test_what_cannot_be_measured_is_said(stripes, worse, tmp_path):
    with pytest.raises(UsageError, match=r"level is between 0 and 1"):
        ts.evaluate(worse, stripes, level=1.0)
    bare = write_dataset(tmp_path / "bare", train=20, val=6)
    with pytest.raises(UsageError, match=r"no split 'test'.*import again with a holdout"):
        ts.evaluate(worse, bare)
