"""The search for settings, mostly with trials that only pretend to train."""

from __future__ import annotations

import builtins
import json
import multiprocessing
import os
import shlex
import signal
import sys
import time

import optuna
import psutil
import pytest

from tessella.api.sweeping import sweep
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Run
from tessella.artifacts.settings import recipe_from
from tessella.artifacts.sweep import axis_of, folder_of, open_sweep
from tessella.cli.train import read_recipe
from tessella.core.errors import ArtifactError, DataError, UsageError
from tessella.training import sweep as sweeping
from tests.support.cli import context, in_process
from tests.support.training import write_dataset

# A trial whose score rises with lr, validated four times; batch 16 fails, 15 waits to be ended.
PRETENDED = """
import json, os, sys, threading, time
from pathlib import Path

def with_parent():
    os.read(0, 1)
    os._exit(1)

threading.Thread(target=with_parent, daemon=True).start()
out = Path(sys.argv[1])
recipe = json.loads((out / "recipe.json").read_text())
(out / "checkpoints").mkdir(exist_ok=True)
log = (out / "events.jsonl").open("a", buffering=1)
began = time.time()
with (out / "started").open("a") as started:
    started.write("x")
meeting = out.parent.parent / "meeting"  # of so many: the first ones wait for each other
while meeting.exists() and len(list(out.parent.glob("*/started"))) < int(meeting.read_text()):
    time.sleep(0.01)
if recipe["batch_size"] == 16:
    error = {"error": "OutOfMemory", "wrong": "too large", "seen": "16", "fix": "use 8"}
    (out / "error.json").write_text(json.dumps(error))
    sys.exit(5)
for step in range(1, 5):
    score = recipe["solver"]["lr"] * (1 - 0.5 ** step)
    event = {"kind": "metric", "step": step, "values": {"val/accuracy": score}}
    log.write(json.dumps(event) + "\\n")
    if recipe["batch_size"] == 15 and not (out / "again").exists():
        (out / "again").touch()
        time.sleep(300)
    if step < 4:
        time.sleep(0.05)
(out / "span").write_text(f"{began} {time.time()}")
"""


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    program = tmp_path / "pretended.py"
    program.write_text(PRETENDED)
    command = lambda out: [sys.executable, "-S", str(program), str(out)]  # noqa: E731
    monkeypatch.setattr(sweeping, "command_of", command)
    monkeypatch.setattr(sweeping, "visible_gpus", lambda: ())
    monkeypatch.setattr(sweeping, "_POLL_S", 0.01)
    return program


def running(program) -> list[psutil.Process]:
    """The trials that run."""
    processes = psutil.process_iter(["cmdline"])
    return [p for p in processes if str(program) in " ".join(p.info["cmdline"] or [])]


def test_finds_the_best_and_ends_those_that_fall_behind(dataset, tmp_path, pretended):
    told = []
    found = sweep(
        "lenet", dataset, vary={"lr": [0.9, 0.1, 0.2, 0.8, 0.05]}, out=tmp_path / "s",
        sampler="grid", emit=told.append,
    )  # fmt: skip
    assert {t.values["solver.lr"] for t in found.trials} == {0.9, 0.1, 0.2, 0.8, 0.05}
    assert found.best.values == {"solver.lr": 0.9}
    assert found.best.score == pytest.approx(0.9 * 15 / 16)
    by_state = {t.values["solver.lr"]: (t.state, t.validations) for t in found.trials}
    assert by_state[0.9] == ("complete", 4)
    assert by_state[0.1] == by_state[0.05] == ("pruned", 1)
    pruned = next(t for t in found.trials if t.state == "pruned")
    assert not (folder_of(tmp_path / "s", pruned.number) / "checkpoints").exists()
    assert json.loads((tmp_path / "s" / "best.json").read_text())["solver"]["lr"] == 0.9
    assert found.importance == {"solver.lr": pytest.approx(1.0)}
    assert open_sweep(tmp_path / "s")[1] == found  # what the studio reads, without Optuna
    assert sum(e.kind == "progress" for e in told) == 5
    assert told[-1].values == {"done": 5, "total": 5}


