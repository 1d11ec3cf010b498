"""Each task goes the whole way: a table of labels → dataset → run → plan → verified, and served."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest
from PIL import Image

from tessella import api
from tessella.artifacts.dataset import Dataset, Split
from tessella.artifacts.shards import SplitWriter
from tessella.core.errors import (
    CompileError,
    CorruptArtifact,
    DataError,
    TessellaError,
    UsageError,
)
from tessella.core.task import CLASSIFICATION
from tessella.data.importing import ImportSettings, import_images
from tessella.graph.onnx import read_metadata
from tessella.server import Server
from tessella.tasks import column_of, named
from tests.support.training import write_dataset

COUNT, SIZE = 120, 16


def squares(folder: Path) -> dict[str, list[list[str]]]:
    """Pictures with a red, a green or a blue square, or several; tables of what is on them.

    Returns:
        Rows of each task's table, the header first.
    """
    rng = np.random.default_rng(0)
    folder.mkdir()
    rows: dict[str, list[list[str]]] = {
        "multilabel": [["path", "labels"]],
        "regression": [["path", "x", "brightness"]],
    }
    names = ("red", "green", "blue")
    for number in range(COUNT):
        pixels = rng.integers(0, 40, (SIZE, SIZE, 3)).astype(np.uint8)
        shown = rng.random(3) < (0.6, 0.4, 0.3)
        for channel in np.flatnonzero(shown):
            top, left = rng.integers(0, SIZE - 5, 2)
            pixels[top : top + 5, left : left + 5, channel] = 255
        grey = int(rng.integers(0, 200))
        place = number % (SIZE - 4)
        rows["multilabel"].append(
            [f"{number}.png", "|".join(n for n, on in zip(names, shown, strict=True) if on)]
        )
        rows["regression"].append([f"numbers/{number}.png", str(100 + place), str(grey / 100)])
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / "numbers").mkdir(exist_ok=True)
        ramp = np.full((SIZE, SIZE, 3), grey, np.uint8)
        ramp[:, place : place + 4] = 255
        Image.fromarray(ramp).save(folder / "numbers" / f"{number}.png")
    return rows


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks") / "pictures"
    for name, rows in squares(folder).items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    return folder


SETTINGS = {
    "epochs": 20, "batch_size": 16, "solver": {"name": "adamw", "lr": 3e-3, "momentum": 0.9},
    "val_interval": 4, "snapshot_interval": 10,
}  # fmt: skip


@pytest.fixture(scope="module", params=["multilabel", "regression"])
def way(request, pictures):
    """The task, its dataset, its run and its plan."""
    task, here = request.param, pictures.parent
    settings = ImportSettings(task=task, size=SIZE, holdout=0.25)
    dataset = import_images(pictures / f"{task}.csv", here / f"{task}.data", settings)
    run = api.train("lenet", dataset, out=here / f"{task}.run", **SETTINGS)
    plan = api.compile(run, batch=(1, 4, 8))
    plan.save(here / f"{task}.plan")
    return task, dataset, run, here / f"{task}.plan"


GOOD = {"multilabel": 0.9, "regression": 0.8}


def test_the_record_travels(way):
    task, dataset, run, plan = way
    checkpoint, manifest = api.open_checkpoint(run), api.load_plan(plan).manifest
    for record in (dataset.info.task, run.info.task, checkpoint.info.task, manifest.task):
        assert record.name == task
    assert checkpoint.info.task == manifest.task
    assert checkpoint.info.metrics[run.info.task.metric] > GOOD[task]
    assert len(next(iter(manifest.task.numbers.values()))) == len(dataset.classes)


def test_plan_and_checkpoint_say_the_same(way):
    _, dataset, run, plan = way
    report = api.verify(plan, against=run, data=dataset)
    assert report.agreement == 1.0
    assert report.score == run.info.task.score
    assert report.plan_score == pytest.approx(report.checkpoint_score, abs=1e-6)
    best = api.open_checkpoint(run).info.metrics
    assert report.checkpoint_score == pytest.approx(best[f"val/{report.score}"], abs=1e-6)


def test_a_server_answers_as_python_does(way, pictures):
    task, dataset, _, plan = way
    files = [pictures / dataset.val[i].path for i in range(4)]
    expected = api.answer(api.load(plan), files)
    verb, other = ("classify", "predict") if task == "multilabel" else ("predict", "classify")
    with Server({"net": plan}) as server, httpx.Client(base_url=server.url) as client:
        for file, answer in zip(files, expected, strict=True):
            reply = client.post(f"/v2/models/net/{verb}", content=file.read_bytes())
            assert reply.json()["predictions"] == [answer]
        wrong = client.post(f"/v2/models/net/{other}", content=files[0].read_bytes())
        facts = client.get("/v2/models/net/config").json()["parameters"]
        every = client.post(f"/v2/models/net/{verb}?threshold=0", content=files[0].read_bytes())
        refused = client.post(f"/v2/models/net/{verb}?threshold=7", content=files[0].read_bytes())
    assert (wrong.status_code, refused.status_code) == (404, 400)
    assert verb in wrong.json()["error"]
    assert facts["task"] == {"string_value": task}
    assert facts["verb"] == {"string_value": verb}
    names = [a.get("label", a.get("name")) for a in every.json()["predictions"][0]]
    assert sorted(names) == sorted(dataset.classes)


def test_the_command_line_says_it(way, pictures, tessella):
    task, dataset, run, plan = way
    shown = tessella("run", plan, pictures / dataset.val[0].path).out
    assert all(name in shown for name in answers_of(task).HEADER)
    measured = tessella("run", plan, "--data", dataset.path, "--json").json
    assert measured["task"] == task
    assert measured[run.info.task.score] > GOOD[task]
    assert f"{task}, {len(dataset.classes)}" in tessella("show", dataset.path).out


def answers_of(task):
    return named(task).answers


def test_an_onnx_file_keeps_the_task(way, pictures, tmp_path):
    task, dataset, run, plan = way
    api.export(run, tmp_path / "net.onnx")
    compiled = api.compile(tmp_path / "net.onnx", batch=(1, 2, 4))
    assert compiled.manifest.task == api.load_plan(plan).manifest.task
    compiled.save(tmp_path / "net.plan")
    files = [pictures / dataset.val[i].path for i in range(3)]
    answers = [api.answer(api.load(p), files) for p in (tmp_path / "net.plan", plan)]
    for one, other in zip(*answers, strict=True):
        number = "value" if task == "regression" else "probability"
        assert [a[number] for a in one] == pytest.approx([a[number] for a in other], abs=1e-4)
    with pytest.raises(CompileError, match=r"one for each label"):
        _rewrite_metadata(tmp_path / "net.onnx", "numbers")


def _rewrite_metadata(path: Path, field: str) -> None:
    """Read the file after its task's numbers have lost one."""
    model = onnx.load(path)
    (entry,) = model.metadata_props
    plain = json.loads(entry.value)
    name, values = plain["task"][field].popitem()
    plain["task"][field][name] = values[1:]
    entry.value = json.dumps(plain)
    onnx.save(model, path)
    read_metadata(path)


