"""Attacks by the machine on import, compile and queue: kills at any moment, and full disks.

What was being written is whole or not there, what was told to be done is there, and the same work
done again comes to the same end. Full disks are small ``tmpfs``, which only root can mount; for
others they are left out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tessella import runtime
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.plan import load_plan
from tessella.core.errors import TessellaError
from tessella.core.spec import DimRange
from tessella.data.importing import ImportSettings, import_images
from tessella.graph import Graph
from tessella.jobs.job import JobSpec
from tessella.jobs.store import Store
from tests.support.networks import graph_of, plan
from tests.support.pictures.folders import write_folder_of
from tests.support.plans.subjects import IMAGE, Tiny

SIZES_KB = (4, 12, 24, 40, 64, 90, 130, 200, 300, 500)
ENOUGH_KB = 64 << 10
SETTINGS = ImportSettings(size=8, holdout=0.2, workers=1)
Work = Callable[[Path], None]  # in a folder


# --- the works ------------------------------------------------------------------------------------


@functools.cache
def _source() -> Path:
    """A folder of pictures; it goes with the process that made it."""
    folder = tempfile.TemporaryDirectory()
    _kept.append(folder)
    return write_folder_of(Path(folder.name), {"a": 45, "b": 45})


_kept: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def _network() -> tuple[torch.nn.Module, Graph]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Tiny().eval()
    return module, graph_of(module, IMAGE, DimRange(min=1, opt=2, max=2))


def _import(folder: Path) -> None:
    if not (folder / "made").exists():
        import_images(_source(), folder / "made", SETTINGS)


def _check_import(folder: Path) -> None:
    if (folder / "made").exists():
        made = Dataset(folder / "made")
        assert sum(len(made.split(name)) for name in made.info.splits) == 90
        assert made.info.content_hash == _right_hash()


@functools.cache
def _right_hash() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return import_images(_source(), Path(folder) / "made", SETTINGS).info.content_hash


def _compile(folder: Path) -> None:
    plan(_network()[1], cache=folder / "cache").save(folder / "made.plan")


def _check_compile(folder: Path) -> None:
    if (folder / "made.plan").exists():
        x = torch.ones(2, 1, 6, 6)
        with runtime.load(load_plan(folder / "made.plan")) as engine, torch.inference_mode():
            torch.testing.assert_close(engine(image=x)["scores"], _network()[0](x))


def _queue(folder: Path) -> None:
    """Jobs come and change; what was told to be done is noted outside of the queue."""
    store = Store(folder / "queue.db")
    for number in range(40):
        job = store.submit(JobSpec(name=f"{number}", kind="train", argv=("ok",), notes="n" * 2000))
        with _notes(folder).open("a") as notes:
            notes.write(f"{job.id}\n")
        store.edit(job.id, priority=number % 3)
        if number % 3 == 0:
            store.abort(job.id)
        if number % 6 == 0:
            store.delete(job.id)
    store.close()


def _notes(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.notes")


def _check_queue(folder: Path) -> None:
    if not (folder / "queue.db").exists():
        return
    store = Store(folder / "queue.db")
    known = {j.id: j for trashed in (False, True) for j in store.jobs(trashed=trashed)}
    told = _notes(folder).read_text().split() if _notes(folder).exists() else []
    assert set(told) <= set(known), f"{len(set(told) - set(known))} jobs are lost"
    assert all(Path(job.folder).is_dir() for job in known.values())
    store.close()


WORKS: dict[str, tuple[Work, Work]] = {
    "import": (_import, _check_import),
    "compile": (_compile, _check_compile),
    "queue": (_queue, _check_queue),
}


# --- the cases ------------------------------------------------------------------------------------


def prepare() -> None:
    _source()
    _network()
    _right_hash()
    for name in WORKS:
        _seconds(name)
    _can_mount()


@functools.cache
def _seconds(name: str) -> float:
    """How long a work takes when nothing stops it."""
    work, check = WORKS[name]
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder) / "inside"
        inside.mkdir()
        work(inside)  # what is done once
        shutil.rmtree(inside)
        _notes(inside).unlink(missing_ok=True)
        inside.mkdir()
        began = time.perf_counter()
        work(inside)
        took = time.perf_counter() - began
        check(inside)
    return took


@functools.cache
def _can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with _disk(Path(folder), 64):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def case(seed: int, index: int) -> tuple[str, Callable[[], str]]:
    """The stop of this number: of the same work, at the same moment or size."""
    rng = random.Random(f"{seed}/{index}")
    name = list(WORKS)[index % len(WORKS)]
    if index // len(WORKS) % 2:
        return f"{name}-on-a-full-disk", functools.partial(_full, name, rng)
    return f"{name}-killed", functools.partial(_killed, name, rng)


def _killed(name: str, rng: random.Random) -> str:
    work, check = WORKS[name]
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder) / "inside"
        inside.mkdir()
        ended = ""
        for _ in range(rng.choice((1, 1, 2, 4))):
            ended = _in_child(work, inside, rng.uniform(0, 1.1) * _seconds(name))
            if ended not in ("", "SIGKILL"):
                return f"raised {ended}"
            check(inside)
        work(inside)
        check(inside)
    return "same"


def _full(name: str, rng: random.Random) -> str:
    if not _can_mount():
        return "unrun"
    work, check = WORKS[name]
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder) / "inside"
        inside.mkdir()
        with _disk(inside, rng.choice(SIZES_KB)) as enlarged:
            told = _in_child(work, inside, None)
            if told and not told.startswith("refused"):
                return f"raised {told}"
            left = sorted(
                p.name for p in inside.iterdir() if p.name.endswith((".tmp", ".old", ".import"))
            )
            if left:
                return f"left {left}"
            enlarged()
            check(inside)
            work(inside)
            check(inside)
    return "refused" if told else "same"


@contextlib.contextmanager
def _disk(folder: Path, kilobytes: int) -> Iterator[Callable[[], None]]:
    """A small disk at a folder; what is yielded makes it large."""

    def mount(*options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
        subprocess.run(command, check=True, capture_output=True)

    mount(f"size={kilobytes}k")
    try:
        yield lambda: mount("remount", f"size={ENOUGH_KB}k")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def _in_child(work: Work, folder: Path, seconds: float | None) -> str:
    """Do a work in a child, to be killed after so long; empty where it came to its end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            work(folder)
        except TessellaError as error:
            os.write(write, f"refused: {error}"[:1000].encode())
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}"[:1000].encode())
        os._exit(0)
    os.close(write)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(read) as said:
        told = said.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return signal.Signals(-status).name if status < 0 else told