def test_the_list_of_trials_is_written_anew_before_it_grows_long(
    dataset, tmp_path, pretended, monkeypatch
):
    monkeypatch.setattr(sweeping, "_FEW", 1)
    monkeypatch.setattr(sweeping, "_LINES", 2)
    found = sweep("lenet", dataset, vary={"lr": [0.5, 0.6, 0.7]}, out=tmp_path / "s",
                  sampler="grid", pruner="none")  # fmt: skip
    lines = (tmp_path / "s" / "trials.jsonl").read_bytes().splitlines()
    assert len(lines) <= 3 * 3  # of 18: each trial is noted at its begin, end and validations
    assert open_sweep(tmp_path / "s")[1] == found


def test_a_trial_that_fails_is_told_and_the_search_goes_on(dataset, tmp_path, pretended):
    told = []
    found = sweep(
        "lenet", dataset, vary={"batch_size": [16, 8], "lr": [0.5]}, out=tmp_path / "s",
        sampler="grid", emit=told.append,
    )  # fmt: skip
    states = {t.values["batch_size"]: t.state for t in found.trials}
    assert states == {16: "failed", 8: "complete"}
    (note,) = (e.text for e in told if e.kind == "warning")
    assert note.startswith("trial 0 failed, batch_size 16, solver.lr 0.5: too large. Seen: 16")
    alone = sweep("lenet", dataset, vary={"batch_size": [16]}, out=tmp_path / "t", sampler="grid")
    with pytest.raises(ArtifactError, match=r"no trial .* is complete.*one failed: too large"):
        _ = alone.best


def test_a_trial_that_cannot_be_noted_is_ended(dataset, tmp_path, pretended, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sweeping, "note_trial", full)
    with pytest.raises(OSError, match="No space left") as held:  # with the frames that know it
        sweep("lenet", dataset, vary={"batch_size": [15]}, out=tmp_path / "s", sampler="grid")
    assert held.value
    assert not running(pretended)


def test_as_many_at_once_as_asked_for(dataset, tmp_path, pretended):
    (tmp_path / "meeting").write_text("3")
    sweep("lenet", dataset, vary={"lr": "1e-3..1 log"}, out=tmp_path / "s", trials=5, parallel=3,
          pruner="none")  # fmt: skip
    spans = [tuple(map(float, path.read_text().split()))
             for path in (tmp_path / "s").glob("trial-*/span")]  # fmt: skip
    at_once = [sum(a <= begin < b for a, b in spans) for begin, _ in spans]
    assert len(spans) == 5
    assert max(at_once) == 3


def kill(*arguments) -> None:
    """A sweep in a process of its own: forked, as it computes nothing and torch takes 4 s."""
    child = multiprocessing.get_context("fork").Process(
        target=_sweep_until_it_waits, args=arguments
    )
    child.start()
    child.join(200)
    assert child.exitcode == -signal.SIGKILL


def _sweep_until_it_waits(dataset, out, program) -> None:
    sweeping.command_of = lambda where: [sys.executable, "-S", str(program), str(where)]
    sweeping.visible_gpus = lambda: ()

    def sleep(seconds):
        time.sleep(seconds)
        if (out / "trial-0001" / "again").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    sweeping.time = type("Clock", (), {"sleep": sleep, "monotonic": time.monotonic})
    sweep("lenet", dataset, vary={"batch_size": [8, 15, 4]}, out=out, sampler="grid", pruner="none")


