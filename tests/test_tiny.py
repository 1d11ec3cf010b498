"""The small story: the whole way on the CPU in seconds, in the order in which data flows."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest

import tessella as ts
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Run
from tessella.core.errors import ArtifactError, CompileError
from tessella.server import Server
from tests.support.pictures.folders import write_stripes


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_stripes(folder / "stripes")
    return folder


@pytest.fixture(scope="module")
def dataset(workspace: Path) -> Dataset:
    return ts.data.images(
        workspace / "stripes", size=16, channels=1, holdout=0.25, out=workspace / "dataset"
    )


@pytest.fixture(scope="module")
def run(workspace: Path, dataset: Dataset) -> Run:
    return ts.train(
        "lenet", dataset, out=workspace / "run", epochs=6, batch_size=12,
        solver="nesterov", lr=0.02, policy="fixed", label_smoothing=0.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plan_path(workspace: Path, run: Run) -> Path:
    plan = ts.compile(run, batch=(1, 2, 4), target="cpu")
    return plan.save(workspace / "stripes.plan")


def test_a_folder_becomes_a_dataset(dataset: Dataset) -> None:
    assert dataset.classes == ("lying", "standing")
    assert (len(dataset.train), len(dataset.val)) == (36, 12)


def test_a_dataset_becomes_a_run(run: Run) -> None:
    losses = [m.values["loss"] for m in run.metrics() if "loss" in m.values]
    assert len(losses) == 6 * 3
    assert losses[-1] < losses[0] / 4
    assert run.best("val/accuracy").info.metrics["val/accuracy"] == 1.0


def test_a_run_becomes_a_plan_that_agrees(plan_path: Path, run: Run, dataset: Dataset) -> None:
    report = ts.verify(plan_path, against=run, data=dataset)
    assert report.agreement == 1.0
    assert report.max_abs_diff < 1e-4
    assert report.plan_score == report.checkpoint_score == 1.0


def test_another_checkpoint_is_not_compared(
    plan_path: Path, run: Run, dataset: Dataset, tmp_path: Path
) -> None:
    first = run.checkpoints()[0]
    assert first.weights_sha256 != run.best("val/accuracy").weights_sha256
    with pytest.raises(ArtifactError, match="made from another checkpoint"):
        ts.verify(plan_path, against=first, data=dataset)


def test_labels_and_preprocessing_travel_through_onnx(run: Run, tmp_path: Path) -> None:
    ts.export(run, tmp_path / "stripes.onnx")
    plan = ts.compile(tmp_path / "stripes.onnx", target="cpu")
    best = run.best("val/accuracy").info
    assert (plan.manifest.labels, plan.manifest.preprocess) == (best.labels, best.preprocess)
    model = onnx.load(tmp_path / "stripes.onnx")
    (said,) = model.metadata_props
    assert json.loads(said.value)["labels"] == ["lying", "standing"]
    said.value = '{"labels": [1], "preprocess": null}'
    onnx.save(model, tmp_path / "changed.onnx")
    with pytest.raises(CompileError, match="do not say how images become its input"):
        ts.compile(tmp_path / "changed.onnx", target="cpu")


def test_a_plan_runs_any_batch(plan_path: Path) -> None:
    engine = ts.load(plan_path)
    images = np.random.default_rng(1).normal(size=(7, 1, 16, 16)).astype(np.float32)
    together = engine(image=images)["scores"]
    alone = np.concatenate([engine(image=images[i : i + 1])["scores"] for i in range(7)])
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)


def test_a_served_plan_gives_the_same_answers(plan_path: Path, dataset: Dataset) -> None:
    engine = ts.load(plan_path)
    record = dataset.preprocess
    images = np.stack([record(example.content) for example in dataset.val])
    expected = engine(image=images)["scores"]
    with Server({"stripes": plan_path}, port=0) as server:
        body = {
            "inputs": [
                {
                    "name": "image",
                    "datatype": "FP32",
                    "shape": list(images.shape),
                    "data": images.ravel().tolist(),
                }
            ]
        }
        answer = httpx.post(f"{server.url}/v2/models/stripes/infer", json=body)
    assert answer.status_code == 200, answer.text
    scores = np.array(answer.json()["outputs"][0]["data"], np.float32).reshape(expected.shape)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
    assert (scores.argmax(1) == dataset.val.labels).all()
