"""``tessella data``: import images into a dataset, examine it, and check annotations."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Group
from rich.text import Text
from typer import Argument, Option

from tessella.annotations import coco, read_annotations
from tessella.artifacts.dataset import Dataset
from tessella.cli.output import Events, Json, grid, output
from tessella.cli.parsing import parse_resize, parse_sides, parse_size, parse_window
from tessella.cli.tables import dataset_table
from tessella.core.count import counted
from tessella.core.errors import UsageError
from tessella.core.preprocess import Store
from tessella.core.record import to_plain
from tessella.core.tiles import Tiles
from tessella.data.doctor import FIXES, Examination, Kind, examine, leave_out
from tessella.data.importing import ImportSettings, import_images
from tessella.data.tiling import cut
from tessella.data.unfinished import discard, left_of

TaskName = Annotated[
    str,
    Option(
        help="What to learn: classification, detection, instances, multilabel, regression, "
        "segmentation or volumes."
    ),
]
Source = Annotated[
    Path,
    Argument(
        help="A folder (class = subfolder), a list (path label), a table, or annotations "
        "of boxes and masks: COCO's JSON, YOLO's data.yaml, a folder of VOC or KITTI."
    ),
]
Size = Annotated[
    str | None,
    Option(
        help="Height x width to store, or one number (256); of volumes slices x height x width "
        "that a network sees (128)."
    ),
]
Window = Annotated[
    str | None,
    Option(
        help="Of volumes: values that become black and white, as -160:240; by default each "
        "volume's own percentiles."
    ),
]
MOST_LINES = 1000  # of a list in the terminal: a table of 4,000 rows takes seconds to lay out


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Import images into a dataset, examine it, and check annotations.\n\n"
        "Example: tessella data import flowers/ --out datasets/flowers --size 224",
        no_args_is_help=True,
    )
    group.command("import")(import_)
    group.command("discard")(discard_)
    group.command("doctor")(doctor)
    group.command("annotations")(check_annotations)
    group.command("tiles")(tiles)
    app.add_typer(group, name="data")


def import_(
    source: Source,
    out: Annotated[Path, Option(help="Folder of the dataset.")],
    task: TaskName = "classification",
    name: Annotated[str | None, Option(help="Name; the source's if not given.")] = None,
    size: Size = None,
    channels: Annotated[int, Option(help="1 grey, 3 RGB, or as the files have.")] = 3,
    depth: Annotated[int, Option(help="Bits a sample, 8 or 16.")] = 8,
    resize: Annotated[str, Option(help="squash, crop, fill or half_crop.")] = "squash",
    crop: Annotated[str | None, Option(help="Size that the network sees, if smaller.")] = None,
    holdout: Annotated[float, Option(help="Fraction held out for validation.")] = 0.1,
    test: Annotated[float, Option(help="Fraction held out for testing.")] = 0.0,
    val_folder: Annotated[Path | None, Option(help="Take the validation split from here.")] = None,
    test_folder: Annotated[Path | None, Option(help="Take the test split from here.")] = None,
    labels: Annotated[
        Path | None,
        Option(help="For a list, a table or pictures to draw on: class names, a line each."),
    ] = None,
    image_root: Annotated[
        Path | None, Option(help="For a list, a table or COCO: where its paths start.")
    ] = None,
    store: Annotated[
        str,
        Option(
            help="auto: JPEG of a fitting size, or that a GPU here decodes, as it is, others PNG; "
            "png; pixels: twice as large, but not to be decoded; original: JPEG as it is."
        ),
    ] = "auto",
    window: Window = None,
    seed: Annotated[int, Option(help="Decides which images are held out.")] = 0,
    workers: Annotated[int | None, Option(help="Processes; all cores if not given.")] = None,
    json: Json = False,
    events: Events = None,
) -> None:
    """Import images: check, resize, split, count.

    Example: tessella data import flowers/ --out datasets/flowers --size 256 --crop 224
    """
    with output(json_only=json, events=events, stopped=lambda: _stopped(out)) as out_:
        settings = ImportSettings(
            name=name,
            task=task,
            size=None if size is None else parse_sides(size),
            channels=channels,
            depth=depth,
            resize=parse_resize(resize),
            crop=None if crop is None else parse_size(crop),
            holdout=holdout,
            test=test,
            val_folder=None if val_folder is None else str(val_folder),
            test_folder=None if test_folder is None else str(test_folder),
            labels=None if labels is None else str(labels),
            image_root=None if image_root is None else str(image_root),
            store=cast(Store, store),
            window=None if window is None else parse_window(window),
            seed=seed,
            workers=workers,
        )
        dataset = import_images(source, out, settings, emit=out_.emit)
        shown = dataset_table(dataset, with_notes=False)
        out_.note(f"copies, leaks and contradictions: tessella data doctor {shlex.quote(str(out))}")
        out_.result({"dataset": str(out), **to_plain(dataset.info)}, shown)


def _stopped(out: Path) -> str:
    nbytes = left_of(out)
    if nbytes is None:
        return "stopped: nothing was kept"
    again = f"{nbytes / 1e6:,.0f} MB of it are kept, and the same command goes on there"
    return f"stopped: {again}; tessella data discard {shlex.quote(str(out))} removes them"


def discard_(
    out: Annotated[Path, Argument(help="The folder that the import was to make.")],
    json: Json = False,
) -> None:
    """Remove what an import that was stopped left: the hidden folder .NAME.import beside NAME.

    Example: tessella data discard datasets/flowers
    """
    with output(json_only=json) as out_:
        nbytes = discard(out)
        out_.result({"removed_bytes": nbytes}, f"removed {nbytes / 1e6:,.1f} MB")


def doctor(
    dataset: Annotated[Path, Argument(help="The dataset's folder.")],
    fix: Annotated[
        list[str] | None, Option(help=f"Leave these out of a new dataset: {', '.join(FIXES)}.")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder of that dataset.")] = None,
    groups: Annotated[int, Option(help="How many groups of images to list.", min=0)] = 20,
    json: Json = False,
    events: Events = None,
) -> None:
    """Find copies, leaks between splits, contradictions, odd sizes and lopsided classes.

    A fix writes a new dataset and leaves the old one as it is.

    Example: tessella data doctor datasets/flowers --fix leaks --fix copies --out datasets/clean
    """
    with output(json_only=json, events=events) as out_:
        kinds = _kinds(fix or [], out)
        there = Dataset(dataset)
        found = examine(there, workers=len(os.sched_getaffinity(0)), emit=out_.emit)
        plain = to_plain(found)
        if kinds and out is not None:
            gone = found.left_out(kinds)
            made = leave_out(there, gone, out)
            plain |= {"dataset": str(out), "left_out": sorted(gone)}
            less = counted(len(gone), "image")
            out_.note(f"{made!r} in {out}: {less} left out; {dataset} is as it was")
        rows = [(str(f.kind), f.text) for f in found.findings] or [("", "nothing found")]
        title = f"{there.info.name}: {counted(found.images, 'image')}"
        out_.result(plain, Group(grid(("finding", ""), rows, title=title), *_listed(found, groups)))


def check_annotations(
    source: Annotated[
        Path, Argument(help="COCO's JSON, a data.yaml, or a folder of COCO, YOLO, VOC or KITTI.")
    ],
    out: Annotated[Path | None, Option(help="Write what is good here, as COCO's JSON.")] = None,
    image_root: Annotated[Path | None, Option(help="COCO: where its paths start.")] = None,
    json: Json = False,
    events: Events = None,
) -> None:
    """Check annotations of boxes and masks: list what is broken, and write the rest as COCO.

    Example: tessella data annotations cars/data.yaml --out cars.json
    """
    with output(json_only=json, events=events) as out_:
        read = read_annotations(source, image_root=image_root)
        if out is not None:
            coco.write(out, read)
        things = [thing for picture in read.pictures for thing in picture.things]
        counts = Counter(thing.label for thing in things)
        plain = {
            "pictures": len(read.pictures),
            "things": {name: counts[k] for k, name in enumerate(read.classes)},
            "problems": to_plain(read.problems),
            "notes": list(read.notes),
        }
        rows = [(name, counts[k]) for k, name in enumerate(read.classes[:MOST_LINES])]
        title = f"{len(things):,} things in {len(read.pictures):,} pictures"
        told = [*read.notes, *(f"{p.path}: {p.what}" for p in read.problems[:MOST_LINES])]
        for what, count in (("classes", len(read.classes)), ("problems", len(read.problems))):
            if count > MOST_LINES:
                told.append(f"and {count - MOST_LINES:,} more {what}: --json has all")
        out_.result(plain, Group(grid(("class", "things"), rows, title=title), *map(Text, told)))


def tiles(
    source: Annotated[
        Path, Argument(help="Annotations as an import takes them, or images and masks.")
    ],
    out: Annotated[Path, Option(help="The folder to make.")],
    task: Annotated[
        str, Option(help="What to learn: detection, instances or segmentation.")
    ] = "detection",
    size: Annotated[str, Option(help="Height x width of a tile, or one number.")] = "512",
    overlap: Annotated[
        int, Option(help="Pixels that neighbours share: as many as things are wide.", min=0)
    ] = 64,
    image_root: Annotated[Path | None, Option(help="COCO: where its paths start.")] = None,
    json: Json = False,
    events: Events = None,
) -> None:
    """Cut large pictures and their boxes or masks into tiles, as a folder to import.

    Example: tessella data tiles harbour.json --out tiles --task detection --size 640 --overlap 96

    A holdout keeps all tiles of a picture together.
    """
    with output(json_only=json, events=events) as out_:
        height, width = parse_size(size)
        how = Tiles(height=height, width=width, overlap=overlap)
        made = cut(source, out, how, task=task, image_root=image_root, emit=out_.emit)
        first = made.folders.get("train") or next(iter(made.folders.values()))
        command = f"tessella data import {shlex.quote(str(first))} --task {task} --size {size}"
        if (made.channels, made.depth) != (3, 8):
            command += f" --channels {made.channels} --depth {made.depth}"
        for split in ("val", "test"):
            if split in made.folders and made.folders[split] != first:
                command += f" --{split}-folder {shlex.quote(str(made.folders[split]))}"
        plain = {
            "folders": {split: str(folder) for split, folder in made.folders.items()},
            "pictures": made.pictures,
            "tiles": made.tiles,
            "things": made.things,
            "skipped": to_plain(made.skipped),
        }
        title = f"{counted(made.pictures, 'picture')} in {counted(made.tiles, 'tile')}"
        rows = [(split or "all", str(folder)) for split, folder in made.folders.items()]
        listed = [Text(f"{s.path}: {s.reason}") for s in made.skipped[:MOST_LINES]]
        out_.result(plain, Group(grid(("split", "folder"), rows, title=title), *listed))
        out_.note(f"{command} --out datasets/{shlex.quote(out.name)}")


def _kinds(fix: list[str], out: Path | None) -> list[Kind]:
    kinds = [kind for kind in FIXES if kind in fix]
    if unknown := sorted(set(fix) - set(kinds)):
        raise UsageError(
            "these cannot be fixed by leaving images out",
            seen=", ".join(unknown),
            fix=f"use {', '.join(FIXES)}",
        )
    if kinds and out is None:
        raise UsageError("a fix writes a new dataset", fix="say where: --out datasets/clean")
    return kinds


def _listed(found: Examination, groups: int) -> list[Text]:
    """The first groups of each finding, an image a line."""
    lines = []
    for finding in found.findings:
        if finding.kind == "tiny":  # its text names the classes: no need for each of their images
            continue
        shown = finding.groups[:groups]
        lines += [Text(f"{finding.kind}: " + "\n  = ".join(group)) for group in shown]
        if len(finding.groups) > groups > 0:
            lines.append(Text(f"{finding.kind}: and {len(finding.groups) - groups:,} groups more"))
    return lines
