"""The timing cache: what was measured before, for which device, problem and kernel.

A file of JSON lines that is only ever appended to; without a path, or where the path cannot be
written, it lives in memory. ``Lock`` is what one build asked of it: given back to another build, it
decides the same, and nothing is measured.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tessella.core.errors import ArtifactError, CompileError, UsageError
from tessella.core.record import canonical_json, from_plain, parse_json


def _cache_folder() -> Path:
    try:
        return Path.home() / ".cache" / "tessella"
    except RuntimeError:  # a user without a home, as in many containers
        return Path(tempfile.gettempdir()) / f"tessella-{os.getuid()}"


CACHE_FOLDER = _cache_folder()


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One configuration of a kernel: its median time, or why it could not run."""

    config: dict[str, Any]
    time_us: float | None = None
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What else is known about a kernel on a problem, besides its time.

    Attributes:
        max_rel_error: largest deviation from float64, over the largest float64 value.
        repeatable: two runs gave the same bits.
        launches: kernels of ours that one call launched; the next three are of the largest one.
        registers: a thread's.
        shared_bytes: a block's.
        occupancy: resident warps over the most that a multiprocessor holds.
    """

    max_rel_error: float
    repeatable: bool
    launches: int = 0
    registers: int | None = None
    shared_bytes: int | None = None
    occupancy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One kernel tried on one problem.

    Attributes:
        config: its fastest configuration.
        time_us: median; None if it was refused, or on a target where nothing is measured.
        spread_us: half the distance between the quartiles.
        workspace_bytes: scratch memory: exact where the kernel is ours, else the most that the
            allocator handed out during a call.
        tried: every configuration, in the order in which the kernel proposes them, if several.
        refused: why it did not take part.
        noisy: other work disturbed the measurement.
        estimate_us: what the cost model says, where nothing was measured (``search.estimate``).
        behind: how many times the fastest's time it takes at least, as problems of this kind have
            shown; it was not run then, and is refused.
    """

    kernel: str
    config: dict[str, Any] = field(default_factory=dict)
    time_us: float | None = None
    spread_us: float | None = None
    workspace_bytes: int = 0
    inspection: Inspection | None = None
    tried: tuple[Tried, ...] = ()
    refused: str | None = None
    noisy: bool = False
    behind: float | None = None
    estimate_us: float | None = None


def require_one(trials: Sequence[Trial], op: str, target: str) -> None:
    """Raise ``CompileError`` if all kernels were refused."""
    if all(trial.refused for trial in trials):
        raise CompileError(
            f"no kernel on {target} can carry out {op}",
            seen="; ".join(f"{t.kernel}: {t.refused}" for t in trials) or "no such kernel",
            fix="choose another algorithm, precision or target",
        )


_BEGIN = b'{"device":'  # of each line of a cache


@dataclass(frozen=True, kw_only=True)
class _Line:
    device: str
    problem: str
    version: int
    trial: Trial


def require_cache(path: Path) -> None:
    """Refuse a path that a user names where lies what no cache is: lines would be added to it.

    Raises:
        UsageError: a folder, or a file that begins otherwise.
    """
    seen = f"the folder {path}" if path.is_dir() else None
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            begins = file.read(len(_BEGIN))
        seen = None if begins == _BEGIN else f"{path}, which begins with {begins!r}"
    if seen is not None:
        fix = "name a file that is not there yet, or one that a build has written"
        raise UsageError("this is no timing cache", seen=seen, fix=fix)


class TimingCache:
    """Trials by device, problem, kernel and the kernel's version."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._trials: dict[tuple[str, str, str, int], Trial] = {}
        if path is not None:
            with contextlib.suppress(OSError):  # none yet, or not ours to read: measured again
                for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                    self._read(line)

    def _read(self, text: str) -> None:
        try:
            line = from_plain(_Line, parse_json(text, where="timing cache"), where="timing cache")
        except ArtifactError:
            return  # a line that a killed writer left half, or an older format: measured again
        self._trials[line.device, line.problem, line.trial.kernel, line.version] = line.trial

    def get(self, device: str, problem: str, kernel: str, version: int) -> Trial | None:
        return self._trials.get((device, problem, kernel, version))

    def put(
        self, device: str, problem: str, version: int, trial: Trial, *, lasting: bool = True
    ) -> None:
        """Remember a trial; ``lasting``: not only for as long as memory is short."""
        if not lasting:
            return
        self._trials[device, problem, trial.kernel, version] = trial
        if self._path is not None:
            line = _Line(device=device, problem=problem, version=version, trial=trial)
            with contextlib.suppress(OSError):  # no writable folder: remembered in memory
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("ab", buffering=0) as file:  # whole lines: others append too
                    file.write(f"{canonical_json(line)}\n".encode())

    def beside(self) -> TimingCache:
        """The same cache for a search by which another one is made shorter."""
        return self


class NotInLock(UsageError):
    """A lock does not say what a build has to know.

    Attributes:
        is_known: it has times of other kernels for the problem.
    """

    is_known = False


class Lock(TimingCache):
    """A timing cache that records the trials by which a build was decided.

    Args:
        lines: those of another build, or a timing cache's: then they are all there is, and a trial
            that is not among them is not measured but refused.
    """

    def __init__(self, path: Path | None = None, *, lines: str | None = None) -> None:
        super().__init__(path if lines is None else None)
        self._complete = lines is not None
        self._used: dict[tuple[str, str, str, int], Trial] = {}
        for line in (lines or "").splitlines():
            self._read(line)

    def get(self, device: str, problem: str, kernel: str, version: int) -> Trial | None:
        found = super().get(device, problem, kernel, version)
        if found is not None:
            self._used[device, problem, kernel, version] = found
        elif self._complete:
            here = any(key[0] == device for key in self._trials)
            error = NotInLock(
                "the lock does not hold what this build has to know",
                seen=f"no time of {kernel} (version {version}) for a problem of this network"
                if here
                else "it was made on another device, or with other versions of its libraries",
                fix="compile without the lock, and keep the new plan as the next one",
            )
            error.is_known = any(key[:2] == (device, problem) for key in self._trials)
            raise error
        return found

    def put(
        self, device: str, problem: str, version: int, trial: Trial, *, lasting: bool = True
    ) -> None:
        self._used[device, problem, trial.kernel, version] = trial
        super().put(device, problem, version, trial, lasting=lasting)

    def beside(self) -> TimingCache:
        """The same trials, which are no part of the lock until the build itself asks for them."""
        other = TimingCache()
        other._path, other._trials = self._path, self._trials
        return other

    @property
    def used(self) -> str:
        """The trials that were asked for or measured, as JSON lines in one order."""
        lines = [
            _Line(device=d, problem=p, version=v, trial=replace(t, tried=(), inspection=None))
            for (d, p, _, v), t in sorted(self._used.items(), key=lambda item: item[0])
        ]
        return "".join(f"{canonical_json(line)}\n" for line in lines)
