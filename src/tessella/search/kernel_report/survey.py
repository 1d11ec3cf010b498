"""All kernels of the catalog on all devices of this machine, within a time: a ``KernelReport``.

Kernels of ours come first, each on one problem that it takes before any on a second; then those
of the libraries, torch's own, and further configurations of ours.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tessella.core.architectures import is_gpu
from tessella.core.events import Emit, progress, silent
from tessella.core.record import from_plain, to_plain
from tessella.core.version import VERSION
from tessella.kernels import catalog
from tessella.kernels.catalog import Kernel
from tessella.operations.table import operation
from tessella.search.kernel_report.chip import host_memory_bytes
from tessella.search.kernel_report.privacy import Privacy
from tessella.search.kernel_report.problems import problems_of
from tessella.search.kernel_report.process import Ended, Process
from tessella.search.kernel_report.record import (
    Chip,
    DeviceReport,
    KernelReport,
    Outcome,
    Row,
)
from tessella.search.kernel_report.record import Ended as HowEnded
from tessella.telemetry.gpus import driver_version

LIMIT_S = {"cpu": 20.0, "cuda": 60.0}  # of one order; on a GPU most of it is compiling
FAIR_S = 10.0  # who was given less because the time is over is left out, not timed out
LEAST_S = 1.0  # that are left, to begin another one
CONFIGS = 4  # of a kernel of ours on a problem
STRIKES = 2  # crashes or hangs, after which a kernel's other problems are left out
STARTS = 3  # of a process in a row that do not greet, or end before their first answer
LIBRARIES = ("torch", "triton", "numpy")
_RANK = {"tessella": 0, "user": 0, "aten": 2}  # of sources; the libraries are between
_FURTHER = 3  # the rank of configurations after the first


@dataclass(frozen=True)
class _Case:
    """A kernel on a problem, in one of its configurations; lower ranks come first."""

    kernel: str
    problem: str
    place: int
    rank: int
    order: int  # among the problems

    def __str__(self) -> str:
        further = f", configuration {self.place + 1}" if self.place else ""
        return f"{self.kernel} on {self.problem}{further}"


class _Device:
    """The part of a report that one device has."""

    def __init__(self, name: str, privacy: Privacy, modules: Sequence[str]) -> None:
        self._name, self._privacy, self._modules = name, privacy, modules
        self._limit_s = LIMIT_S[name.partition(":")[0]]
        self._process: Process | None = None
        self._target: str | None = None
        self._chip: Chip | None = None
        self._trouble: str | None = None
        self._rows: list[Row] = []
        self._waiting: list[_Case] = []
        self._not_run: dict[str, list[str]] = {}
        self._ran: Counter[str] = Counter()  # by kernel: problems that it took
        self._strikes: Counter[str] = Counter()
        self._failed_starts = 0
        self._began, self._seconds = time.monotonic(), 0.0

    def run(self, until: float, emit: Emit, changed: Callable[[], None]) -> None:
        """Try kernels until all are tried, or ``until`` of ``time.monotonic``."""
        self._began = time.monotonic()
        try:
            self._run(until, emit, changed)
        finally:
            self._seconds = round(time.monotonic() - self._began, 1)
            if self._process is not None:
                self._process.end()

    def _run(self, until: float, emit: Emit, changed: Callable[[], None]) -> None:
        while not self.is_done:
            left_s = until - time.monotonic()
            if left_s < LEAST_S:
                return
            if self._process is None or not self._process.is_alive:
                self._start()
                continue
            case = min(self._waiting, key=lambda c: (c.rank, self._ran[c.kernel], c.order))
            limit_s = min(self._limit_s, left_s)
            answer = self._process.ask(case.kernel, case.problem, case.place, limit_s)
            is_late = isinstance(answer, Ended) and not answer.in_time
            if is_late and limit_s < FAIR_S:
                return
            self._waiting.remove(case)
            self._take(case, answer)
            done = len(self._rows)
            emit(progress(f"kernels on {self._name}", done, done + len(self._waiting)))
            changed()

    def _start(self) -> None:
        """Start a process, and learn from the first what the device is."""
        self._process = Process(self._name, self._modules)
        greeting = self._process.greeting()
        if isinstance(greeting, Ended):
            self._failed_starts += 1
            if not greeting.in_time or self._failed_starts >= STARTS:
                self._trouble = self._privacy.text(f"no process starts: {greeting.why}")
            return
        if greeting["target"] is None:
            self._trouble = "this GPU is older than all targets"
        elif self._chip is None:
            self._meet(greeting)

    def _meet(self, greeting: dict[str, Any]) -> None:
        name = self._privacy.name
        chip = from_plain(Chip, greeting["chip"], where="a chip")
        versions = {library: name(version) for library, version in chip.versions.items()}
        self._chip = replace(chip, name=name(chip.name), versions=versions)
        self._target = target = greeting["target"]
        problems = list(problems_of(target).items())
        kind = "gpu" if is_gpu(target) else "cpu"
        for row in catalog.rows():
            if kind not in row.targets and target not in row.targets:
                continue  # it is for other devices
            mine = [(i, name) for i, (name, p) in enumerate(problems) if p.op == row.op]
            if why := _unasked(row, target, greeting["codes"], bool(mine)):
                self._not_run.setdefault(why, []).append(row.id)
                continue
            rank = _RANK.get(row.source, 1)
            self._waiting += [_Case(row.id, name, 0, rank, i) for i, name in mine]

    def _take(self, case: _Case, answer: dict[str, Any] | Ended) -> None:
        """Note what became of a case."""
        if isinstance(answer, Ended):
            self._struck(case, "crashed" if answer.in_time else "timed out", answer.why)
            if answer.is_stuck:
                self._trouble = "a process does not end; restart the machine to go on"
            return
        self._failed_starts = 0
        if "gone" in answer:
            assert self._process is not None
            self._process.end()
            self._struck(case, "crashed", answer["gone"])
        elif "missing" in answer:
            self._drop(case.kernel, self._privacy.text(answer["missing"]))
        else:
            row = from_plain(Row, answer["row"], where="a row")
            self._rows.append(self._cleaned(row))
            if row.outcome != "refused":
                self._ran[row.kernel] += 1
            if case.rank == 0 and case.place == 0 and row.outcome == "right":
                places = range(1, min(CONFIGS, answer["configs"]))
                self._waiting += [replace(case, place=i, rank=_FURTHER) for i in places]

    def _struck(self, case: _Case, outcome: Outcome, why: str) -> None:
        """Record that a case has ended the process that ran it."""
        row = catalog.kernel(case.kernel)
        told = Row(
            kernel=row.id,
            source=row.source,
            family=operation(row.op).family,
            problem=case.problem,
            outcome=outcome,
            why=why,
        )
        self._rows.append(self._cleaned(told))
        self._ran[row.id] += 1
        self._strikes[row.id] += 1
        if self._strikes[row.id] == STRIKES:
            self._drop(row.id, f"ended its process {STRIKES} times: its other problems are left")

    def _drop(self, kernel: str, why: str) -> None:
        """Try no more of a kernel."""
        self._not_run.setdefault(why, []).append(self._kernel(kernel))
        self._waiting = [case for case in self._waiting if case.kernel != kernel]

    def _cleaned(self, row: Row) -> Row:
        why = None if row.why is None else self._privacy.text(row.why)
        return replace(row, kernel=self._kernel(row.kernel), why=why)

    def _kernel(self, id: str) -> str:
        """A kernel's id, which is public unless a user chose it."""
        return id if id in catalog.BY_ID else self._privacy.name(id)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self._trouble is not None or (self._chip is not None and not self._waiting)

    def report(self) -> DeviceReport:
        waiting = sorted(self._waiting, key=lambda case: (case.rank, case.order))
        return DeviceReport(
            device=self._name,
            target=self._target,
            chip=self._chip,
            rows=tuple(self._rows),
            left_out=tuple(map(str, waiting)),
            not_run={why: tuple(ids) for why, ids in self._not_run.items()},
            trouble=self._trouble,
            seconds=self._seconds,
        )


