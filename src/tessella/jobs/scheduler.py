"""The scheduler: starts waiting jobs, watches running ones, and can be killed at any time.

Order: by priority, then by submission. A job that asks for GPUs and cannot have them yet keeps
every free GPU for itself: no later job takes one, so a four-GPU job cannot starve behind small
ones. Jobs without GPUs take CPU slots and overtake freely. ``serve`` jobs run until they are
stopped, so they take no CPU slot. On a machine without GPUs, jobs that ask for some run on CPU
slots.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from tessella.core.errors import JobError
from tessella.jobs import outcome, processes
from tessella.jobs.job import Job
from tessella.jobs.processes import Executor
from tessella.jobs.store import Store
from tessella.telemetry.gpus import visible_gpus

MAX_ATTEMPTS = 3
RECORD_S = 5.0  # an executor's, to write how its killed command ended: over 0.3 on a busy machine

log = logging.getLogger(__name__)


class Scheduler:
    """Runs the jobs of a store, one subprocess each. There is one scheduler per store.

    Args:
        store: the queue.
        workspace: the folder that commands run in: relative paths in them start there.
        gpus: indices of the GPUs to lease; None: all that this process may see.
        cpu_slots: how many jobs without a GPU run at a time.
        program: what ``argv`` is appended to; this Python's ``tessella`` by default.
        grace_s: seconds from an abort's SIGTERM to its command's SIGKILL.
        interval_s: seconds from one look at the queue to the next.
    """

    def __init__(
        self,
        store: Store,
        workspace: str | Path,
        gpus: Sequence[int] | None = None,
        cpu_slots: int = 2,
        *,
        program: Sequence[str] = (sys.executable, "-P", "-m", "tessella"),
        grace_s: float = 5.0,
        interval_s: float = 0.2,
    ) -> None:
        self.store = store
        self.workspace = Path(workspace).absolute()
        self.gpus = visible_gpus() if gpus is None else tuple(gpus)
        self.cpu_slots = cpu_slots
        self.program = tuple(program)
        self.grace_s = grace_s
        self.interval_s = interval_s
        self._executors: dict[str, Executor] = {}
        self._deadlines: dict[str, float] = {}  # when an aborted job will be killed
        self._lock: TextIO | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Schedule in a thread until ``stop``; ``JobError`` if another scheduler has the store."""
        self._take_lock()
        self._stopping.clear()
        self._thread = threading.Thread(target=self.run_forever, name="scheduler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Schedule no more. Running jobs run on; the next scheduler of the store adopts them."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._free_lock()

    def run_forever(self) -> None:
        """Schedule until ``stop`` is called from another thread."""
        try:
            while not self._stopping.is_set():
                try:
                    self.step()
                except (JobError, OSError) as error:  # the disk is full or away: it may come back
                    log.error("the queue stands still: %s", error)
                self._stopping.wait(self.interval_s)
        finally:
            self._free_lock()

    def step(self) -> None:
        """Go through the queue once: settle ended jobs, end aborted ones, start waiting ones."""
        self._take_lock()
        for job in self.store.jobs(status="running"):
            self._watch(job)
        self.store.drop_dependents()
        self._start_ready()

    def _take_lock(self) -> None:
        """Lock the queue; the kernel frees the lock when this process dies, however it dies."""
        if self._lock is not None:
            return
        path = self.store.folder / "scheduler.lock"
        lock = path.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip()
            lock.close()
            raise JobError(
                "another scheduler already runs this queue",
                seen=f"process {holder}, {path}",
                fix="submit jobs to that one, or stop it",
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock
        self._tell_of_strangers()

    def _tell_of_strangers(self) -> None:
        """Jobs run on that the store does not know if it was restored from an older copy."""
        known = {job.id for trashed in (False, True) for job in self.store.jobs(trashed=trashed)}
        for executor in processes.executors_in(self.store.folder):
            if executor.folder.name not in known:
                log.warning(
                    "a job runs that this queue does not know, and may hold GPUs: process %d, %s; "
                    "was an older copy of the queue restored? kill %d ends it",
                    executor.pid, executor.folder, executor.pid,
                )  # fmt: skip

    def _free_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _watch(self, job: Job) -> None:
        executor = self._executors.get(job.id) or processes.adopt(Path(job.folder))
        if executor is None or executor.ended():
            self._settle(job)
            return
        if job.id not in self._executors:
            self._executors[job.id] = executor
            self.store.attach(job.id, executor.pid)
        if job.aborting:
            self._end(job, executor)

    def _end(self, job: Job, executor: Executor) -> None:
        """End an aborted job by stages: SIGTERM, then kill the command, then its executor."""
        now = time.monotonic()
        deadline = self._deadlines.get(job.id)
        if deadline is None:
            executor.send(signal.SIGTERM)
            self._deadlines[job.id] = now + self.grace_s
        elif now > deadline + RECORD_S:
            executor.send(signal.SIGKILL)
        elif now > deadline:
            processes.kill_marked(executor.folder)

    def _settle(self, job: Job) -> None:
        self._executors.pop(job.id, None)
        self._deadlines.pop(job.id, None)
        folder = Path(job.folder)
        # what a command leaves behind would hold a free GPU, or write beside a restart
        processes.kill_marked(folder)
        code = outcome.exit_code(folder)
        aborting = self.store.job(job.id).aborting  # read again: it may have changed
        if aborting:
            self.store.settle(job.id, "aborted", exit_code=code)
        elif code == 0:
            self.store.settle(job.id, "done", exit_code=0)
        elif code is not None:
            error = outcome.error_text(job, code)
            self.store.settle(job.id, "failed", exit_code=code, error=error)
        elif job.resumable and job.attempts < MAX_ATTEMPTS:
            self.store.settle(job.id, "waiting", error=outcome.KILLED)
        else:
            self.store.settle(job.id, "failed", error=outcome.KILLED)

    def _start_ready(self) -> None:
        held = self.store.leases()
        free = [gpu for gpu in self.gpus if gpu not in held]
        running = self.store.jobs(status="running")
        slots = self.cpu_slots - sum(not j.leased and j.kind != "serve" for j in running)
        reserved = False
        for job in self.store.ready():
            gpus: list[int] = []
            if job.gpus and self.gpus:
                if job.gpus > len(self.gpus):
                    self._refuse(job)
                    continue
                reserved = reserved or job.gpus > len(free)
                if reserved:
                    continue
                gpus, free = free[: job.gpus], free[job.gpus :]
            elif job.kind != "serve":
                if slots <= 0:
                    continue
                slots -= 1
            claimed = self.store.claim(job.id, gpus)
            if claimed is not None:
                self._launch(claimed)

    def _refuse(self, job: Job) -> None:
        error = f"it asks for {job.gpus} GPUs and this machine has {len(self.gpus)}: ask for fewer"
        self.store.settle(job.id, "failed", error=error)

    def _launch(self, job: Job) -> None:
        if job.attempts == 1 and not job.continues and self._ran_before(job):
            return
        resume = job.resume_argv if job.continues else ()
        command = [*self.program, *job.argv, *resume, "--events", str(job.events_path)]
        try:
            executor = processes.start(
                Path(job.folder), command, cwd=self.workspace, environment=self._environment(job)
            )
        except OSError as error:
            reason = f"its process could not be started: {error}"
            self.store.settle(job.id, "failed", error=reason)
            return
        self._executors[job.id] = executor
        self.store.attach(job.id, executor.pid)

    def _ran_before(self, job: Job) -> bool:
        """Take over a job that was started before, as a store that is older than the job knows not.

        Started again it would write into its own results, or beside itself.
        """
        executor = processes.adopt(Path(job.folder))
        if executor is None and outcome.exit_code(Path(job.folder)) is None:
            return False
        log.warning(
            "job %s was started before: was an older copy of the queue restored? It is not started "
            "again; resume or clone it to do so", job.id,
        )  # fmt: skip
        if executor is None:
            self._settle(job)
        else:
            self._executors[job.id] = executor
            self.store.attach(job.id, executor.pid)
        return True

    def _environment(self, job: Job) -> dict[str, str]:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if self.gpus:  # an empty list hides every GPU from a job that leased none
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order, which the indices mean
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in job.leased)
        return environment
