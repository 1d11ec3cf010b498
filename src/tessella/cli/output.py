"""The output of a verb: bars on a terminal, plain lines elsewhere, JSON with ``--json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tessella.core.errors import TessellaError, UsageError
from tessella.core.events import Event, EventLog
from tessella.core.reporter import Reporter

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
Events = Annotated[
    Path | None,
    typer.Option("--events", help="Append what happens to this file, a JSON line each."),
]

PLAIN_WIDTH = 10_000


class Output:
    """The destinations of a verb's events and of its result.

    Results go to standard output, everything that happens on the way to standard error.
    """

    def __init__(self, *, json_only: bool, events: Path | None) -> None:
        self.json_only = json_only
        self._printed_error = ""
        self._log = None if events is None else EventLog(events)
        self._reporter = Reporter()

    def emit(self, event: Event) -> None:
        """Write an event to the log and show it to the person."""
        if self._log is not None:
            self._log(event)
        if self.json_only:
            return
        if event.kind == "error":
            self._printed_error = event.text
        self._reporter(event)

    def note(self, text: str) -> None:
        """A line for the person, above the bars."""
        if not self.json_only:
            self._reporter.note(text)

    def close_bars(self) -> None:
        self._reporter.close()

    def result(self, plain: Any, text: str | Group | None = None) -> None:
        """Print the outcome: ``plain`` with ``--json``, ``text`` for people otherwise."""
        self.close_bars()
        if self._log is not None and isinstance(plain, dict):
            self._log(Event(kind="result", values={k: v for k, v in plain.items() if _small(v)}))
        if self.json_only:
            print(json.dumps(plain, indent=1, ensure_ascii=False))
        elif isinstance(text, Group):
            # Outside of a terminal nothing wraps: a row is a line, for grep and awk.
            width = None if sys.stdout.isatty() else PLAIN_WIDTH
            Console(highlight=False, width=width).print(text)
        elif text is not None:
            print(text)

    def failed(self, error: TessellaError) -> None:
        self.close_bars()
        if self._log is not None:
            self._log(Event(kind="error", text=str(error), values=error.to_json()))
        if self.json_only:
            print(json.dumps(error.to_json(), ensure_ascii=False))
        if str(error) != self._printed_error:  # training emits its failure as an event, too
            self._reporter.note(f"error: {error}", style="red")

    def close(self) -> None:
        self.close_bars()
        if self._log is not None:
            self._log.close()


def _small(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


@contextmanager
def output(
    *,
    json_only: bool = False,
    events: Path | None = None,
    stopped: str | Callable[[], str] = "stopped",
) -> Iterator[Output]:
    """The frame of a verb: an error that we raise becomes one line and an exit code.

    Args:
        stopped: what a person reads after Ctrl-C, or a function that says it then.
    """
    out = _open(json_only, events)
    try:
        yield out
    except TessellaError as error:
        out.failed(error)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt:
        out.note(stopped if isinstance(stopped, str) else stopped())
        raise typer.Exit(130) from None
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away, as `head` does
        raise typer.Exit(0) from None
    finally:
        out.close()


def _open(json_only: bool, events: Path | None) -> Output:
    try:
        return Output(json_only=json_only, events=events)
    except OSError as error:
        Output(json_only=json_only, events=None).failed(
            failure := UsageError(
                "events cannot be written here",
                seen=f"{events}: {error.strerror}",
                fix="give --events a file in a folder that you may write to",
            )
        )
        raise typer.Exit(failure.exit_code) from error


def grid(
    head: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None
) -> Group:
    """A plain table under its title; columns of numbers are aligned to the right."""
    numeric = [
        bool(rows) and all(isinstance(r[c], int | float) or r[c] is None for r in rows)
        for c in range(len(head))
    ]
    table = Table(box=None, header_style="bold", pad_edge=False, show_header=any(head))
    for name, right in zip(head, numeric, strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(v)) for v in row))
    return Group(*([] if title is None else [Text(title, style="italic")]), table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
