from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tessella.jobs import processes
from tessella.jobs.job import Job, JobSpec
from tessella.jobs.scheduler import Scheduler
from tessella.jobs.store import Store

PROGRAM = (sys.executable, str(Path(__file__).with_name("fake.py")))


def spec(*argv: str, **fields) -> JobSpec:
    return JobSpec(**{"name": argv[0], "kind": "train", "argv": argv, **fields})


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def drive(scheduler: Scheduler, *, until: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Step until it is so; a scheduler makes its decisions in ``step`` alone."""

    def stepped() -> bool:
        scheduler.step()
        return until()

    wait_for(stepped, timeout_s)


def finish(scheduler: Scheduler, job: Job) -> Job:
    drive(scheduler, until=lambda: scheduler.store.job(job.id).ended)
    return scheduler.store.job(job.id)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store whose jobs are gone, process and all, when the test is."""
    store = Store(tmp_path / "queue.db")
    yield store
    for job in store.jobs(status="running"):
        executor = processes.adopt(Path(job.folder))
        processes.kill_marked(Path(job.folder))
        if executor is not None and not executor.ended():
            os.kill(executor.pid, signal.SIGKILL)
    store.close()


@pytest.fixture
def make(store: Store, tmp_path: Path) -> Iterator[Callable[..., Scheduler]]:
    made: list[Scheduler] = []

    def make(gpus=(), cpu_slots=2, **settings) -> Scheduler:
        scheduler = Scheduler(store, tmp_path, gpus, cpu_slots, program=PROGRAM, **settings)
        made.append(scheduler)
        return scheduler

    yield make
    for scheduler in made:
        scheduler.stop()
        for executor in scheduler._executors.values():
            if executor.child is not None:  # Popen would warn of a child that still runs
                executor.child.kill()
                executor.child.wait()
            processes.kill_marked(executor.folder)
