"""The search for the best settings: trials train in processes of their own, as many as fit at once.

Every event log is read as it grows. A trial that falls behind is ended; one that fails is told and
the search goes on; what a killed sweep had begun goes on from its checkpoints.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tessella.artifacts.files import write_atomic
from tessella.artifacts.run import Recipe
from tessella.artifacts.sweep import (
    IMPORTANCE,
    Scalar,
    Sweep,
    SweepInfo,
    Trial,
    folder_of,
    note_all,
    note_trial,
)
from tessella.core.errors import TessellaError, TrainError, UsageError
from tessella.core.events import Emit, phase, progress, read_events, warning
from tessella.core.record import to_plain
from tessella.telemetry.gpus import visible_gpus
from tessella.training.parallel import ERROR_FILE, LOG_FILE, failure_of
from tessella.training.study import Study

if TYPE_CHECKING:
    import optuna

_POLL_S = 0.1
_LINES = 4  # noted for each trial, and at least for _FEW trials, before the list is written anew
_FEW = 100
_SAVE_S = 20.0  # for a checkpoint, when the sweep is interrupted
BEST, RECIPE = "best.json", "recipe.json"


@dataclass(kw_only=True)
class _Running:
    """A trial whose process runs.

    Attributes:
        values: what varies, by path.
        offset: how far its event log has been read.
        steps: those after which it was validated.
    """

    trial: optuna.Trial
    values: dict[str, Scalar]
    process: subprocess.Popen[bytes]
    out: Path
    slot: int
    began: float
    offset: int = 0
    steps: list[int] = field(default_factory=list)


class Search:
    """A sweep that goes on.

    Args:
        out: its folder, which has a ``sweep.json``.
        recipe_of: the recipe of a trial's values, by path.
        parallel: trials at once; None: one for each group of GPUs that a recipe takes, or one.
        first: values to try first.
    """

    def __init__(
        self,
        out: Path,
        info: SweepInfo,
        recipe_of: Callable[[Mapping[str, Scalar]], Recipe],
        *,
        parallel: int | None,
        first: Mapping[str, Scalar] | None,
        emit: Emit,
    ) -> None:
        self._out, self._info, self._recipe_of, self._emit = out, info, recipe_of, emit
        self._slots = slots(recipe_of(first or {}).gpus, parallel)
        self._first = first
        self._running: list[_Running] = []
        self._listed, self._noted = 0, 0  # trials when the list was written anew; lines since

    def go(self) -> Sweep:
        """Try until all trials have ended.

        Raises:
            UsageError: another process is at this sweep, or Optuna is not installed.
            KeyboardInterrupt: the trials at hand were saved, and go on when the sweep is resumed.
        """
        with _alone(self._out), closing(Study(self._out, self._info, first=self._first)) as study:
            self._emit(phase("sweep", self._described()))
            self._list(study)
            begun = iter(study.unfinished())
            try:
                while self._fill(study, begun) or self._running:
                    self._poll(study)
                    time.sleep(_POLL_S)
            finally:
                self._stop()
            importance = study.importance()
            write_atomic(self._out / IMPORTANCE, json.dumps(importance).encode())
            return Sweep(
                path=self._out,
                score=self._info.score,
                trials=study.trials(),
                importance=importance,
            )

    def _described(self) -> str:
        axes = ", ".join(axis.path for axis in self._info.axes)
        at_once = f", {len(self._slots)} at once" if len(self._slots) > 1 else ""
        return f"{self._info.trials} trials over {axes}{at_once}"

    # --- processes

    def _fill(self, study: Study, begun: Iterator[optuna.Trial]) -> bool:
        """Start trials where there is room; whether one was started."""
        taken = {running.slot for running in self._running}
        started = False
        for slot in range(len(self._slots)):
            if slot in taken:
                continue
            trial = next(begun, None) or study.ask()
            if trial is None:
                break
            self._start(study, trial, slot)
            started = True
        return started

    def _start(self, study: Study, trial: optuna.Trial, slot: int) -> None:
        out, values = folder_of(self._out, trial.number), study.values(trial)
        try:
            recipe = self._recipe_of(values)
        except TessellaError as error:  # settings that cannot go together
            self._failed(study, trial, values, str(error), 0.0)
            return
        out.mkdir(exist_ok=True)
        (out / ERROR_FILE).unlink(missing_ok=True)
        if not (out / RECIPE).exists():  # one that goes on stays as it was begun
            write_atomic(out / RECIPE, json.dumps(to_plain(recipe)).encode())
        with (out / LOG_FILE).open("ab") as log:
            process = subprocess.Popen(
                command_of(out),
                stdin=subprocess.PIPE,  # when it closes, however this process ends, so do they
                stdout=log,
                stderr=log,
                env=os.environ | self._slots[slot],
                start_new_session=True,  # Ctrl-C is heard here alone
            )
        self._running.append(  # at once: whatever fails from here on, it is ended
            _Running(
                trial=trial, values=values, process=process, out=out, slot=slot,
                began=time.monotonic(),
            )
        )  # fmt: skip
        self._note(study, study.described(trial))
        self._emit(phase(f"trial {trial.number}", f"begins, {_said(values)}"))

    def _poll(self, study: Study) -> None:
        for running in tuple(self._running):
            code = running.process.poll()  # before the log is read: then it is all there
            behind = self._scores(study, running)
            if code is None and not behind:
                continue
            _end(running.process)
            self._running.remove(running)
            seconds = time.monotonic() - running.began
            if behind:
                shutil.rmtree(running.out / "checkpoints", ignore_errors=True)
                study.settle(running.trial, "pruned", seconds)
                self._tell(study, running, "ended early: ")
            elif code == 0 and running.steps:
                study.settle(running.trial, "complete", seconds)
                self._tell(study, running, "")
                self._keep_best(study)
            else:
                error = failure_of(running.out, code or 0)
                if code == 0:
                    error = TrainError("the trial was never validated")
                self._failed(study, running.trial, running.values, str(error), seconds)

    def _scores(self, study: Study, running: _Running) -> bool:
        """Report the validations that came; whether the trial is to be ended."""
        found, running.offset = read_events(running.out / "events.jsonl", running.offset)
        for event in found:
            score = event.values.get(self._info.score) if event.kind == "metric" else None
            if score is None or event.step is None or event.step in running.steps:
                continue
            running.steps.append(event.step)
            count = len(running.steps)
            said = f"validation {count}: {self._info.score} {float(score):.4g}"
            self._emit(phase(f"trial {running.trial.number}", said))
            behind = study.report(running.trial, count, float(score))
            self._note(study, study.described(running.trial))
            if behind:
                return running.process.poll() is None
        return False

    def _stop(self) -> None:
        """Let what runs save a checkpoint, and end it: it goes on when the sweep does."""
        for running in self._running:
            running.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + _SAVE_S
        for running in self._running:
            try:
                running.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            finally:
                _end(running.process)
        self._running.clear()

    # --- what is told

    def _note(self, study: Study, trial: Trial) -> None:
        """Append a trial to the list, which is written anew before readers tire of old lines."""
        note_trial(self._out, trial)
        self._noted += 1
        if self._noted > _LINES * max(self._listed, _FEW):
            self._list(study)

    def _list(self, study: Study) -> None:
        trials = study.trials()
        note_all(self._out, trials)
        self._listed, self._noted = len(trials), 0

    def _tell(self, study: Study, running: _Running, how: str) -> None:
        trial = study.described(running.trial)
        self._note(study, trial)
        score = "" if trial.score is None else f"{self._info.score} {trial.score:.4g}"
        self._emit(phase(f"trial {trial.number}", f"{how}{score}, {_said(running.values)}"))
        self._progress(study)

    def _failed(
        self, study: Study, trial: optuna.Trial, values: Mapping[str, Scalar], error: str,
        seconds: float,
    ) -> None:  # fmt: skip
        study.settle(trial, "failed", seconds, error)
        self._note(study, study.described(trial))
        self._emit(warning(f"trial {trial.number} failed, {_said(values)}: {error}"))
        self._progress(study)

    def _progress(self, study: Study) -> None:
        ended = sum(trial.state != "running" for trial in study.trials())
        self._emit(progress("sweep", min(ended, self._info.trials), self._info.trials))

    def _keep_best(self, study: Study) -> None:
        recipe = to_plain(self._recipe_of(study.trials()[0].values))
        plain = {k: v for k, v in recipe.items() if k not in ("network", "dataset")}
        write_atomic(self._out / BEST, (json.dumps(plain, indent=1) + "\n").encode())


def command_of(out: Path) -> list[str]:
    """The program that trains a trial's recipe into its folder."""
    worker = ["-m", "tessella.training.worker", str(out), "--recipe", str(out / RECIPE)]
    return [sys.executable, *worker]


