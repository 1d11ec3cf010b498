"""``tessella tune``: a plan's kernels are measured on this machine, and chosen again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tessella import api
from tessella.cli.output import Events, Json, output


def register(app: typer.Typer) -> None:
    app.command("tune")(tune)


def tune(
    plan: Annotated[Path, Argument(help="The plan file.")],
    out: Annotated[Path | None, Option(help="The file to write; else the plan itself.")] = None,
    cache: Annotated[Path | None, Option(help="Timing cache, read and added to.")] = None,
    time_limit: Annotated[
        float | None, Option(help="Seconds to measure; the next call with this cache goes on.")
    ] = None,
    json: Json = False,
    events: Events = None,
) -> None:
    """Measure a plan's kernels on this machine, and give each step the fastest.

    The plan keeps its weights, graph, preprocessing and labels. It may be one that was compiled
    --untuned for this GPU elsewhere, or any for a CPU. Of several programs in it, the one for this
    machine is measured, and the others stay.

    Example: tessella tune flowers.plan
    """
    with output(json_only=json, events=events) as out_:
        if time_limit is not None and cache is None:
            out_.note("where the time ends, what was measured is lost: with --cache FILE it is not")
        made = api.tune(plan, cache=cache, time_limit_s=time_limit, emit=out_.emit)
        path = made.save(out or plan)
        plain = {
            "plan": str(path),
            "nbytes": path.stat().st_size,
            "steps": len(made.program.buckets[-1].steps),
            "batches": [bucket.batch for bucket in made.program.buckets],
            "target": made.target,
            "targets": list(made.targets),
        }
        out_.result(plain, f"{made}\nwrote {path} ({plain['nbytes']:,} bytes)")
