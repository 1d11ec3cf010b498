"""``tessella load``: load on a server, and how it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from tessella import loadtest
from tessella.cli.output import Events, output
from tessella.core.access_token import read_token
from tessella.core.errors import ServeError, UsageError
from tessella.core.events import phase

PERCENTS = (50, 90, 95, 99, 99.9)


def register(app: typer.Typer) -> None:
    app.command("load")(load)


def load(
    model: Annotated[str, Argument(help="Name of a model.")],
    url: Annotated[str, Option(help="The server.")] = "http://127.0.0.1:8000",
    grpc: Annotated[str | None, Option(help="HOST:PORT of its gRPC, for --body grpc.")] = None,
    body: Annotated[
        Literal["binary", "json", "image", "grpc"], Option(help="What is sent.")
    ] = "binary",
    batch: Annotated[int, Option(min=1, help="Samples a request.")] = 1,
    picture: Annotated[Path | None, Option(help="File for --body image.")] = None,
    clients: Annotated[int, Option(help="Connections.")] = 8,
    rate: Annotated[
        float | None, Option(help="Requests a second at random times; without: a closed loop.")
    ] = None,
    trace: Annotated[Path | None, Option(help="Replay the times in this file.")] = None,
    seconds: Annotated[float, Option(help="How long.")] = 10.0,
    slo_ms: Annotated[float | None, Option(help="Count as goodput what came within it.")] = None,
    token_file: Annotated[Path | None, Option(help="File with the server's token.")] = None,
    events: Events = None,
) -> None:
    """Put load on a server; latencies count from the time at which a request was to be sent.

    Example: tessella load flowers --rate 500 --slo-ms 20
    """
    with output(events=events) as out:
        if "://" in model:
            models = f"{model.rstrip('/')}/v2/models"
            raise UsageError(
                "the address of a server is no name of a model",
                seen=model,
                fix=f"write load MODEL --url {model}; its models: {models}",
            )
        if (body == "grpc") != (grpc is not None):
            raise UsageError("gRPC needs its address", fix="give --body grpc --grpc HOST:PORT")
        if rate is not None and trace is not None:
            raise UsageError("there is a rate and a trace", fix="give one of them")
        token = None if token_file is None else read_token(token_file)
        target = loadtest.Target(url=url, model=model, token=token, grpc=grpc)
        content = loadtest.body_for(target, body, batch=batch, picture=picture)
        if trace is not None:
            schedule = loadtest.trace(trace, clients=clients)
        elif rate is not None:
            schedule = loadtest.poisson(rate, seconds, clients=clients)
        else:
            schedule = loadtest.closed(clients, seconds)
        outcome = loadtest.generate(target, content, schedule)
        if not outcome.latencies_s:
            raise ServeError(
                "no request was answered",
                status=503,
                seen=_failures(outcome) or "none was sent",
                fix="see whether the server serves the model; where it has TLS, say --url https://",
            )
        out.emit(phase("load", _told(outcome, slo_ms)))


def _told(outcome: loadtest.Outcome, slo_ms: float | None) -> str:
    parts = [f"{outcome.rate:,.0f} answers/s"]
    parts += [f"p{p:g} {1e3 * outcome.percentile(p):.2f} ms" for p in PERCENTS]
    if slo_ms is not None:
        parts.append(f"goodput {outcome.goodput(slo_ms / 1e3):,.0f}/s within {slo_ms:g} ms")
    if outcome.late_s:
        parts.append(f"sent late p99 {1e3 * outcome.lateness(99):.2f} ms")
    return ", ".join([*parts, *filter(None, [_failures(outcome)])])


def _failures(outcome: loadtest.Outcome) -> str:
    told = [f"{count:,}x {status}" for status, count in sorted(outcome.failures.items())]
    return ", ".join(told)
