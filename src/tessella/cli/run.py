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
from tessella.core.record import canonical_json
from tessella.tasks import Query


def register(app: typer.Typer) -> None:
    app.command("run")(run)


def run(
    model: Annotated[Path, Argument(help="A checkpoint, a run (its best), or a plan.")],
    images: Annotated[list[Path] | None, Argument(help="Image files to classify.")] = None,
    data: Annotated[Path | None, Option(help="Evaluate on this dataset instead.")] = None,
    split: Annotated[str, Option(help="train, val or test.")] = "val",
    top: Annotated[
        int | None, Option(help="How many labels for each image (classification: 5).", min=1)
    ] = None,
    threshold: Annotated[
        float | None, Option(help="The least probability that counts.", min=0.0, max=1.0)
    ] = None,
    out: Annotated[Path | None, Option(help="Write the evaluation here, as JSON.")] = None,
    trust_code: Annotated[bool, Option(help="Run the Python that a checkpoint brings.")] = False,
    recompile: Annotated[
        bool, Option("--recompile", help="Do not run the machine code that a plan carries.")
    ] = False,
    json: Json = False,
    events: Events = None,
) -> None:
    """Answer for images, or evaluate a split: accuracy, confusion, precision and recall.

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
            query = Query(top=top, threshold=threshold)
            answers = api.answer(opened, images, query=query, trust_code=trust_code)
            task, _ = api.task_of(opened)
            shown = [(p, task.answers.lines(a)) for p, a in zip(images, answers, strict=True)]
            plain = {
                "images": [
                    {"image": str(p), **api.plain_answer(task, answer)}
                    for p, answer in zip(images, answers, strict=True)
                ]
            }
            rows = [
                (p.name if rank == 0 else "", *line)
                for p, lines in shown
                for rank, line in enumerate(lines)
            ]
            out_.result(plain, grid(("image", *task.answers.HEADER), rows))
        elif data is not None:
            _evaluate(out_, opened, data, split, out, trust_code)


def _evaluate(
    out_: Output, model: api.Model, data: Path, split: str, out: Path | None, trust_code: bool
) -> None:
    report = api.evaluate_split(model, data, split=split, trust_code=trust_code, emit=out_.emit)
    task, _ = api.task_of(model)
    plain = {
        "model": str(model.path) if isinstance(model, Checkpoint) else model.manifest.built_from,
        "split": split,
        "task": task.name,
        **report.to_json(),
    }
    if out is not None:
        write_atomic(out, canonical_json(plain).encode())
    score = task.score
    title = f"{score} {report.values[score]:.4f} on {report.count:,} images of {split}"
    out_.result(plain, grid(*report.table(), title=title))
