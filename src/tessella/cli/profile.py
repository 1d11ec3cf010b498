"""``tessella profile``: the time of each step of a plan, beside what the machine allows."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tessella import api
from tessella.artifacts.files import write_atomic
from tessella.cli.output import Events, Json, grid, output
from tessella.core.events import phase
from tessella.core.record import to_plain
from tessella.runtime import picture, profiler, trace
from tessella.search.tuning import CACHE_FOLDER


def register(app: typer.Typer) -> None:
    app.command("profile")(profile)


def profile(
    plan: Annotated[Path, Argument(help="The plan file.")],
    batch: Annotated[int | None, Option(help="One of its batch sizes; the largest if not.")] = None,
    plot: Annotated[Path | None, Option(help="Draw the steps into this SVG file.")] = None,
    trace_file: Annotated[
        Path | None, Option("--trace", help="Write events for Perfetto or chrome://tracing.")
    ] = None,
    json: Json = False,
    events: Events = None,
) -> None:
    """Measure each step of a plan: time, bytes, arithmetic, and the distance to the roofline.

    Example: tessella profile flowers.plan --batch 8 --plot steps.svg --trace steps.json
    """
    with output(json_only=json, events=events) as out:
        engine = api.load(plan)
        out.emit(phase("profile", f"measuring each step of {plan.name}"))
        measured = profiler.profile(engine, batch or engine.buckets[-1], folder=CACHE_FOLDER)
        plain = {
            "target": measured.target,
            "batch": measured.batch,
            "whole_program_us": measured.total_us,
            "noisy": measured.noisy,
            "sum_us": measured.sum_us,
            "limit_us": measured.least_us,
            "tensor_core_share": measured.tensor_core_share,
            "limits": to_plain(measured.limits),
            "steps": [{**to_plain(s), "reached": s.reached} for s in measured],
        }
        for path, content in (
            (plot, picture.svg(measured)),
            (trace_file, json_text.dumps(trace.chrome_trace(measured), indent=1)),
        ):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, content.encode())
                out.note(f"wrote {path}")
        rows = profiler.rows_of(measured)
        out.result(plain, grid(profiler.HEAD, rows, title=profiler.summary(measured)))
