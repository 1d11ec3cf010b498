"""sweep/: many trainings that look for the best settings of one.

``sweep.json`` says what varies and how values are chosen, ``sweep.db`` (Optuna's, in SQLite) which
were tried, ``trial-NNNN/`` are the runs, and ``best.json`` is the best recipe so far, as
``tessella train --recipe`` takes it. ``trials.jsonl`` tells the same trials to readers without
Optuna: a line for each change of one, whose last one holds; ``importance.json`` comes last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tessella.artifacts.files import read_document, read_file, write_atomic
from tessella.artifacts.run import Run
from tessella.artifacts.settings import hint_of, path_of
from tessella.core.errors import ArtifactError, UsageError
from tessella.core.record import from_plain, parse_json, to_plain

VERSION = 1
INFO, TRIALS, IMPORTANCE = "sweep.json", "trials.jsonl", "importance.json"
MOST_TRIALS = 10_000
MOST_NUMBERS = 10**9  # of trials: a folder is named by one
MOST_SECONDS = 1e10  # of a trial: three centuries
NEVER_VARIED = ("dataset", "gpus", "workers", "init")  # accuracies could not be compared

Sampler = Literal["tpe", "random", "grid"]
Pruner = Literal["asha", "hyperband", "none"]
TrialState = Literal["running", "complete", "pruned", "failed"]
Scalar = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The values of one setting: either a range or choices.

    Attributes:
        path: the setting's place in the recipe, such as ``solver.lr``.
        low, high: of a range, both included; whole numbers where the setting is one.
        log: whether the exponents of a range are equally likely and not its numbers.
        choices: the values, where they are listed.
    """

    path: str
    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    choices: tuple[Scalar, ...] = ()

    def __post_init__(self) -> None:
        if self.path in NEVER_VARIED:
            raise UsageError(
                "this setting cannot vary within a sweep: its trials could not be compared",
                seen=self.path,
                fix="make a sweep for each value",
            )
        if self.choices:
            return
        low, high = self.low, self.high
        if low is None or high is None or not low < high or (self.log and low <= 0):
            raise UsageError(
                "a range goes from a number to a larger one, and with log from more than 0",
                seen=f"{self.path}={low}..{high}{' log' if self.log else ''}",
                fix="write 1e-4..1e-1 log, 0..0.3, or choices: 16,32,64",
            )

    @property
    def ends(self) -> tuple[Scalar, ...]:
        """The values that show whether all can work: both ends, or every choice."""
        return self.choices or (self.low, self.high)

    def has(self, value: Scalar) -> bool:
        """Whether a value is one of the axis."""
        if self.choices:
            return value in self.choices
        assert self.low is not None
        assert self.high is not None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and self.low <= value <= self.high  # type: ignore[operator]


def axis_of(name: str, given: Any) -> Axis:
    """An axis as people write it: ``"1e-4..1e-1 log"``, ``"32,64"``, or a list of choices.

    Args:
        name: a recipe's setting, such as ``lr``, ``augment.rotation`` or ``network``.

    Raises:
        UsageError: no such setting, or neither a range nor choices.
    """
    path = path_of(name)
    whole = hint_of(path) is int
    if isinstance(given, str) and ".." in given:
        ends, _, word = given.strip().partition(" ")
        low, high = (_number(end, name, given, whole) for end in ends.split("..", 1))
        if word.strip() not in ("", "log"):
            raise UsageError(
                "a range may be followed by log alone", seen=given, fix=f"{name}={ends} log"
            )
        return Axis(path=path, low=low, high=high, log=bool(word.strip()))
    values = [_value(v) for v in given.split(",")] if isinstance(given, str) else given
    if not isinstance(values, list | tuple) or not values:
        raise UsageError(
            "a setting varies in a range or has choices",
            seen=f"{name}={given!r}",
            fix="write 1e-4..1e-1 log, 0..0.3, or 16,32,64",
        )
    return Axis(path=path, choices=tuple(dict.fromkeys(values)))


def _number(text: str, name: str, given: str, whole: bool) -> int | float:
    try:
        value = float(text)
        if not math.isfinite(value) or (whole and value != int(value)):
            raise ValueError(text)
    except ValueError as error:
        raise UsageError(
            f"{name} varies between {'whole ' if whole else ''}numbers",
            seen=given,
            fix="write two of them with two dots between: 1..8" if whole else "1e-4..1e-1 log",
        ) from error
    return int(value) if whole else value


