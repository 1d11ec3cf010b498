"""``tessella evaluate``: a model on the test split, with how sure the numbers are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text
from typer import Argument, Option

from tessella import api
from tessella.api.evaluating import Calibration, Comparison, Judgement, save_mistakes
from tessella.api.predicting import open_model
from tessella.artifacts.files import write_atomic
from tessella.artifacts.run import Run
from tessella.cli.output import Events, Json, grid, output
from tessella.core.errors import UsageError
from tessella.core.record import canonical_json
from tessella.tasks import counted_examples
from tessella.training.confidence import Measure

SHOWN = 10
CHANCE = 0.05  # a difference with a larger p is told as one that may be chance


def register(app: typer.Typer) -> None:
    app.command("evaluate")(evaluate)


def evaluate(
    model: Annotated[
        Path, Argument(help="A checkpoint, a run (its best), a plan, or an ONNX file.")
    ],
    data: Annotated[
        Path | None, Option(help="Folder of the dataset; by default the one that a run knows.")
    ] = None,
    split: Annotated[str, Option(help="test, val or train.")] = "test",
    against: Annotated[Path | None, Option(help="Compare with this model, image by image.")] = None,
    errors: Annotated[int, Option(help="Images with the largest losses to list.", min=0)] = 20,
    pictures: Annotated[Path | None, Option(help="Write these images here, as PNG.")] = None,
    threshold: Annotated[
        float | None, Option(help="Detection: the least score that counts; the model's own.")
    ] = None,
    overlap: Annotated[
        float | None, Option(help="Detection: from which a box hits a thing (0.5).")
    ] = None,
    level: Annotated[float, Option(help="Of the intervals.")] = 0.95,
    out: Annotated[Path | None, Option(help="Write all of it here, as JSON.")] = None,
    trust_code: Annotated[bool, Option(help="Run the Python that a checkpoint brings.")] = False,
    json: Json = False,
    events: Events = None,
) -> None:
    """Measure a model on images that nothing was chosen by: intervals, calibration, errors.

    Example: tessella evaluate runs/flowers --data datasets/flowers --against runs/before

    The test split is made at import (--test 0.1); training, sweeps, calibration and budgets leave
    it alone.
    """
    with output(json_only=json, events=events) as out_:
        data = data or _dataset_of(model)
        found = api.evaluate(
            model,
            data,
            split=split,
            against=against,
            errors=errors,
            threshold=threshold,
            overlap=overlap,
            level=level,
            trust_code=trust_code,
            emit=out_.emit,
        )
        plain = found.to_json()
        if out is not None:
            write_atomic(out, canonical_json(plain).encode())
        if pictures is not None:
            save_mistakes(found, data, pictures)
        out_.result(plain, _shown(found))


def _dataset_of(model: Path) -> Path:
    """The dataset of a run, or of the run that a checkpoint lies in."""
    if not model.exists():
        open_model(model)  # which says so
    for folder in (model, model.resolve().parent.parent):
        if (folder / "run.json").is_file():
            data = Path(Run(folder).recipe.dataset)
            if data.exists():
                return data
            raise UsageError(
                "the dataset of the run is not where it was",
                seen=data,
                fix="say where it is now: --data FOLDER",
            )
    raise UsageError(
        "it is not known on which images this model should be measured",
        seen=model,
        fix="say which dataset: --data FOLDER",
    )


def _shown(found: Judgement) -> Group:
    value = found.value
    images = counted_examples(found.task, found.count)
    title = f"{found.score} {_interval(value)} on {images} of {found.split}"
    rows = [(name, m.value, m.low, m.high) for name, m in found.measures.items()]
    ends = f"{found.level:.0%}"
    parts: list[Group | Text] = [
        grid(("measure", "value", f"{ends} from", "to"), rows, title=title),
        grid(*found.report.table()),
    ]
    if found.errors is not None:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in found.errors.errors.items())
        parts.append(grid(*found.errors.table(), title=f"errors: {kinds}"))
    if found.calibration is not None:
        parts.append(Text(_calibration(found.calibration)))
    if found.comparison is not None:
        parts.append(Text(_comparison(found.comparison)))
    worst = found.mistakes[:SHOWN]
    if any(m.said for m in worst):
        rows_of_worst = [(m.path, m.truth, m.said, m.loss) for m in worst]
        parts.append(grid(("largest losses", "truth", "answer", "loss"), rows_of_worst))
    elif worst:  # of a task whose answer is a picture itself
        short = [(m.path, m.truth, m.loss) for m in worst]
        parts.append(grid(("largest losses", "truth", "loss"), short))
    return Group(*parts)


def _interval(measure: Measure) -> str:
    return f"{measure.value:.4f} ({measure.low:.4f} to {measure.high:.4f})"


def _calibration(found: Calibration) -> str:
    said = f"calibration error {found.error:.4f}"
    if found.temperature is None or found.scaled_error is None:
        return said
    return (
        f"{said}; {found.scaled_error:.4f} with scores divided by {found.temperature:.3g}, "
        "which the validation split says"
    )


def _comparison(found: Comparison) -> str:
    said = f"{found.other}: {found.other_value:.4f}; difference {_interval(found.difference)}"
    if found.p_value is None:
        return said
    chance = ": may be chance" if found.p_value > CHANCE else ""
    return (
        f"{said}; right alone {found.only_this} and {found.only_other}, "
        f"McNemar's p {found.p_value:.3g}{chance}"
    )
