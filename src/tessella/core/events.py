"""Events that a long piece of work reports: one event a line, appended, never rewritten.

Every engine takes ``emit``, a function of one ``Event``. The CLI turns events into progress bars,
a run writes them to ``events.jsonl``, and the studio reads them there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tessella.core.errors import CorruptArtifact

EventKind = Literal["phase", "progress", "metric", "warning", "error", "result"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened.

    ``phase``: a stage began (``name``). ``progress``: ``values = {"done", "total"}`` of ``name``.
    ``metric``: ``values`` by name, at ``step`` and ``epoch``. ``warning``, ``error``: ``text`` for
    people. ``result``: the outcome (``values``).
    """

    kind: EventKind
    name: str = ""
    text: str = ""
    step: int | None = None
    epoch: float | None = None
    values: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)

    def to_json(self) -> str:
        plain = {k: v for k, v in vars(self).items() if v not in (None, "", {})}
        return json.dumps(plain, ensure_ascii=False)


Emit = Callable[[Event], None]


def silent(event: Event) -> None:
    """An ``emit`` that drops every event."""


def phase(name: str, text: str = "") -> Event:
    return Event(kind="phase", name=name, text=text)


def progress(name: str, done: int, total: int) -> Event:
    return Event(kind="progress", name=name, values={"done": done, "total": total})


def metric(step: int, epoch: float, **values: float) -> Event:
    return Event(kind="metric", step=step, epoch=epoch, values=values)


def warning(text: str, **values: Any) -> Event:
    return Event(kind="warning", text=text, values=values)


class EventLog:
    """Appends events to a file, a line each; a kill loses at most the line being written."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _drop_partial_line(path)
        # A file name that is not UTF-8 has lone surrogates: written as \\udcXX, which is JSON.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)

    def __call__(self, event: Event) -> None:
        self._file.write(event.to_json() + "\n")

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _drop_partial_line(path: Path) -> None:
    """Cut what a killed writer left after the last newline, so that the next line starts clean."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """The complete events after byte ``offset``, and the offset to go on from.

    A line that is still being written is left for the next call.
    """
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read()
    end = content.rfind(b"\n") + 1
    return list(_parse(content[:end], path)), offset + end


def _parse(content: bytes, path: Path) -> Iterator[Event]:
    for line in content.splitlines():
        try:
            plain = json.loads(line)
            yield Event(**{k: v for k, v in plain.items() if k in Event.__dataclass_fields__})
        except (ValueError, TypeError, AttributeError) as error:
            raise CorruptArtifact(
                "a line of the event log is not an event",
                seen=f"{line[:80]!r} in {path}",
                fix="remove the line: the others are not touched by it",
            ) from error


def both(*targets: Emit) -> Emit:
    """An ``emit`` that passes each event on to all of ``targets``."""

    def emit(event: Event) -> None:
        for target in targets:
            target(event)

    return emit
