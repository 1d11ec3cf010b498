from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tessella.jobs import processes
from tessella.jobs.scheduler import Scheduler
from tessella.jobs.store import Store
from tests.support.jobs.steps import PROGRAM


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