def test_a_sweep_that_was_killed_goes_on(dataset, tmp_path, pretended):
    """The trial at hand goes on too, under its number; its process ended with its parent."""
    out = tmp_path / "s"
    kill(dataset, out, pretended)
    _, alive = psutil.wait_procs(running(pretended), timeout=60)
    assert not alive
    settings = {"vary": {"batch_size": [8, 15, 4]}, "sampler": "grid", "pruner": "none"}
    with pytest.raises(UsageError, match="already holds a sweep"):
        sweep("lenet", dataset, out=out, **settings)
    with pytest.raises(UsageError, match=r"other settings.*other pruner"):
        sweep("lenet", dataset, out=out, resume=True, **{**settings, "pruner": "asha"})
    found = sweep("lenet", dataset, out=out, resume=True, **settings)
    ended = sorted((t.number, t.state, t.validations) for t in found.trials)
    assert ended == [(n, "complete", 4) for n in range(3)]
    starts = [(out / f"trial-{n:04d}" / "started").read_text() for n in range(3)]
    assert starts == ["x", "xx", "x"]


def test_an_interrupted_sweep_leaves_no_process_and_goes_on(dataset, tmp_path, pretended):
    settings = {"vary": {"lr": [0.1, 0.2, 0.3, 0.4]}, "sampler": "grid", "pruner": "none"}

    def interrupt(event):
        if event.name.startswith("trial"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep("lenet", dataset, out=tmp_path / "s", parallel=2, emit=interrupt, **settings)
    assert not running(pretended)
    found = sweep("lenet", dataset, out=tmp_path / "s", parallel=2, resume=True, **settings)
    assert sorted((t.number, t.state) for t in found.trials) == [(n, "complete") for n in range(4)]


def test_a_sweep_may_get_more_trials(dataset, tmp_path, pretended):
    settings = {"vary": {"lr": "1e-3..1 log"}, "out": tmp_path / "s", "sampler": "random"}
    first = sweep("lenet", dataset, trials=2, **settings)
    more = sweep("lenet", dataset, trials=4, resume=True, **settings)
    assert len(more.trials) == 4
    assert {t.values["solver.lr"] for t in first.trials} < {
        t.values["solver.lr"] for t in more.trials
    }
    opened = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 's' / 'sweep.db'}")
    assert len(optuna.load_study(study_name="sweep", storage=opened).trials) == 4
    opened.remove_session()
    opened.engine.dispose()


def test_the_defaults_are_tried_first(dataset, tmp_path, pretended):
    found = sweep("lenet", dataset, vary={"lr": "1e-5..1 log"}, out=tmp_path / "s", trials=1)
    assert found.trials[0].values["solver.lr"] == 0.001  # of batches of eight: it has few pictures


def test_trials_that_really_train(dataset, tmp_path):
    """What it finds is a recipe with which the network learns; the run is an ordinary one."""
    found = sweep(
        "lenet", dataset, vary={"lr": [0.003]}, out=tmp_path / "s", sampler="grid",
        pruner="none", epochs=3, batch_size=10, seed=7,
    )  # fmt: skip
    assert found.best.values["solver.lr"] == 0.003
    run = found.run()
    assert isinstance(run, Run)
    assert run.best().info.metrics["val/accuracy"] == found.best.score > 0.8
    assert run.recipe.seed == 7


def test_the_command_line_shows_the_table(dataset, tmp_path, pretended, monkeypatch, capsys):
    tessella = in_process(monkeypatch, capsys)
    given = ("sweep", "lenet", dataset, "--out", tmp_path / "s", "--vary", "lr=0.9,0.2,0.5,0.4",
             "--vary", "batch_size=8", "--sampler", "grid", "--pruner", "none")  # fmt: skip
    told = tessella(*given)
    assert told.code == 0
    for words in ("complete", "solver.lr", "importance: solver.lr 100%", "the best one again"):
        assert words in told.out
    for words in ("begins, ", "validation 1: val/accuracy ",
                  "val/accuracy 0.84"):  # fmt: skip
        assert f"trial 0: {words}" in told.err
    plain = tessella(*given, "--resume", "--json").json
    trained = context(shlex.split(plain["command"])[1:]).params
    assert trained["network"] == "lenet"
    recipe = recipe_from({"network": "lenet", "dataset": ".", **read_recipe(trained["recipe"])})
    assert (recipe.solver.lr, recipe.batch_size) == (0.9, 8)
    assert plain["best"]["values"] == {"solver.lr": 0.9, "batch_size": 8}
    assert len(plain["trials"]) == 4
    assert "an equals sign" in tessella(*given[:5], "--vary", "lr").err


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("lr", "1e-4..1e-1 log", ("solver.lr", 1e-4, 0.1, True, ())),
        ("augment.rotation", "0..20", ("augment.rotation", 0.0, 20.0, False, ())),
        ("batch_size", "8..64 log", ("batch_size", 8, 64, True, ())),
        ("solver", "sgd,adamw", ("solver.name", None, None, False, ("sgd", "adamw"))),
        ("augment.flip", "true,false", ("augment.flip", None, None, False, (True, False))),
        ("network_options.width", [8, 16], ("network_options.width", None, None, False, (8, 16))),
    ],
)  # fmt: skip
def test_axes_as_people_write_them(name, given, expected):
    axis = axis_of(name, given)
    assert (axis.path, axis.low, axis.high, axis.log, axis.choices) == expected


