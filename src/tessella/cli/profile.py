"""``tessella profile``: where a plan's time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tessella import api
from tessella.cli.output import Json, grid, output
from tessella.core.record import to_plain
from tessella.runtime import profiler


def register(app: typer.Typer) -> None:
    app.command("profile")(profile)


def profile(
    plan: Annotated[Path, Argument(help="The plan file.")],
    batch: Annotated[int | None, Option(help="One of its batch sizes; the largest if not.")] = None,
    json: Json = False,
) -> None:
    """Measure each step of a plan by itself: time, bytes, arithmetic.

    Example: tessella profile flowers.plan --batch 8
    """
    with output(json_only=json) as out:
        engine = api.load(plan)
        times = profiler.profile(engine, batch or engine.buckets[-1])
        rows = [
            (
                t.kernel,
                t.layer,
                round(t.time_us, 1),
                f"{100 * t.share:.1f} %",
                round(t.nbytes / max(t.time_us, 1e-3) / 1e3, 1),
                None if t.flops is None else round(t.flops / max(t.time_us, 1e-3) / 1e3, 1),
            )
            for t in times
        ]
        head = ("kernel", "layer", "time_us", "share", "GB/s", "GFLOP/s")
        total = sum(t.time_us for t in times)
        title = f"batch {batch or engine.buckets[-1]}, sum of the steps {total:,.1f} µs"
        out.result({"steps": [to_plain(t) for t in times]}, grid(head, rows, title=title))
