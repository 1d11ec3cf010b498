"""Checkpoints and runs: whole or absent, checked when read, and steps that count once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tessella.artifacts.checkpoint import Checkpoint, Network, Position, save_checkpoint
from tessella.artifacts.run import Augment, Recipe, Run, RunInfo, Solver, metrics_of, write_run
from tessella.core.errors import ArtifactError, CorruptArtifact, UsageError
from tessella.core.events import Event, EventLog, metric
from tessella.core.preprocess import Preprocess

NETWORK = Network(name="lenet", classes=2, channels=1, height=8, width=8, options={"wide": 1.5})
RECORD = Preprocess(height=8, width=8, channels=1)


def save(path: Path, step: int = 1, **metrics: float) -> Checkpoint:
    shared = torch.arange(12.0).reshape(3, 4)
    return save_checkpoint(
        path,
        network=NETWORK,
        preprocess=RECORD,
        labels=("a", "b"),
        weights={"w": shared, "wt": shared.t(), "row": shared[1], "half": shared.bfloat16()},
        metrics=metrics,
        position=Position(step=step, epoch=0.5),
        state_tensors={"momentum": torch.ones(3, requires_grad=True)},
        state_values=b'{"seed": 1}',
    )


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    save(tmp_path / "c", loss=0.25)
    back = Checkpoint(tmp_path / "c")
    weights = back.weights()
    expected = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(weights["w"], expected)
    assert torch.equal(weights["wt"], expected.t())
    assert torch.equal(weights["row"], expected[1])
    assert torch.equal(weights["half"], expected.bfloat16())
    tensors, values = back.training_state()
    assert torch.equal(tensors["momentum"], torch.ones(3))
    assert values == {"seed": 1}
    assert back.info.metrics == {"loss": 0.25}
    assert back.info.network == NETWORK


def test_a_diverged_run_can_be_saved(tmp_path: Path) -> None:
    kept = save(tmp_path / "c", loss=float("nan"), accuracy=0.1, top=float("inf"))
    assert kept.info.metrics == {"accuracy": 0.1}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "training_state/tensors.safetensors", "training_state/state.json"]
)
def test_changed_files_are_noticed(tmp_path: Path, name: str) -> None:
    checkpoint = save(tmp_path / "c")
    path = tmp_path / "c" / name
    content = path.read_bytes()
    read = checkpoint.weights if name == "model.safetensors" else checkpoint.training_state
    for changed in (content[:-1], content[:-1] + b"\x01", b""):
        path.write_bytes(changed)
        with pytest.raises(CorruptArtifact):
            read()
    path.unlink()
    with pytest.raises(CorruptArtifact, match="missing"):
        read()


def test_a_changed_preprocessing_record_is_noticed(tmp_path: Path) -> None:
    save(tmp_path / "c")
    path = tmp_path / "c" / "checkpoint.json"
    path.write_text(path.read_text().replace('"squash"', '"crop"'))
    with pytest.raises(CorruptArtifact, match="preprocessing record"):
        Checkpoint(tmp_path / "c")


def test_without_training_state_it_says_so(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(
        tmp_path / "c",
        network=NETWORK,
        preprocess=RECORD,
        labels=(),
        weights={},
        metrics={},
        position=Position(step=0, epoch=0.0),
    )
    with pytest.raises(CorruptArtifact, match="training_state"):
        checkpoint.training_state()


# --- runs ---------------------------------------------------------------------------------------


def make_run(path: Path) -> Run:
    recipe = Recipe(network="lenet", dataset="d", network_options={"wide": True})
    info = RunInfo(
        recipe=recipe,
        network=NETWORK,
        preprocess=RECORD,
        labels=("a", "b"),
        dataset_hash="h",
        created="now",
    )
    write_run(path, info)
    run = Run(path)
    assert run.info == info
    return run


def test_best_and_latest_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    with pytest.raises(ArtifactError, match="no checkpoint yet"):
        run.latest()
    for step, accuracy, loss in ((1, 0.5, 0.9), (2, 0.8, 0.7), (3, 0.8, 0.3), (4, 0.6, 0.5)):
        values = {"val/accuracy": accuracy, "val/loss": loss}
        save(tmp_path / "r" / "checkpoints" / f"step-{step:08d}", step, **values)
    (tmp_path / "r" / "checkpoints" / "step-00000009").mkdir()  # not complete: not there
    assert run.latest().info.position.step == 4
    assert run.best().info.position.step == 3
    assert run.best("val/loss").info.position.step == 3
    with pytest.raises(ArtifactError, match="val/accuracy, val/loss"):
        run.best("val/f1")


def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    make_run(tmp_path / "r")
    with pytest.raises(UsageError, match="already holds a run"):
        make_run(tmp_path / "r")


def test_a_resumed_runs_steps_count_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    log = EventLog(tmp_path / "r" / "events.jsonl")
    for step in (1, 2, 3):
        log(metric(step, step / 10, loss=float(step)))
    log(metric(2, 0.2, accuracy=0.5))
    log(Event(kind="phase", name="resume", step=2))
    log(metric(3, 0.3, loss=30.0))
    log.close()
    curve = [(m.step, m.values) for m in run.metrics()]
    assert curve == [(1, {"loss": 1.0}), (2, {"loss": 2.0, "accuracy": 0.5}), (3, {"loss": 30.0})]
    assert metrics_of([]) == []


def test_a_recipe_that_a_file_makes_impossible_is_an_artifact_error(tmp_path: Path) -> None:
    make_run(tmp_path / "r")
    path = tmp_path / "r" / "run.json"
    plain = json.loads(path.read_text())
    plain["recipe"]["batch_size"] = 0
    path.write_text(json.dumps(plain))
    with pytest.raises(CorruptArtifact, match="batch_size"):
        Run(tmp_path / "r")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Recipe(network="n", dataset="d", epochs=0),
        lambda: Recipe(network="n", dataset="d", batch_size=10, gpus=4),
        lambda: Recipe(network="n", dataset="d", gpus=0),
        lambda: Recipe(network="n", dataset="d", patience=0),
        lambda: Solver(lr=0),
        lambda: Solver(lr=float("nan")),
        lambda: Solver(momentum=1.0),
        lambda: Augment(rotation=181),
        lambda: Augment(scale=1.0),
        lambda: Augment(noise=-0.1),
    ],
)
def test_settings_that_cannot_work(make) -> None:
    with pytest.raises(UsageError):
        make()
