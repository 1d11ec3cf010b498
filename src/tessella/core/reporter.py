"""Events for a person who watches: bars on a terminal and in a notebook, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from tessella.core.events import Emit, Event, silent

PLAIN_INTERVAL_S = 2.0  # a progress line at most this often where there is no terminal


class Reporter:
    """A function of events that shows them on standard error."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bars: Progress | None = None
        self._tasks: dict[str, Any] = {}
        self._last_line: dict[str, float] = {}

    @property
    def is_watched(self) -> bool:
        """Whether somebody sees it while it happens: on a terminal or in a notebook."""
        return self.console.is_terminal or self.console.is_jupyter

    def __call__(self, event: Event) -> None:
        if event.kind == "phase":
            self.close()
            self.note(f"{event.name}: {event.text}" if event.text else event.name)
        elif event.kind == "progress":
            self._progress(event)
        elif event.kind == "metric" and any(k.startswith("val/") for k in event.values):
            values = "  ".join(f"{k} {v:.4g}" for k, v in event.values.items())
            self.note(f"epoch {event.epoch or 0:.4g}  {values}")
        elif event.kind == "warning":
            self.note(f"warning: {event.text}", style="yellow")
        elif event.kind == "error":
            self.note(f"error: {event.text}", style="red")

    def note(self, text: str, style: str = "") -> None:
        """A line, above the bars."""
        console = self.console if self._bars is None else self._bars.console
        console.print(Text(text, style=style))

    def close(self) -> None:
        """End the bars."""
        if self._bars is not None:
            self._bars.stop()
        self._bars, self._tasks = None, {}

    def _progress(self, event: Event) -> None:
        done, total = event.values["done"], event.values["total"]
        if not self.is_watched:
            now = time.monotonic()
            if done == total or now - self._last_line.get(event.name, 0.0) > PLAIN_INTERVAL_S:
                self._last_line[event.name] = now
                self.note(f"{event.name} {done}/{total}")
            return
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._bars.start()
        if event.name not in self._tasks:
            self._tasks[event.name] = self._bars.add_task(event.name, total=total)
        self._bars.update(self._tasks[event.name], completed=done, total=total)


@contextmanager
def reported(emit: Emit | None) -> Iterator[Emit]:
    """``emit``; without one, a reporter where somebody watches, else silence."""
    if emit is not None:
        yield emit
        return
    with closing(Reporter()) as reporter:
        yield reporter if reporter.is_watched else silent
