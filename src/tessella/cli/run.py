"""``tessella run``: answers of a checkpoint or a plan, for images or for a whole split."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tessella import api
from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.files import write_atomic
from tessella.cli.output import Events, Json, Output, grid, output
from tessella.core.errors import UsageError
from tessella.core.record import canonical_json, to_plain


def register(app: typer.Typer) -> None:
    app.command("run")(run)


def run(
    model: Annotated[Path, Argument(help="A checkpoint, a run (its best), or a plan.")],
    images: Annotated[list[Path] | None, Argument(help="Image files to classify.")] = None,
    data: Annotated[Path | None, Option(help="Evaluate on this dataset instead.")] = None,
    split: Annotated[str, Option(help="train, val or test.")] = "val",
    top: Annotated[int, Option(help="How many labels for each image.", min=1)] = 5,
    out: Annotated[Path | None, Option(help="Write the evaluation here, as JSON.")] = None,
    trust_code: Annotated[bool, Option(help="Run the Python that a checkpoint brings.")] = False,
    recompile: Annotated[
        bool, Option("--recompile", help="Do not run the machine code that a plan carries.")
    ] = False,
    json: Json = False,
    events: Events = None,
) -> None:
    """Classify images, or evaluate a split: accuracy, confusion, precision and recall.

    Example: tessella run flowers.plan photo.jpg --top 3
    """
    with output(json_only=json, events=events) as out_:
        if bool(images) == (data is not None):
            raise UsageError(
                "give images to classify, or --data to evaluate, one of the two",
                fix="tessella run MODEL photo.jpg, or tessella run MODEL --data datasets/flowers",
            )
        opened = api.open_model(model, compiled=not recompile)
        if images:
            answers = api.classify(opened, images, top=top, trust_code=trust_code)
            plain = {
                "images": [
                    {"image": str(p), "top": [{"label": n, "score": s} for n, s in answer]}
                    for p, answer in zip(images, answers, strict=True)
                ]
            }
            rows = [
                (p.name if rank == 0 else "", label, f"{100 * score:.2f} %")
                for p, answer in zip(images, answers, strict=True)
                for rank, (label, score) in enumerate(answer)
            ]
            out_.result(plain, grid(("image", "label", "probability"), rows))
        elif data is not None:
            _evaluate(out_, opened, data, split, out, trust_code)


def _evaluate(
    out_: Output, model: api.Model, data: Path, split: str, out: Path | None, trust_code: bool
) -> None:
    report = api.evaluate_split(model, data, split=split, trust_code=trust_code, emit=out_.emit)
    labels = [c.label for c in report.classes]
    plain = {
        "model": str(model.path) if isinstance(model, Checkpoint) else model.manifest.built_from,
        "split": split,
        "accuracy": report.accuracy,
        "top5": report.top5,
        "loss": report.loss,
        "confusion": to_plain(report.confusion),
        "labels": labels,
        "per_class": to_plain(report.classes),
        "predictions": [int(p) for p in report.predictions],
    }
    if out is not None:
        write_atomic(out, canonical_json(plain).encode())
    rows = [(c.label, c.support, c.precision, c.recall, c.f1) for c in report.classes]
    title = f"accuracy {report.accuracy:.4f} on {report.count:,} images of {split}"
    out_.result(plain, grid(("class", "images", "precision", "recall", "F1"), rows, title=title))
