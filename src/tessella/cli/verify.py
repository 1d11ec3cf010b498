"""``tessella verify``: a plan beside its checkpoint, sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tessella import api
from tessella.artifacts.files import require_place, write_atomic
from tessella.cli.output import Events, Json, grid, output
from tessella.core.record import canonical_json, to_plain


def register(app: typer.Typer) -> None:
    app.command("verify")(verify)


def verify(
    plan: Annotated[Path, Argument(help="The plan file.")],
    against: Annotated[Path, Option(help="The checkpoint (or run) that it came from.")],
    data: Annotated[Path, Option(help="Folder of the dataset.")],
    split: Annotated[str, Option(help="train, val or test.")] = "val",
    out: Annotated[Path | None, Option(help="Write the report here, as JSON.")] = None,
    trust_code: Annotated[bool, Option(help="Run the Python that a checkpoint brings.")] = False,
    json: Json = False,
    events: Events = None,
) -> None:
    """Compare a plan with its checkpoint: accuracy, agreement, every flipped sample.

    Example: tessella verify flowers.plan --against runs/flowers --data datasets/flowers
    """
    with output(json_only=json, events=events) as out_:
        if out is not None:
            require_place(out)
        report = api.verify(
            plan, against=against, data=data, split=split, trust_code=trust_code, emit=out_.emit
        )
        if out is not None:
            write_atomic(out, canonical_json(report).encode())
        rows = [
            ("program for", report.target),
            ("samples", report.samples),
            (f"{report.score} of the checkpoint", report.checkpoint_score),
            (f"{report.score} of the plan", report.plan_score),
            ("agreement", report.agreement),
            ("largest difference of a number", report.max_abs_diff),
            *((f"flipped: {f.path}", f"{f.checkpoint} → {f.plan}") for f in report.flips[:20]),
        ]
        shown = grid(
            ("", ""),
            [
                (name, f"{value:.6g}" if isinstance(value, float) else str(value))
                for name, value in rows
            ],
        )
        out_.result(to_plain(report), shown)
