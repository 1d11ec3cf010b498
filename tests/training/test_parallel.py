"""Two processes over gloo, on two machines or one. Each start imports torch three times."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import torch

from tessella import api
from tessella.artifacts.run import Recipe, Run
from tessella.core.errors import OutOfMemory, TrainError, UsageError
from tessella.core.events import read_events
from tessella.core.record import to_plain
from tessella.training import loop, parallel, sharing, worker
from tessella.training.loop import train
from tessella.training.machines import Place
from tessella.training.prepare import begin
from tests.support.training import curve, free_port, losses, recipe

SETTINGS = {
    "epochs": 20.0,
    "class_weights": "balanced",
    "val_interval": 5.0,
    "ema": 0.9,
    "accumulate": 5,
    "probe_epochs": 1.0,  # then other parameters learn, whose gradients are to be averaged, too
}


TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def command():
    """Start a machine of two as a person does; none is left behind."""
    begun: list[subprocess.Popen] = []

    def start(
        settings: Recipe, out: Path, rank: int, port: int, *, resume: bool = False
    ) -> subprocess.Popen:
        said = ["--nodes", "2", "--resume"]
        if not resume:
            said = ["--recipe", json.dumps(to_plain(settings))]
        argv = ["train", settings.network, settings.dataset, "--out", str(out), *said]
        argv += ["--node-rank", str(rank), "--rendezvous", f"127.0.0.1:{port}"]
        program = [sys.executable, "-m", "tessella", *argv]
        begun.append(subprocess.Popen(program, stderr=subprocess.PIPE, text=True))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.wait()
        process.stderr.close()


def test_two_machines_give_the_curve_of_one_even_when_killed_and_stopped(
    dataset, tmp_path, monkeypatch, command
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out, unseen = tmp_path / "two", tmp_path / "unseen"
    start = str(train(recipe(dataset, epochs=1.0), tmp_path / "start").latest().path)
    settings = recipe(dataset, nodes=2, init=start, **SETTINGS)

    # the second machine dies: nothing of it is left, and the first ends by itself and says why
    port = free_port()
    first, second = (command(settings, out, rank, port) for rank in range(2))
    families: dict[int, set[psutil.Process]] = {first.pid: set(), second.pid: set()}
    while not any(e.kind == "metric" for e in read_events(out / "events.jsonl")[0]):
        for pid, family in families.items():
            family.update(psutil.Process(pid).children(recursive=True))
        assert first.poll() is None, first.stderr.read()
        assert second.poll() is None, second.stderr.read()
        time.sleep(0.02)
    second.kill()
    error = first.communicate()[1]
    assert first.returncode == TrainError.exit_code, error
    assert "machine 1 has ended, or cannot be reached" in error
    assert all(len(family) >= 2 for family in families.values())  # torchrun and a worker
    _, alive = psutil.wait_procs(set.union(*families.values()), timeout=60)
    assert not alive
    second.communicate()
    assert 0 < len(losses(Run(out))) < 80

    # the second machine has no folder of the run: it is sent the settings and the checkpoint
    asked = []

    def stop(event):
        if event.kind == "metric" and event.step >= 30 and not asked:
            asked.append(event)  # a second signal would end it at once
            signal.raise_signal(signal.SIGINT)

    place = Place(nodes=2, rank=0, host="127.0.0.1", port=free_port())
    second = command(settings, unseen, 1, place.port, resume=True)
    with pytest.raises(KeyboardInterrupt):
        train(settings, out, resume=True, place=place, emit=stop)
    assert "stopped" in second.communicate()[1]
    assert second.returncode == 130
    assert not unseen.exists()
    assert 30 <= Run(out).latest().info.position.step == len(losses(Run(out))) < 80

    # the same processes on one machine
    told, settings = [], recipe(dataset, gpus=2, init=start, **SETTINGS)
    two = train(settings, out, resume=True, emit=told.append)
    assert told[0].text.startswith("gpus=2 with all GPUs hidden") != torch.cuda.is_available()
    assert (next(e.name for e in told if e.kind == "phase"), told[-1].kind) == ("resume", "result")
    assert [e.to_json() for e in told] == [e.to_json() for e in two.events()[-len(told) :]]
    began = next(e.text for e in told if e.name == "start")
    assert re.match(r"the first step ended [\d.]+ s after 2 processes were started", began)
    exchanged = next(e.text for e in told if e.name == "exchange")
    assert exchanged.startswith("2 processes exchange ")  # the head's alone, or of all layers
    one = train(recipe(dataset, init=start, **SETTINGS), tmp_path / "one")
    assert losses(two) == pytest.approx(losses(one), rel=1e-5, abs=1e-6)
    for (step, _, ours), (_, _, theirs) in zip(curve(two), curve(one), strict=True):
        assert ours.keys() == theirs.keys(), step
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), step


def test_processes_that_torchrun_starts_give_the_curve_of_one(dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = ["--epochs", "2", "--batch-size", "12", "--seed", "5", "--json"]
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    verb = ["-m", "tessella", "train", "lenet", str(dataset), "--out", str(tmp_path / "two")]
    ended = subprocess.run(
        [*program, *verb, *settings], capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["run"] == str(tmp_path / "two")  # once, of two processes
    two = Run(tmp_path / "two")
    assert (two.recipe.gpus, two.recipe.nodes) == (2, 1)
    one = api.train("lenet", dataset, out=tmp_path / "one", epochs=2, batch_size=12, seed=5)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5, abs=1e-6)


def test_too_few_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    parallel.check_devices(2)
    with pytest.raises(UsageError, match=r"too few GPUs.*gpus=4, 2 here.*use gpus=2"):
        parallel.check_devices(4)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"start torchrun with --nproc-per-node 2, or"):
        parallel.check_devices(4)


def test_processes_share_a_cpu_where_gpus_are_hidden_on_purpose(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    parallel.check_devices(2)  # the fixture of this folder hides them
    for visible in ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in visible.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UsageError, match=r"gpus=2, 0 here.*set CUDA_VISIBLE_DEVICES= "):
            parallel.check_devices(2)
        parallel.check_devices(1)


# --- a worker, in this process --------------------------------------------------------------------


@pytest.fixture
def work(monkeypatch):
    """Run ``worker.main`` as torchrun would start it for a world of one."""
    port = free_port()
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
    for name, value in {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(worker, "end_with_parent", lambda heard: None)

    def run(out) -> int:
        monkeypatch.setattr(sys, "argv", ["worker", str(out)])
        return worker.main()

    return run


def test_a_worker_trains_the_run_that_was_begun(dataset, tmp_path, work):
    run, _ = begin(recipe(dataset), tmp_path / "run", resume=False)
    assert work(run.path) == 0
    assert curve(run) == curve(train(recipe(dataset), tmp_path / "alone"))


@pytest.mark.parametrize(
    ("raised", "expected", "code"),
    [
        (OutOfMemory("too large", seen="8 GiB", fix="use --batch-size 2"), OutOfMemory, 5),
        (ZeroDivisionError("float division"), TrainError, 1),
    ],
)
def test_a_workers_error_reaches_the_parent(
    dataset, tmp_path, work, monkeypatch, raised, expected, code
):
    def fail(*args, **kwargs):
        raise raised

    run, _ = begin(recipe(dataset), tmp_path / "run", resume=False)
    monkeypatch.setattr(worker, "train_run", fail)
    assert work(run.path) == code
    error = parallel.failure_of(run.path, 1)
    assert type(error) is expected
    assert str(raised).removesuffix(".") in str(error)
    # what fails because of it does not hide it
    before = json.loads((run.path / "error.json").read_text())
    worker._report(run.path, TrainError("connection closed by peer"))
    assert json.loads((run.path / "error.json").read_text()) == before


def test_a_worker_that_ends_without_a_word(tmp_path):
    (tmp_path / "workers.log").write_text("line\n" * 100 + "the last words\n")
    error = parallel.failure_of(tmp_path, -9)
    assert "exit code -9" in str(error)
    assert "the last words" in str(error)
    assert str(error).count("line") < 30


@pytest.mark.parametrize("failed", [True, False])
def test_what_processes_said_stays_behind_an_error_that_names_it(failed, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with (
        pytest.raises(TrainError) if failed else nullcontext(),
        loop._folder_for_now() as folder,
    ):
        (folder / "checkpoints").mkdir()
        for name in ("workers.log", "run.json", "checkpoints/weights"):
            (folder / name).write_text(name)
        if failed:
            raise TrainError("a process ended", seen="-9", fix=f"read {folder / 'workers.log'}")
    assert [path.name for path in tmp_path.rglob("*")] == [folder.name, "workers.log"] * failed


def test_a_machine_reads_its_own_folder_only_where_it_holds_the_same_run(tmp_path):
    """Another run of the same settings has files of the same names and sizes."""
    for host, content in (("common", b"abc"), ("stale", b"abd")):
        (tmp_path / host / "checkpoints").mkdir(parents=True)
        (tmp_path / host / "checkpoints" / "weights").write_bytes(content)
    (tmp_path / "empty").mkdir()
    wanted = {"checkpoints/weights": (3, hashlib.sha256(b"abc").hexdigest())}
    seen = [sharing._sees(tmp_path / h, wanted) for h in ("common", "stale", "empty")]
    assert seen == [True, False, False]


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error", True),
        ("Connection closed by peer [127.0.0.1]:4242", True),
        ("[enforce fail at /pytorch/third_party/gloo/gloo/barrier.cc:5] false", True),
        ("NCCL communicator was aborted on rank 1", True),
        ("Error(s) in loading state_dict for igloos: size mismatch", False),
        ("[enforce fail at alloc_cpu.cpp:127] can't allocate memory: 8 bytes", False),
        ("no such layer: NCCLike", False),
    ],
)
def test_a_lost_process_is_known_by_what_gloo_and_nccl_say(said, lost):
    assert parallel.is_lost(RuntimeError(said)) is lost
    assert not parallel.is_lost(ValueError(said))
