"""``tessella run``: answers of a checkpoint or a plan, for images or for a whole split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from tessella import api
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.files import require_place, write_atomic
from tessella.artifacts.shards import Example
from tessella.cli.output import Events, Json, Output, grid, output
from tessella.cli.parsing import parse_size
from tessella.core.errors import TessellaError, UsageError
from tessella.core.legible import legible
from tessella.core.preprocess import encode
from tessella.core.record import canonical_json
from tessella.core.tiles import Tiles
from tessella.core.volumes import WRITTEN, suffix_of
from tessella.tasks import Query

Top = Annotated[
    int | None, Option(help="How many labels for each image (classification: 5).", min=1)
]
Threshold = Annotated[
    float | None, Option(help="The least probability that counts.", min=0.0, max=1.0)
]
Tile = Annotated[
    str | None,
    Option(help="Of large pictures: look at tiles of this height x width, and join them."),
]
Overlap = Annotated[
    int | None, Option(help="Pixels that tiles share (an eighth of a side).", min=0)
]


def register(app: typer.Typer) -> None:
    app.command("run")(run)


def run(
    model: Annotated[
        Path, Argument(help="A checkpoint, a run (its best), a plan, or an ONNX file.")
    ],
    images: Annotated[
        list[Path] | None,
        Argument(help="Files of images (or volumes), folders, or .txt lists of them."),
    ] = None,
    data: Annotated[Path | None, Option(help="Evaluate on this dataset instead.")] = None,
    split: Annotated[str, Option(help="train, val or test.")] = "val",
    top: Top = None,
    threshold: Threshold = None,
    tile: Tile = None,
    overlap: Overlap = None,
    draw: Annotated[
        Path | None,
        Option(help="Write the picture with its answer drawn; of several, into this folder."),
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            help="Write the evaluation here, as JSON; or a volume's labels, as .nii.gz, .nii or "
            ".npy, of several into this folder."
        ),
    ] = None,
    index: Annotated[
        int | None,
        Option(help="Of --data: segment this volume of the split, from 0, into --out.", min=0),
    ] = None,
    rows: Annotated[
        Path | None, Option(help="Write what is measured of each image here, as .npy.")
    ] = None,
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
        _require_one(images, data)
        for place in (out, rows):
            if place is not None:
                require_place(place)
        opened = api.open_model(model, compiled=not recompile)
        query = Query(top=top, threshold=threshold)
        if index is not None:
            asked = [_example(opened, data, split, index)]
            _segment(out_, opened, asked, query, out, trust_code)
        elif images and api.task_of(opened)[0].volumes:
            if draw is not None:
                raise UsageError("volumes are not drawn", seen=draw, fix="--out labels.nii.gz")
            files = api.pictures(images, is_one=suffix_of)
            _segment(out_, opened, files, query, out, trust_code)
        elif images:
            _refuse_places(out, rows)
            files, how = api.pictures(images), _tiles(tile, overlap)
            _answer(out_, opened, files, query, draw, trust_code, how)
        elif data is not None:
            _evaluate(out_, opened, (data, split), (out, rows), trust_code)


def _require_one(images: list[Path] | None, data: Path | None) -> None:
    if bool(images) == (data is not None):
        raise UsageError(
            "give images to classify, or --data to evaluate, one of the two",
            fix="tessella run MODEL photo.jpg, or tessella run MODEL --data datasets/flowers",
        )


def _refuse_places(out: Path | None, rows: Path | None) -> None:
    if out is not None or rows is not None:
        raise UsageError(
            "--out and --rows are of an evaluation, and --out of volumes",
            seen=out if rows is None else rows,
            fix="answers as JSON: --json > FILE; a picture of them: --draw FILE",
        )


def _answer(
    out_: Output,
    model: api.Model,
    images: list[Path],
    query: Query,
    draw: Path | None,
    trust_code: bool,
    tiles: Tiles | None,
) -> None:
    """The rows of each image's answer. A file that is no image has its error instead, and the exit
    code is the first error's.
    """
    if draw is not None:
        require_place(draw / "0001.png" if len(images) > 1 else draw)
    task, _ = api.task_of(model)
    names_differ = len({path.name for path in images}) == len(images)
    plain: list[dict[str, Any]] = []
    rows: list[tuple[object, ...]] = []
    failed: list[TessellaError] = []
    for path, told in api.answer_each(
        model, images, query=query, tiles=tiles, trust_code=trust_code
    ):
        if isinstance(told, TessellaError):
            failed.append(told)
            plain.append({"image": legible(path), **told.to_json()})
            continue
        plain.append({"image": legible(path), **api.plain_answer(task, told)})
        if draw is not None:
            several = len(images) > 1
            _draw(
                model, path, told, draw / f"{len(plain):04d}-{path.stem}.png" if several else draw
            )
        for rank, line in enumerate(task.answers.lines(told)):
            rows.append((legible(path.name if names_differ else path) if rank == 0 else "", *line))
    out_.result({"images": plain}, grid(("image", *task.answers.HEADER), rows) if rows else None)
    for error in failed:
        out_.note(f"error: {error}")
    if failed:
        raise typer.Exit(failed[0].exit_code)


def _tiles(tile: str | None, overlap: int | None) -> Tiles | None:
    if tile is None:
        if overlap is not None:
            raise UsageError("an overlap is of tiles", seen=overlap, fix="add --tile 512")
        return None
    height, width = parse_size(tile)
    shared = min(height, width) // 8 if overlap is None else overlap
    return Tiles(height=height, width=width, overlap=shared)


def _example(model: api.Model, data: Path | None, split: str, index: int) -> Example:
    """A volume of a dataset by its number in a split."""
    task, _ = api.task_of(model)
    if data is None or not task.volumes:
        raise UsageError(
            "--index is a volume of --data's split, for a network of volumes",
            seen=f"a network of {task.name}, --data {data}",
            fix="leave it out",
        )
    examples = Dataset(data).split(split)
    if index >= len(examples):
        raise UsageError(
            "the split has no such volume", seen=index, fix=f"0 to {len(examples) - 1}"
        )
    return examples[index]


def _segment(
    out_: Output,
    model: api.Model,
    volumes: Sequence[Path | Example],
    query: Query,
    out: Path | None,
    trust_code: bool,
) -> None:
    """The classes of each volume, and its labels in files. Errors as in ``_answer``."""
    task, _ = api.task_of(model)
    several = len(volumes) > 1 or (out is not None and suffix_of(out) is None)
    if out is not None and not several and suffix_of(out) not in WRITTEN:
        raise UsageError(
            f"labels are written as {', '.join(WRITTEN)}", seen=out.name, fix="give such a name"
        )
    plain: list[dict[str, Any]] = []
    rows: list[tuple[object, ...]] = []
    failed: list[TessellaError] = []
    for path, told in api.segment_each(model, volumes, trust_code=trust_code):
        if isinstance(told, TessellaError):
            failed.append(told)
            plain.append({"volume": legible(path), **told.to_json()})
            continue
        answer = told.answer(query)
        plain.append({"volume": legible(path), "answer": answer})
        if out is not None:
            suffix = suffix_of(path) or ".npy"
            ending = suffix if suffix.startswith(".nii") else ".npy"
            name = f"{len(plain):04d}-{path.name[: -len(suffix)]}{ending}"
            place = out / name if several else out
            told.save(place)
            plain[-1]["labels"] = str(place)
        for rank, line in enumerate(task.answers.lines(answer)):
            rows.append((legible(path.name) if rank == 0 else "", *line))
    header = ("volume", *task.answers.HEADER)
    out_.result({"volumes": plain}, grid(header, rows) if rows else None)
    for error in failed:
        out_.note(f"error: {error}")
    if failed:
        raise typer.Exit(failed[0].exit_code)


def _draw(model: api.Model, image: Path, told: Any, out: Path) -> None:
    made = api.drawn(model, image, told)
    if made is None:
        raise UsageError(
            "this model's answers cannot be drawn",
            seen=api.task_of(model)[0].title,
            fix="leave out --draw; boxes and masks can be",
        )
    write_atomic(out, encode(made))


def _evaluate(
    out_: Output,
    model: api.Model,
    where: tuple[Path, str],
    to: tuple[Path | None, Path | None],
    trust_code: bool,
) -> None:
    """Measure a split, dataset and name; into two files, the report and the rows."""
    (data, split), (out, rows) = where, to
    report = api.evaluate_split(
        model, data, split=split, rows=rows, trust_code=trust_code, emit=out_.emit
    )
    task, _ = api.task_of(model)
    plain = {
        "model": api.name_of(model),
        "split": split,
        "task": task.name,
        **report.to_json(),
    }
    if out is not None:
        write_atomic(out, canonical_json(plain).encode())
    score = task.score
    title = f"{score} {report.values[score]:.4f} on {report.count:,} images of {split}"
    out_.result(plain, grid(*report.table(), title=title))
