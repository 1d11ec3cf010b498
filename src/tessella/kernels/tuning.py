"""The timing cache: what was measured before, for which device, problem and kernel.

A file of JSON lines that is only ever appended to; without a path it lives in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tessella.core.errors import ArtifactError
from tessella.core.record import canonical_json, from_plain, parse_json


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One kernel tried on one problem.

    Attributes:
        time_us: median; None if it was refused, or on a target where nothing is measured.
        spread_us: half the distance between the quartiles.
        refused: why it did not take part.
    """

    kernel: str
    time_us: float | None = None
    spread_us: float | None = None
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Line:
    device: str
    problem: str
    version: int
    trial: Trial


class TimingCache:
    """Trials by device, problem, kernel and the kernel's version."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._trials: dict[tuple[str, str, str, int], Trial] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                self._read(line)

    def _read(self, text: str) -> None:
        try:
            line = from_plain(_Line, parse_json(text, where="timing cache"), where="timing cache")
        except ArtifactError:
            return  # a line that a killed writer left half, or an older format: measured again
        self._trials[line.device, line.problem, line.trial.kernel, line.version] = line.trial

    def get(self, device: str, problem: str, kernel: str, version: int) -> Trial | None:
        return self._trials.get((device, problem, kernel, version))

    def put(self, device: str, problem: str, version: int, trial: Trial) -> None:
        self._trials[device, problem, trial.kernel, version] = trial
        if self._path is not None:
            line = _Line(device=device, problem=problem, version=version, trial=trial)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(canonical_json(line) + "\n")
