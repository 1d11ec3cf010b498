"""A training that is killed, at any moment, goes on as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tessella.api import training as api_training
from tessella.artifacts.run import Augment, Recipe, Run, Solver
from tessella.core.confined import Confined
from tessella.core.errors import UsageError
from tessella.core.events import Event
from tessella.core.policies import Policy
from tessella.data import filling, loading
from tessella.training.loop import train
from tessella.training.trainer import Trainer
from tests.support.training import curve, recipe

# Dropout draws random numbers, batch normalization keeps running statistics: both have to go on.
NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, channels, height, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(8 * 5 * 5, classes),
        )

    def forward(self, x):
        return self.layers(x)
"""


@pytest.fixture(scope="module")
def settings(dataset, tmp_path_factory) -> Recipe:
    """17 steps, with validations and checkpoints that fall on different ones."""
    source = tmp_path_factory.mktemp("network") / "net.py"
    source.write_text(NETWORK)
    return recipe(
        dataset,
        network=f"{source}:Net",
        epochs=4.25,
        val_interval=0.75,
        snapshot_interval=0.5,
        solver=Solver(name="adam", lr=0.01),
        policy=Policy(name="onecycle", warmup=0.3),
        label_smoothing=0.1,
        augment=Augment(flip=True, noise=0.05),
        class_weights="balanced",
    )


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory) -> Run:
    return train(settings, tmp_path_factory.mktemp("whole") / "run")


# --- in the process that is killed ----------------------------------------------------------------


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _train_until(settings: Recipe, out: Path, moment: str, step: int) -> None:
    torch.set_num_threads(1)
    rename, saved = os.replace, f"step-{step:08d}"

    def emit(event: Event) -> None:
        if moment == "step" and event.kind == "metric" and event.step == step:
            _die()

    def replace(source, target) -> None:
        if moment == "before the rename" and Path(target).name == saved:
            _die()
        rename(source, target)
        if moment == "after the rename" and Path(target).name == saved:
            _die()
        if moment == "while pruning" and Path(source).name == saved:
            _die()

    os.replace = replace
    train(settings, out, resume=True, emit=emit)