@pytest.mark.parametrize(
    ("name", "given", "wrong"),
    [
        ("learning_rate", "1..2", "use lr"),
        ("lr", "2..1", "from a number to a larger"),
        ("lr", "0..1 log", "from more than 0"),
        ("lr", "1..2 linear", "followed by log alone"),
        ("batch_size", "1.5..2", "whole numbers"),
        ("lr", 3, "a range or has choices"),
        ("dataset", "a,b", "cannot vary"),
        ("augment", "a", "a record of several settings"),
    ],
)  # fmt: skip
def test_axes_that_cannot_be(name, given, wrong):
    with pytest.raises(UsageError, match=wrong):
        axis_of(name, given)


def test_what_cannot_work_is_told_before_a_trial_starts(dataset, tmp_path):
    where = {"out": tmp_path / "s"}
    with pytest.raises(UsageError, match="rotation is 0 to 180"):
        sweep("lenet", dataset, vary={"augment.rotation": "0..200"}, **where)
    with pytest.raises(UsageError, match="one setting or more"):
        sweep("lenet", dataset, vary={}, **where)
    with pytest.raises(UsageError, match="a grid has choices"):
        sweep("lenet", dataset, vary={"lr": "1..2"}, sampler="grid", **where)
    with pytest.raises(UsageError, match=r"unknown sampler.*use tpe, random, grid"):
        sweep("lenet", dataset, vary={"lr": "1..2"}, sampler="best", **where)
    with pytest.raises(UsageError, match="a sweep has 1 to"):
        sweep("lenet", dataset, vary={"lr": "1..2"}, trials=0, **where)
    bare = write_dataset(tmp_path / "bare", train=20)
    with pytest.raises(DataError, match=r"no split for it.*holdout"):
        sweep("lenet", Dataset(bare), vary={"lr": "1..2"}, **where)
    assert not (tmp_path / "s").exists()


def test_without_optuna_it_is_said_what_to_install(dataset, tmp_path, monkeypatch):
    imported = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "optuna":
            raise ImportError("No module named 'optuna'")
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"needs Optuna.*pip install 'tessella\[sweep\]'"):
        sweep("lenet", dataset, vary={"lr": "1..2"}, out=tmp_path / "s")


def test_each_trial_has_its_gpus(monkeypatch):
    monkeypatch.setattr(sweeping, "visible_gpus", lambda: (2, 3, 5))
    seen = lambda *given: [s["CUDA_VISIBLE_DEVICES"] for s in sweeping.slots(*given)]  # noqa: E731
    assert seen(1, None) == ["2", "3", "5"]
    assert seen(2, None) == ["2,3"]
    assert seen(1, 4) == ["2", "3", "5", "2"]
    monkeypatch.setattr(sweeping, "visible_gpus", lambda: ())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert sweeping.slots(1, 4) == [{"OMP_NUM_THREADS": "2"}] * 4
    with pytest.raises(UsageError, match="at least one"):
        sweeping.slots(1, 0)
