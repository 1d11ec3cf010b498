"""``tessella size``: how to serve a plan so that most requests are answered in time."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Group
from rich.text import Text
from typer import Argument, Option

from tessella import api
from tessella.api.sizing import Sizing
from tessella.cli.output import Events, Json, grid, output
from tessella.cli.parsing import parse_counts, parse_duration
from tessella.cli.serve import parse_models
from tessella.core.record import to_plain


def register(app: typer.Typer) -> None:
    app.command("size")(size)


def size(
    context: typer.Context,
    model: Annotated[str, Argument(help="FILE.plan, or NAME=FILE.plan.")],
    p99: Annotated[
        str, Option(help="In which time 99 % of all requests are to be answered: 20ms, 1.5s.")
    ],
    seconds: Annotated[float, Option(help="How long to try, once the first server runs.")] = 120.0,
    acceptors: Annotated[
        str | None, Option(help="Numbers to try, 0,2,4; by default some below the cores.")
    ] = None,
    max_delay_us: Annotated[
        str | None, Option(help="Delays to try, 0,500; by default some within the p99.")
    ] = None,
    instances: Annotated[
        str | None, Option(help="Instances of the model to try, 1,2; by default as cores allow.")
    ] = None,
    body: Annotated[Literal["binary", "json", "image"], Option(help="What is sent.")] = "binary",
    batch: Annotated[int, Option(min=1, help="Samples a request.")] = 1,
    picture: Annotated[Path | None, Option(help="File for --body image.")] = None,
    json: Json = False,
    events: Events = None,
) -> None:
    """Find how to serve a plan for the most goodput: answers a second within the asked p99.

    Starts servers here, one after another, and sends requests at random times, at rates that rise
    until more than 1 % of them is late or refused. Prints what it tried, and the command.

    Example: tessella size flowers.plan --p99 20ms
    """
    with output(json_only=json, events=events) as out:
        ((name, path),) = parse_models([model]).items()
        # The device was chosen for this process and its children; the command has to say it again.
        before = {} if context.parent is None else context.parent.params
        device = before.get("device")
        found = api.size(
            path,
            name=name,
            p99_ms=1e3 * parse_duration(p99),
            seconds=seconds,
            acceptors=None if acceptors is None else parse_counts(acceptors),
            max_delays_us=None if max_delay_us is None else parse_counts(max_delay_us),
            instances=None if instances is None else parse_counts(instances),
            body=body,
            batch=batch,
            picture=picture,
            imports=before.get("modules") or (),
            emit=out.emit,
        )
        front = () if device is None else ("--device", device)
        command = shlex.join(("tessella", *front, *found.words))
        out.result(plain(found, command), shown(found, command))


def plain(found: Sizing, command: str) -> dict[str, object]:
    """What ``--json`` prints."""
    return {
        "command": command,
        "p99_ms": found.p99_ms,
        "best": to_plain(found.best),
        "trials": to_plain(found.trials),
        "notes": list(found.notes),
    }


def shown(found: Sizing, command: str) -> Group:
    """A table of all trials, the notes, and the command as the last line."""
    rows = [
        (
            trial.setting.acceptors,
            trial.setting.max_delay_us,
            trial.setting.instances,
            trial.rate,
            trial.goodput,
            trial.p50_ms,
            trial.p99_ms,
            trial.refused,
            "best" if trial is found.best else "held" if trial.meets else "broken",
            "one at a time" if trial.rate is None else "",
        )
        for trial in found.trials
    ]
    head = (
        "acceptors",
        "delay µs",
        "instances",
        "offered/s",
        "goodput/s",
        "p50 ms",
        "p99 ms",
        "refused",
    )
    title = f"goodput within {found.p99_ms:g} ms, at most 1 % late or refused"
    return Group(
        grid((*head, "", ""), rows, title=title),
        *(Text(f"note: {note}") for note in found.notes),
        Text(command),
    )
