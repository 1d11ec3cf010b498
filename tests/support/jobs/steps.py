"""Jobs, and a scheduler that is stepped until something has happened."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from tessella.jobs.job import Job, JobSpec
from tessella.jobs.scheduler import Scheduler

PROGRAM = (sys.executable, str(Path(__file__).with_name("fake.py")))


def spec(*argv: str, **fields) -> JobSpec:
    return JobSpec(**{"name": argv[0], "kind": "train", "argv": argv, **fields})


def wait_for(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def drive(scheduler: Scheduler, *, until: Callable[[], bool], timeout_s: float = 90.0) -> None:
    """Step until it is so; a scheduler makes its decisions in ``step`` alone."""

    def stepped() -> bool:
        scheduler.step()
        return until()

    wait_for(stepped, timeout_s)


def finish(scheduler: Scheduler, job: Job) -> Job:
    drive(scheduler, until=lambda: scheduler.store.job(job.id).ended)
    return scheduler.store.job(job.id)