def test_a_checkpoint_of_a_stranger_is_refused_where_its_numbers_are_not_the_labels(way, tmp_path):
    task, _, run, _ = way
    folder = shutil.copytree(api.open_checkpoint(run).path, tmp_path / "strange")
    good = json.loads((folder / "checkpoint.json").read_text())

    def opened(**changes) -> None:
        plain = {**good, "task": {**good["task"], **changes}}
        (folder / "checkpoint.json").write_text(json.dumps(plain))
        api.compile(folder, batch=1)

    name = next(iter(good["task"]["numbers"]))
    for numbers in ({name: [1.0]}, {name: []}, {"a": [1e999] * 3}):
        with pytest.raises(TessellaError, match=r"numbers of a task|Infinity"):
            opened(numbers=numbers)
    with pytest.raises(CorruptArtifact, match="are names"):
        opened(name="../regression")
    with pytest.raises(UsageError, match=r"no such task.*stitching"):
        opened(name="stitching")
    if task == "regression":
        with pytest.raises(CorruptArtifact, match="no mean for each number"):
            opened(numbers={})


def test_another_tasks_dataset_is_refused(way, pictures, tmp_path):
    task, dataset, run, plan = way
    other = "regression" if task == "multilabel" else "multilabel"
    table = pictures / f"{other}.csv"
    data = import_images(table, tmp_path / "data", ImportSettings(task=other, size=SIZE))
    with pytest.raises(DataError, match=f"another task.*{other}.*{task}"):
        api.verify(plan, against=run, data=data)
    with pytest.raises(DataError, match=f"another task.*{other}.*{task}"):
        api.compile(run, budget=0.5, data=data)
    if task == "regression":
        with pytest.raises(UsageError, match="no classes to balance"):
            api.train("lenet", dataset, out=tmp_path / "run", class_weights="balanced")


def test_nothing_is_verified_on_an_empty_split(way, tmp_path):
    task, dataset, run, plan = way
    nothing = SplitWriter(tmp_path, "val", column_of(named(task), dataset.classes)).close()
    empty = Split(tmp_path, "val", nothing, deep=True, task=dataset.info.task)
    with pytest.raises(DataError, match="val split is empty"):
        api.verify(plan, against=run, data=empty)


def test_resumed_as_if_unbroken(way, tmp_path):
    _, dataset, _, _ = way
    short = {**SETTINGS, "epochs": 2, "val_interval": 1, "snapshot_interval": 1}
    whole = api.train("lenet", dataset, out=tmp_path / "whole", **short)
    cut = api.train("lenet", dataset, out=tmp_path / "cut", **short)
    shutil.rmtree(cut.latest().path)
    again = api.train("lenet", dataset, out=tmp_path / "cut", resume=True, **short)
    assert [m.values.get("loss") for m in again.metrics()] == [
        m.values.get("loss") for m in whole.metrics()
    ]
    assert again.latest().info.task == whole.latest().info.task


def test_a_dataset_of_another_version_is_a_classification(tmp_path):
    folder = write_dataset(tmp_path / "data", train=6, val=3)
    plain = json.loads((folder / "dataset.json").read_text())
    assert plain.pop("task")["name"] == "classification"
    (folder / "dataset.json").write_text(json.dumps(plain))
    assert Dataset(folder).info.task == CLASSIFICATION
    assert Dataset(folder).train.labels.shape == (6,)
