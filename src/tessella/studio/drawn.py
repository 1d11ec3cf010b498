"""Boxes that people draw in the studio: versions beside a dataset, which stays as it is.

A version is one saved picture, a line of a file; nothing is overwritten, so every earlier state can
be looked at and exported. Boxes are in pixels of the stored pictures.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tessella.annotations import coco
from tessella.annotations.record import Annotations, Picture, Thing
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.files import write_folder
from tessella.core.decoding import Decoder
from tessella.core.errors import ArtifactError, UsageError
from tessella.core.preprocess import encode

MOST_BOXES = 2_000  # of a picture
LEAST_SIDE = 1.0  # pixel
MOST_NUMBER = 1e9
FIELDS = 6

Box = tuple[float, float, float, float, int, int]  # x0 y0 x1 y1, class, 1 for a crowd


def checked(boxes: Any, classes: int, size: tuple[int, int]) -> tuple[Box, ...]:
    """What a browser sent as boxes in a picture of a height and a width.

    Raises:
        UsageError: it is something else, or a box is outside, too small or of no class.
    """
    height, width = size
    if not isinstance(boxes, list) or len(boxes) > MOST_BOXES:
        seen = f"{len(boxes):,} of them" if isinstance(boxes, list) else type(boxes).__name__
        raise UsageError(f"a picture has a list of at most {MOST_BOXES:,} boxes", seen=seen)
    made = []
    for box in boxes:
        numbers = isinstance(box, list) and len(box) == FIELDS and all(map(_is_number, box))
        if not numbers:
            raise UsageError("a box is six numbers", seen=str(box)[:80])
        x0, y0, x1, y1, label, crowd = box
        if label not in range(classes) or crowd not in (0, 1):
            raise UsageError("a box has a class of the dataset", seen=str(box)[:80])
        inside = x0 >= 0 and y0 >= 0 and x1 <= width + 1e-6 and y1 <= height + 1e-6
        if not inside or x1 - x0 < LEAST_SIDE or y1 - y0 < LEAST_SIDE:
            raise UsageError(
                f"a box lies in its picture of {height} × {width} and has sides of a pixel",
                seen=str(box)[:80],
                fix="draw it again",
            )
        made.append((float(x0), float(y0), float(x1), float(y1), int(label), int(crowd)))
    return tuple(made)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -MOST_NUMBER < value < MOST_NUMBER  # NaN is not


def stored(dataset: Dataset, split: str, index: int) -> tuple[Box, ...]:
    """The boxes that a dataset of detection itself has."""
    target = dataset.split(split)[index].label
    each = zip(target["boxes"], target["labels"], target["crowds"], strict=True)
    return tuple((x0, y0, x1, y1, int(k), int(crowd)) for (x0, y0, x1, y1), k, crowd in each)


class Drawn:
    """The versions of all datasets of a workspace, a file for each content hash."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()

    def save(self, dataset: Dataset, split: str, index: int, boxes: Any) -> int:
        """Add a version, checked; its number, from 1 on.

        Raises:
            UsageError: the boxes cannot be those of the picture.
        """
        record = dataset.preprocess
        if split not in dataset.info.splits or not 0 <= index < len(dataset.split(split)):
            raise UsageError("the dataset has no such image", seen=f"{split} {index}")
        made = checked(boxes, len(dataset.classes), (record.height, record.width))
        line = {"split": split, "index": index, "boxes": made, "time": time.time()}
        with self._lock:
            number = len(self._read(dataset)) + 1
            path = self._path(dataset)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        return number

    def count(self, dataset: Dataset) -> int:
        """How many versions there are."""
        return len(self._read(dataset))

    def of(
        self, dataset: Dataset, split: str, index: int, *, version: int | None = None
    ) -> tuple[Box, ...]:
        """The boxes of an image at a version; None: the newest, 0: the dataset's own."""
        return self._newest(dataset, version)(split, index)

    def _newest(
        self, dataset: Dataset, version: int | None
    ) -> Callable[[str, int], tuple[Box, ...]]:
        """The boxes of any image at a version, by its split and number; the file is read once."""
        lines = {(line["split"], line["index"]): line for line in self._read(dataset)[:version]}
        size = (dataset.preprocess.height, dataset.preprocess.width)

        def of(split: str, index: int) -> tuple[Box, ...]:
            line = lines.get((split, index))
            if line is None:
                return stored(dataset, split, index)
            return checked(line["boxes"], len(dataset.classes), size)

        return of

    def export(self, dataset: Dataset, out: Path) -> dict[str, Path]:
        """Write the newest version into a new folder: COCO's JSON for each split, and pictures.

        Raises:
            UsageError: the folder is there already.
        """
        if out.exists():
            raise UsageError("this version is exported already", seen=out)
        names = [name for name in dataset.info.splits if len(dataset.split(name))]

        def fill(folder: Path) -> None:
            decoder = Decoder(processes=1)
            try:
                for name in names:
                    coco.write(folder / f"{name}.json", self._split(dataset, name, folder, decoder))
            finally:
                decoder.close()

        write_folder(out, fill)
        return {name: out / f"{name}.json" for name in names}

    def _split(self, dataset: Dataset, name: str, folder: Path, decoder: Decoder) -> Annotations:
        """The pictures of a split with their boxes; the pictures are written, too."""
        record, pictures, boxes = dataset.preprocess, [], self._newest(dataset, None)
        (folder / "images" / name).mkdir(parents=True)
        for index, example in enumerate(dataset.split(name)):
            path = f"images/{name}/{index:06d}.png"
            content = encode(decoder(example.content, None, name=example.path))
            (folder / path).write_bytes(content)
            pictures.append(
                Picture(
                    file=str(folder / path),
                    path=path,
                    height=record.height,
                    width=record.width,
                    things=_things(boxes(name, index)),
                )
            )
        return Annotations(classes=dataset.classes, pictures=tuple(pictures), problems=())

    def _path(self, dataset: Dataset) -> Path:
        return self._folder / f"{dataset.info.content_hash[:24]}.jsonl"

    def _read(self, dataset: Dataset) -> list[dict[str, Any]]:
        """The versions; a last line that a crash has cut is none."""
        path = self._path(dataset)
        try:
            text = path.read_text()
        except FileNotFoundError:
            return []
        try:
            lines = [json.loads(line) for line in text.split("\n")[:-1]]
            if not all({"split", "index", "boxes"} <= set(line) for line in lines):
                raise ValueError("a line without boxes")
        except (ValueError, TypeError) as error:
            raise ArtifactError(
                "the drawn boxes cannot be read", seen=f"{error} in {path}", fix="remove the file"
            ) from error
        return lines


def _things(boxes: Sequence[Box]) -> tuple[Thing, ...]:
    return tuple(
        Thing(label=k, x=x0, y=y0, width=x1 - x0, height=y1 - y0, crowd=bool(crowd))
        for x0, y0, x1, y1, k, crowd in boxes
    )