def _unasked(
    row: Kernel, target: str, codes: dict[str, str | None], has_problem: bool
) -> str | None:
    """Why none of the problems is tried with a kernel on a target, or None."""
    if row.last_resort:
        return "is what the others are timed beside where torch has no kernel"
    if not row.runs_on(target):
        return f"needs a GPU with {' and '.join(row.needs)}"
    if row.isa is not None and (why := codes[row.isa]):
        return why
    return None if has_problem else "takes no problem but a network's own"


class Survey:
    """A report in the making.

    Args:
        minutes: how long it may take, about; the devices share it.
        modules: that child processes import first, as they register kernels of a user's.
    """

    def __init__(self, minutes: float, modules: Sequence[str] = ()) -> None:
        self._minutes, privacy = minutes, Privacy.of_this_machine()
        self._privacy = privacy
        count = torch.cuda.device_count()
        names = [*(f"cuda:{i}" for i in range(count)), "cpu"]
        self._devices = [_Device(name, privacy, modules) for name in names]
        self._has_gpu = count > 0
        self._ended: HowEnded = "stopped"

    def run(self, emit: Emit = silent, changed: Callable[[], None] = lambda: None) -> None:
        """Try kernels; Ctrl-C ends it early.

        Args:
            changed: called after each row.
        """
        until = time.monotonic() + 60 * self._minutes
        try:
            for place, device in enumerate(self._devices):
                left_s = max(0.0, until - time.monotonic())
                share = left_s / (len(self._devices) - place)
                device.run(time.monotonic() + share, emit, changed)
        except KeyboardInterrupt:
            return
        done = all(device.is_done for device in self._devices)
        self._ended = "complete" if done else "out of time"

    def report(self) -> KernelReport:
        """The report of all cases that have run so far."""
        devices = [device.report() for device in self._devices]
        targets = dict.fromkeys(d.target for d in devices if d.target is not None)
        if not self._has_gpu:
            devices.append(_without_gpu())
        return KernelReport(
            tessella=VERSION,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            minutes=self._minutes,
            ended=self._ended,
            system=platform.system(),
            cores=os.cpu_count() or 0,
            memory_bytes=host_memory_bytes(),
            versions={name: self._privacy.name(v) for name, v in _versions().items()},
            problems={t: to_plain(problems_of(t)) for t in targets},
            devices=tuple(devices),
        )


def _without_gpu() -> DeviceReport:
    """What needs a GPU, and was not run."""
    built = torch.version.cuda is not None
    why = "no NVIDIA GPU is here" if built else "this torch is built without CUDA"
    ids = tuple(r.id for r in catalog.KERNELS if "gpu" in r.targets and "cpu" not in r.targets)
    return DeviceReport(device="gpu", target=None, not_run={why: ids})


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "libc": " ".join(platform.libc_ver()).strip()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if (driver := driver_version()) is not None:
        found["driver"] = driver
    return {name: version for name, version in found.items() if version}
