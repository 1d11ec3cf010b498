"""Follows an event log: the points, progress and warnings so far, and those that were appended.

A feed remembers its offset in ``events.jsonl``, so a read costs only what was appended since the
last one. It works for every run folder and every job, whoever started it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from tessella.core.events import Event, read_events

Point = tuple[float, float]  # epoch, value

MOST_POINTS = 1500  # a series is thinned to this many when a page opens; more does not fit a screen
SILENT_S = 90.0  # a run of no job of ours that wrote nothing for so long is not running
RATE_WINDOW = 40  # progress events from which the remaining time is estimated


@dataclass(frozen=True, kw_only=True)
class News:
    """The events of a log that one call of ``Feed.read`` has found.

    Attributes:
        points: new points by metric.
        restarted: the run went back to a checkpoint: draw ``Feed.points`` from the start.
        anything: whether there was any event.
    """

    points: dict[str, list[Point]] = field(default_factory=dict)
    restarted: bool = False
    anything: bool = False


class Feed:
    """Follows one event log.

    Attributes:
        points: all points so far, by metric.
        phase: the stage that the work is in.
        way: how a training's steps run, and why so, where it was told.
        done, total: its progress; total is 0 while it is not known.
        warnings: what people should know, newest last.
        error: why it ended, if it failed.
        result: the outcome, once there is one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.points: dict[str, list[Point]] = {}
        self.phase, self.way = "", ""
        self.done, self.total = 0, 0
        self.warnings: deque[str] = deque(maxlen=50)
        self.error = ""
        self.result: dict[str, object] | None = None
        self.started: float | None = None
        self.last_time: float | None = None
        self._offset = 0
        self._steps: dict[str, list[int]] = {}
        self._trains = False
        self._rate: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)

    def read(self) -> News:
        """Read the events that were appended since the last call."""
        events, self._offset = read_events(self.path, self._offset)
        new: dict[str, list[Point]] = {}
        restarted = False
        for event in events:
            self.started = event.time if self.started is None else self.started
            self.last_time = event.time
            if event.kind == "metric":
                self._add(event, new)
            elif event.kind in ("phase", "progress") and self._is_on_the_way(event):
                continue
            elif event.kind == "phase":
                restarted |= self._begin(event)
            elif event.kind == "progress":
                self._progress(event)
            elif event.kind == "warning":
                self.warnings.append(event.text)
            elif event.kind == "error":
                self.error = event.text
            elif event.kind == "result":
                self.result = event.values
        return News(points=new, restarted=restarted, anything=bool(events))

    @property
    def fraction(self) -> float:
        return self.done / self.total if self.total else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds to the end of this stage, from the latest progress events."""
        if len(self._rate) < 2 or self.total <= self.done:
            return None
        (t0, n0), (t1, n1) = self._rate[0], self._rate[-1]
        return (self.total - n1) * (t1 - t0) / (n1 - n0) if n1 > n0 and t1 > t0 else None

    @property
    def status(self) -> str:
        """The state of a run that no job of ours drives, judged by its log."""
        if self.error:
            return "failed"
        if self.result is not None:
            return "done"
        active = self.last_time is not None and time.time() - self.last_time < SILENT_S
        return "running" if active else "aborted"

    def latest(self, name: str) -> float | None:
        """The newest value of a metric."""
        return self.points[name][-1][1] if self.points.get(name) else None

    def _add(self, event: Event, new: dict[str, list[Point]]) -> None:
        for name, value in event.values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                point = (round(event.epoch or 0.0, 5), float(f"{value:.6g}"))
                self.points.setdefault(name, []).append(point)
                self._steps.setdefault(name, []).append(event.step or 0)
                new.setdefault(name, []).append(point)

    def _is_on_the_way(self, event: Event) -> bool:
        """Whether a training goes on while this is told: its own steps say how far it is."""
        self._trains |= event.name == "train"
        return self._trains and event.name in ("snapshot", "validate")

    def _begin(self, event: Event) -> bool:
        """Begin a stage. A resumed run repeats steps: forget the points after its checkpoint."""
        if event.name == "way":
            self.way = event.text
            return False
        self.phase = event.text or event.name
        self.done, self.total, self.error, self.result = 0, 0, "", None
        self._rate.clear()
        if event.name != "resume" or event.step is None:
            return False
        for name, steps in self._steps.items():
            keep = sum(step <= event.step for step in steps)
            del steps[keep:], self.points[name][keep:]
        return True

    def _progress(self, event: Event) -> None:
        done, total = event.values.get("done", 0), event.values.get("total", 0)
        if total != self.total or done < self.done:
            self._rate.clear()
        self.done, self.total = done, total
        self._rate.append((event.time, done))


def thin(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most ``most`` points that keep the curve's shape: the extremes of each stretch."""
    if len(points) <= most:
        return list(points)
    stretch = len(points) / (most // 2)
    out: list[Point] = []
    for i in range(most // 2):
        part = points[int(i * stretch) : int((i + 1) * stretch)]
        low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        out += sorted({low, high})
    return out


def tail(path: Path, nbytes: int = 16_000) -> str:
    """The last whole lines of a log."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - nbytes))
        content = file.read().decode("utf-8", "replace")
    if size > nbytes:
        content = content.split("\n", 1)[-1]
    # A bar that redraws itself leaves carriage returns: only its last state is worth a line.
    return "\n".join(line.rsplit("\r", 1)[-1] for line in content.split("\n"))
