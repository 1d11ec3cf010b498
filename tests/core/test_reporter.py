"""What a person sees: bars where somebody watches, plain lines elsewhere, nothing for a library."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from tessella.core import reporter
from tessella.core.events import Event, phase, progress, silent, warning
from tessella.core.reporter import Reporter, reported


def shown(*events: Event, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=80, soft_wrap=True)
    monkeypatch.setattr(reporter, "Console", lambda **_: console)
    with reported(None) as emit:
        for event in events:
            emit(event)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


EVENTS = (
    phase("train", "lenet, 20 steps"), progress("train", 1, 20), warning("lopsided"),
    Event(kind="metric", epoch=1.0, values={"val/accuracy": 0.5}), progress("train", 20, 20),
)  # fmt: skip


def test_a_terminal_shows_bars_and_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(*EVENTS, terminal=True, monkeypatch=monkeypatch)
    for line in (
        "train: lenet, 20 steps",
        "warning: lopsided",
        "epoch 1  val/accuracy 0.5",
        "20/20",
    ):
        assert line in text


def test_a_script_without_a_terminal_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(*EVENTS, terminal=False, monkeypatch=monkeypatch) == ""


def test_who_gives_a_function_is_told_by_it_alone(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[Event] = []
    with reported(told.append) as emit:
        emit(EVENTS[0])
    assert told == [EVENTS[0]]
    with reported(silent) as emit:
        emit(EVENTS[0])
    assert capsys.readouterr().err == ""


def test_plain_lines_of_progress_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    tell = Reporter()
    for done in range(1, 1001):
        tell(progress("import", done, 1000))
    assert capsys.readouterr().err.splitlines() == ["import 1/1000", "import 1000/1000"]