@pytest.fixture(scope="module")
def kill():
    """Run a training in a child, which forks from a server that has imported torch once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tessella.training.loop", "tests.training.test_resume"])

    def run(settings: Recipe, out: Path, moment: str, step: int) -> None:
        child = context.Process(target=_train_until, args=(settings, out, moment, step))
        child.start()
        child.join(200)
        assert child.exitcode == -signal.SIGKILL

    return run


# --- tests ----------------------------------------------------------------------------------------


def assert_same(resumed: Run, whole: Run) -> None:
    assert curve(resumed) == curve(whole)
    last, expected = resumed.latest(), whole.latest()
    assert last.info.position == expected.info.position
    weights = expected.weights()
    assert weights.keys() == last.weights().keys()
    assert all(torch.equal(v, weights[k]) for k, v in last.weights().items())
    assert not list((resumed.path / "checkpoints").glob(".*"))


def test_processes_that_decode_change_nothing_and_end_with_it(
    settings, whole, tmp_path, monkeypatch
):
    """Two of them for training and validation, as for a set that is too large to keep decoded."""
    monkeypatch.setattr(loading, "DECODE_ONCE_BYTES", 0)
    started = []
    monkeypatch.setattr(
        filling, "Confined", lambda *a, **k: started.append(Confined(*a, **k)) or started[-1]
    )
    assert_same(train(replace(settings, workers=2), tmp_path / "run"), whole)
    assert 1 <= len(started) <= 3
    assert not any(one.is_alive for one in started)


@pytest.mark.parametrize(
    "moments",
    [
        [("step", 1)],
        [("step", 5), ("step", 6), ("step", 14), ("step", 17)],
        [("before the rename", 2), ("before the rename", 8)],
        [("after the rename", 4), ("while pruning", 2), ("after the rename", 17)],
    ],
    ids=["before the first checkpoint", "between", "while saving", "after saving"],
)
def test_killed_and_resumed_is_the_same_training(settings, whole, kill, tmp_path, moments):
    out = tmp_path / "run"
    for moment, step in moments:
        kill(settings, out, moment, step)
    assert_same(train(settings, out, resume=True), whole)


def test_the_same_recipe_gives_the_same_run(settings, whole, tmp_path):
    assert curve(train(settings, tmp_path / "again")) == curve(whole)


def test_every_step_is_measured_once(whole):
    assert [step for step, *_ in curve(whole)] == list(range(1, 18))
    assert all({"loss", "lr"} <= values.keys() for *_, values in curve(whole))


def test_a_finished_run_stays_as_it_is(settings, whole):
    before = curve(whole)
    train(settings, whole.path, resume=True)
    assert curve(whole) == before


def test_a_run_may_get_more_epochs(settings, whole, tmp_path):
    """It goes on from its last step by the schedule of the longer run, as ``run.json`` has it, also
    where its dataset was moved."""
    before = shutil.copytree(settings.dataset, tmp_path / "before")
    begun = replace(settings, epochs=2.0, dataset=str(before))
    short = train(begun, tmp_path / "run")
    shutil.rmtree(before)
    done = short.latest().info.position.step
    told = []
    longer = train(settings, short.path, resume=True, emit=told.append)
    assert longer.recipe == Run(short.path).recipe == settings
    assert [step for step, *_ in curve(longer)] == [step for step, *_ in curve(whole)]
    assert next(e.text for e in told if e.name == "resume") == f"from step {done}"
    with pytest.raises(UsageError, match=r"epochs was 4.25, is 2.0"):
        train(Recipe(**{**vars(settings), "epochs": 2.0}), short.path, resume=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_heard_behind_the_step(settings, whole, tmp_path, number):
    """The step at hand is saved, and the training that goes on is the unbroken one."""
    before = signal.getsignal(number)

    def stop(event):
        if event.kind == "metric" and event.step == 7:
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt):
        train(settings, tmp_path / "run", emit=stop)
    assert Run(tmp_path / "run").latest().info.position.step == 7
    assert signal.getsignal(number) == before
    assert_same(train(settings, tmp_path / "run", resume=True), whole)


def test_where_nothing_was_saved_a_resume_says_so(settings, tmp_path):
    told = []
    train(Recipe(**{**vars(settings), "epochs": 0.3}), tmp_path / "run", resume=True,
          emit=told.append)  # fmt: skip
    assert next(e.text for e in told if e.name == "resume").startswith("from step 0: there is no")


def test_another_recipe_is_refused_with_what_differs(settings, whole):
    changed = Recipe(**{**vars(settings), "epochs": 9.0, "solver": Solver(name="sgd")})
    with pytest.raises(UsageError, match=r"epochs was 4.25, is 9.0; .*'adam'.*'sgd'"):
        train(changed, whole.path, resume=True)


def test_settings_left_out_stay_as_they_were(whole, dataset, monkeypatch):
    """A default that has changed since, or is another, must not refuse or change the run."""
    monkeypatch.setattr(api_training.loop, "train", lambda recipe, *_, **__: recipe)
    network = whole.recipe.network
    going_on = api_training.train(network, dataset, out=whole.path, resume=True, epochs=4.25)
    assert going_on == whole.recipe
    changed = api_training.train(network, dataset, out=whole.path, resume=True, lr=0.5)
    assert changed.solver == replace(whole.recipe.solver, lr=0.5)
    fresh = api_training.train(network, dataset, out=whole.path / "none", resume=True)
    assert fresh.policy.name == "onecycle"
    assert fresh.solver.name == "adamw"


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_failed_at_once_is_replaced(settings, tmp_path, monkeypatch, resume):
    def broken(*arguments, **named):
        raise ZeroDivisionError("a mistake in the network")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", broken)
        with pytest.raises(ZeroDivisionError):
            train(settings, tmp_path / "run")
    failed = [e for e in Run(tmp_path / "run").events() if e.kind == "error"]
    assert "a mistake in the network" in failed[0].text
    corrected = replace(settings, epochs=0.5)
    run = train(corrected, tmp_path / "run", resume=resume)
    assert run.recipe == corrected
    assert not [e for e in run.events() if e.kind == "error"]
    assert run.checkpoints()


def test_a_folder_with_a_run_is_refused_without_resume(settings, whole):
    with pytest.raises(UsageError, match="already holds a run"):
        train(settings, whole.path)
