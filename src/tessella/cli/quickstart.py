"""``tessella quickstart``: the whole way on real digits, and a table of the results."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from tessella.cli.output import Events, Json, grid, output
from tessella.core.record import to_plain
from tessella.quickstart import classification, detection, segmentation

Rows = list[tuple[str, str]]


def register(app: typer.Typer) -> None:
    app.command("quickstart")(quickstart)


def quickstart(
    workspace: Annotated[Path, Option(help="Where everything lies afterwards.")] = Path(
        "quickstart"
    ),
    task: Annotated[
        Literal["classification", "detection", "segmentation"],
        Option(help="What is asked about a picture."),
    ] = "classification",
    json: Json = False,
    events: Events = None,
) -> None:
    """Folder of digits → dataset → network → plan → served over HTTP, in about a minute.

    With --task detection or segmentation digits are scattered on textures, and boxes or masks
    served: three minutes.

    Example: tessella quickstart --workspace quickstart
    """
    with output(json_only=json, events=events) as out:
        report: classification.Report | detection.Report | segmentation.Report
        if task == "detection":
            report = detection.quickstart(workspace, emit=out.emit)
            rows = _detected(report, workspace)
        elif task == "segmentation":
            report = segmentation.quickstart(workspace, emit=out.emit)
            rows = _segmented(report, workspace)
        else:
            report = classification.quickstart(workspace, emit=out.emit)
            rows = _classified(report)
        rows += [
            (
                "one image with the plan",
                f"{report.plan_ms:.3f} ms ({report.eager_ms / report.plan_ms:.2f}×)",
            ),
            ("size of the plan", f"{report.plan_bytes:,} bytes"),
            ("time", f"{report.seconds:.1f} s (training {report.train_seconds:.1f} s)"),
            ("dataset", str(workspace / "datasets" / "digits")),
            ("run", str(workspace / "runs" / "digits")),
            ("plan", str(workspace / "plans" / "digits.plan")),
            ("report", str(workspace / "report.json")),
        ]
        out.result(to_plain(report), grid(("quick start", report.target), rows))
        out.note(f"\nNext: {_next(workspace)}")


def _next(workspace: Path) -> str:
    """The command that opens the studio, behind one that finds ``tessella`` where a shell does not
    look, as after ``make quickstart``.
    """
    command = f"tessella studio {shlex.quote(str(workspace))} --open"
    activate = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("tessella") or not activate.is_file():
        return command
    return f". {shlex.quote(os.path.relpath(activate))} && {command}"


def _classified(report: classification.Report) -> Rows:
    return [
        ("accuracy of the checkpoint", f"{report.val_accuracy:.4f}"),
        ("accuracy of the plan over HTTP", f"{report.http_accuracy:.4f}"),
        ("agreement, sample by sample", f"{report.top1_agreement:.4f} of {report.images}"),
        ("largest difference of a probability", f"{report.max_abs_diff:.2e}"),
        ("one image in torch", f"{report.eager_ms:.3f} ms"),
    ]


def _detected(report: detection.Report, workspace: Path) -> Rows:
    return [
        ("mAP of the checkpoint, at 0.5 · 0.5 to 0.95", f"{report.map50:.3f} · {report.map:.3f}"),
        ("mAP of the plan, 0.5 to 0.95", f"{report.plan_map:.3f}"),
        ("pictures with the same boxes", f"{report.agreement:.4f} of {report.images}"),
        ("digits found over HTTP", f"{100 * report.found:.1f} %"),
        ("of what was told, a digit", f"{100 * report.right:.1f} %"),
        ("a picture with its boxes", str(workspace / "drawn.png")),
        ("one image in torch, pixels to boxes", f"{report.eager_ms:.3f} ms"),
    ]


def _segmented(report: segmentation.Report, workspace: Path) -> Rows:
    return [
        ("mean IoU of the checkpoint · Dice", f"{report.miou:.3f} · {report.dice:.3f}"),
        ("mean IoU of the plan", f"{report.plan_miou:.3f}"),
        ("mean IoU of the masks over HTTP", f"{report.http_miou:.3f}"),
        ("pictures with the same masks", f"{report.agreement:.4f} of {report.images}"),
        ("a picture with its masks", str(workspace / "drawn.png")),
        ("one image in torch, pixels to masks", f"{report.eager_ms:.3f} ms"),
    ]