def slots(gpus: int, parallel: int | None) -> list[dict[str, str]]:
    """The environments of trials that run at once: each has GPUs or a share of the cores.

    Args:
        gpus: how many a trial takes.
        parallel: how many at once; more than GPUs there are share them.

    Raises:
        UsageError: ``parallel`` is not positive.
    """
    if parallel is not None and parallel < 1:
        raise UsageError("trials at once are at least one", seen=parallel)
    here = visible_gpus()
    groups = [here[i : i + gpus] for i in range(0, len(here) - gpus + 1, gpus)]
    if groups:
        count = parallel or len(groups)
        chosen = [groups[n % len(groups)] for n in range(count)]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(map(str, group))} for group in chosen]
    count = parallel or 1
    threads = os.environ.get("OMP_NUM_THREADS") or str(
        max(1, len(os.sched_getaffinity(0)) // count // gpus)
    )
    return [{"OMP_NUM_THREADS": threads}] * count


def _said(values: Mapping[str, Scalar]) -> str:
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a trial at once, and what it started: that ends when the trial's pipes close."""
    if process.poll() is None:
        process.kill()
    process.communicate()


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """No other process is at the sweep meanwhile."""
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                "another process is at this sweep", seen=out, fix="wait for it, or end it first"
            ) from error
        yield