def _value(text: str) -> Scalar:
    """A choice as JSON has it (``true``, ``32``), else as text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip()
    return value if isinstance(value, bool | int | float) or value is None else text.strip()


@dataclass(frozen=True, kw_only=True)
class SweepInfo:
    """The content of ``sweep.json``.

    Attributes:
        settings: those of every trial, as JSON; what varies is put over them.
        trials: how many are to be tried; a resumed sweep may have more.
        sampler: ``tpe`` proposes values near those that did well (tree-structured Parzen
            estimators, Bergstra et al. 2011), ``random`` draws them, ``grid`` tries all choices.
        pruner: ``asha`` (successive halving, Li et al. 2020) and ``hyperband`` end a trial whose
            score after 1, 3, 9, … validations is not among the best third that came so far.
        score: the measure of a trial: the best one of its validations counts.
    """

    settings: str
    axes: tuple[Axis, ...]
    trials: int
    sampler: Sampler
    pruner: Pruner
    seed: int
    score: str
    dataset_hash: str
    created: str

    def __post_init__(self) -> None:
        if not 1 <= self.trials <= MOST_TRIALS:
            raise UsageError(f"a sweep has 1 to {MOST_TRIALS:,} trials", seen=self.trials)
        paths = [axis.path for axis in self.axes]
        if not paths or len(set(paths)) < len(paths):
            raise UsageError(
                "a sweep varies one setting or more, each once",
                seen=", ".join(paths) or "none",
                fix="--vary 'lr=1e-4..1e-2 log'",
            )
        if self.sampler == "grid" and not all(axis.choices for axis in self.axes):
            raise UsageError(
                "a grid has choices on every axis",
                seen=", ".join(a.path for a in self.axes if not a.choices),
                fix="list the values, such as lr=0.001,0.01, or use the sampler tpe or random",
            )


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a sweep.

    Attributes:
        values: what varied, by path.
        score: the best so far; None before the first validation.
        validations: how many there were.
        error: why it failed.
    """

    number: int
    state: TrialState
    values: dict[str, Scalar]
    score: float | None
    validations: int
    seconds: float
    error: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.number < MOST_NUMBERS:
            raise UsageError(
                f"a trial's number is from 0 to below {MOST_NUMBERS:,}", seen=_short(self.number)
            )
        if not 0 <= self.seconds < MOST_SECONDS:  # NaN is not, either
            raise UsageError(
                f"a trial takes from 0 to below {MOST_SECONDS:g} s", seen=_short(self.seconds)
            )
        if self.validations < 0:
            raise UsageError("a trial has no or more validations", seen=_short(self.validations))


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep has found so far.

    Attributes:
        path: its folder.
        score: the measure, such as ``val/accuracy``; more is better.
        trials: all of them, the best first, those without a score last.
        importance: how much of the variance of the trials' scores each setting explains
            (functional ANOVA, Hutter et al. 2014), the most first; empty where too few have one.
    """

    path: Path
    score: str
    trials: tuple[Trial, ...]
    importance: Mapping[str, float]

    @property
    def best(self) -> Trial:
        """The complete trial with the highest score.

        Raises:
            ArtifactError: none is complete.
        """
        for trial in self.trials:
            if trial.state == "complete":
                return trial
        failed = next((t for t in self.trials if t.error), None)
        raise ArtifactError(
            "no trial of the sweep is complete",
            seen=f"{len(self.trials)} trials" + (f"; one failed: {failed.error}" if failed else ""),
            fix="mend what failed, or go on with more trials (--resume)",
        )

    def run(self, trial: Trial | None = None) -> Run:
        """The run of a trial; of the best one if none is given."""
        return Run(folder_of(self.path, (trial or self.best).number))

    def __repr__(self) -> str:
        done = sum(trial.state == "complete" for trial in self.trials)
        return f"<Sweep {self.path}: {len(self.trials)} trials, {done} complete>"


def folder_of(sweep: Path, number: int) -> Path:
    """The folder of a trial's run."""
    return sweep / f"trial-{number:04d}"


def open_sweep(path: Path, known: TrialList | None = None) -> tuple[SweepInfo, Sweep]:
    """What a sweep's folder says of it, also while it goes on.

    Args:
        known: the folder's list of trials from an earlier look.

    Raises:
        ArtifactError: there is none, or a file of it is damaged.
    """
    info = read_document(path / INFO, SweepInfo, kind="sweep", version=VERSION)
    file, shares = path / IMPORTANCE, {}
    if file.exists():
        shares = parse_json(read_file(file, "importance"), where=str(file))
        if not isinstance(shares, dict) or not all(isinstance(v, float) for v in shares.values()):
            raise ArtifactError("an importance is a share for each setting", seen=file)
    return info, Sweep(
        path=path,
        score=info.score,
        trials=ranked((known or TrialList(path)).read()),
        importance=shares,
    )


class TrialList:
    """The trials of a sweep's folder, read again and again: only what was appended is parsed."""

    def __init__(self, path: Path) -> None:
        self._file = path / TRIALS
        self._inode, self._seen = -1, b""
        self._newest: dict[int, Trial] = {}

    def read(self) -> list[Trial]:
        """The trials as they are by now; none where nothing is noted.

        Raises:
            ArtifactError: a line is no trial.
        """
        if not self._file.exists():
            return []
        inode = self._file.stat().st_ino
        content = read_file(self._file, "list of trials")
        content = content[: content.rfind(b"\n") + 1]  # the last may be half written
        if inode != self._inode or not content.startswith(self._seen):  # it was written anew
            self._newest, self._seen = {}, b""
        plains: dict[int, dict[str, Any]] = {}
        for line in content[len(self._seen) :].splitlines():
            plain = parse_json(line, where=str(self._file))
            if not isinstance(plain, dict) or not isinstance(plain.get("number"), int):
                raise ArtifactError("a line is no trial", seen=line[:80], fix="resume the sweep")
            plains[plain["number"]] = plain
        for number, plain in plains.items():
            self._newest[number] = from_plain(Trial, plain, where=str(self._file))
        self._inode, self._seen = inode, content
        return list(self._newest.values())


def note_trial(path: Path, trial: Trial) -> None:
    """Append a trial as it is now to a sweep's list."""
    with (path / TRIALS).open("ab") as file:
        file.write(_line(trial))


def note_all(path: Path, trials: Iterable[Trial]) -> None:
    """Write a sweep's list anew."""
    write_atomic(path / TRIALS, b"".join(map(_line, trials)))


def _short(number: float) -> str:
    return str(number)[:40]


def _line(trial: Trial) -> bytes:
    return json.dumps(to_plain(trial)).encode() + b"\n"


def ranked(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Trials, the best first, those without a score last."""
    order: dict[TrialState, int] = {"complete": 0, "running": 1, "pruned": 1, "failed": 2}
    return tuple(
        sorted(
            trials,
            key=lambda t: (order[t.state], t.score is None, -(t.score or 0.0), t.number),
        )
    )
