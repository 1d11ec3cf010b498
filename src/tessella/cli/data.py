"""``tessella data``: import images into a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tessella.cli.output import Events, Json, output
from tessella.cli.parsing import parse_resize, parse_size
from tessella.cli.tables import dataset_table
from tessella.core.record import to_plain
from tessella.data.importing import ImportSettings, import_images


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Import images into a dataset.\n\n"
        "Example: tessella data import flowers/ --out datasets/flowers --size 224",
        no_args_is_help=True,
    )
    group.command("import")(import_)
    group.callback()(lambda: None)
    app.add_typer(group, name="data")


def import_(
    source: Annotated[Path, Argument(help="A folder (class = subfolder) or a list: path label.")],
    out: Annotated[Path, Option(help="Folder of the dataset.")],
    name: Annotated[str | None, Option(help="Name; the source's if not given.")] = None,
    size: Annotated[str, Option(help="Height x width to store, or one number.")] = "256",
    channels: Annotated[int, Option(help="1 grey, 3 RGB, or as the files have.")] = 3,
    depth: Annotated[int, Option(help="Bits a sample, 8 or 16.")] = 8,
    resize: Annotated[str, Option(help="squash, crop, fill or half_crop.")] = "squash",
    crop: Annotated[str | None, Option(help="Size that the network sees, if smaller.")] = None,
    holdout: Annotated[float, Option(help="Fraction held out for validation.")] = 0.1,
    test: Annotated[float, Option(help="Fraction held out for testing.")] = 0.0,
    val_folder: Annotated[Path | None, Option(help="Take the validation split from here.")] = None,
    test_folder: Annotated[Path | None, Option(help="Take the test split from here.")] = None,
    labels: Annotated[Path | None, Option(help="For a list: class names, a line each.")] = None,
    image_root: Annotated[Path | None, Option(help="For a list: where its paths start.")] = None,
    seed: Annotated[int, Option(help="Decides which images are held out.")] = 0,
    workers: Annotated[int | None, Option(help="Processes; all cores if not given.")] = None,
    json: Json = False,
    events: Events = None,
) -> None:
    """Import images: check, resize, split, count.

    Example: tessella data import flowers/ --out datasets/flowers --size 256 --crop 224
    """
    with output(json_only=json, events=events) as out_:
        settings = ImportSettings(
            name=name,
            size=parse_size(size),
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
            seed=seed,
            workers=workers,
        )
        dataset = import_images(source, out, settings, emit=out_.emit)
        out_.result({"dataset": str(out), **to_plain(dataset.info)}, dataset_table(dataset))
