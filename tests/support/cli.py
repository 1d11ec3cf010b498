"""Words as the command line's own parser reads them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from tessella.cli import compile as compile_verb
from tessella.cli import data, diff, evaluate, main, profile, run, serve, show, sweep, train, verify


def context(argv: Sequence[str]) -> typer.Context:
    """What a verb gets: its options are in ``params``."""
    app = typer.Typer()
    for module in (
        compile_verb,
        data,
        diff,
        evaluate,
        profile,
        run,
        serve,
        show,
        sweep,
        train,
        verify,
    ):
        module.register(app)
    command: Any = typer.main.get_command(app)
    verb, rest = "", [a.replace("{job}/", "") for a in argv]
    while hasattr(command, "commands"):
        verb, *rest = rest
        command = command.commands[verb]
    return command.make_context(verb, rest)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Tessella = Callable[..., Answer]


def in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tessella:
    """The command line in this process."""

    def run(*arguments: str | Path) -> Answer:
        monkeypatch.setattr(sys, "argv", ["tessella", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return Answer(int(stop.value.code or 0), captured.out, captured.err)

    return run
