"""Boxes that people draw on pictures of a detection: checked, read from a dataset, written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessella.annotations import coco
from tessella.annotations.record import Annotations, Picture, Thing
from tessella.artifacts.dataset import Dataset
from tessella.core.errors import UsageError
from tessella.tasks.view import View

NAME = "boxes"
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
        numbers = isinstance(box, list) and len(box) == FIELDS and all(map(is_number, box))
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


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and -MOST_NUMBER < value < MOST_NUMBER  # NaN is not


def stored(dataset: Dataset, split: str, index: int) -> tuple[Box, ...]:
    """The boxes that a dataset of detection itself has."""
    target = dataset.split(split)[index].label
    each = zip(target["boxes"], target["labels"], target["crowds"], strict=True)
    return tuple((x0, y0, x1, y1, int(k), int(crowd)) for (x0, y0, x1, y1), k, crowd in each)


def proposed(told: Sequence[dict[str, Any]], classes: Sequence[str], view: View) -> list[Any]:
    """What a network answers of a picture (see ``tasks.detection.answers``) as boxes with a score
    each; without what the dataset has no class for, and what is less than a pixel."""
    found = []
    for one in told:
        if one["label"] not in classes:
            continue
        label = classes.index(one["label"])
        try:
            checked([[*one["box"], label, 0]], len(classes), (view.height, view.width))
        except UsageError:
            continue
        found.append([*one["box"], label, one["score"]])
    return found


def folder_of(split: str) -> str:
    """Where the pictures of a split go in an export."""
    return f"images/{split}"


def write(
    folder: Path, split: str, dataset: Dataset, drawn: Sequence[tuple[str, Sequence[Box]]]
) -> str:
    """Write the boxes of a split, by the path of each picture, as COCO's JSON; its name."""
    record = dataset.preprocess
    pictures = tuple(
        Picture(
            file=str(folder / path),
            path=path,
            height=record.height,
            width=record.width,
            things=_things(boxes),
        )
        for path, boxes in drawn
    )
    annotations = Annotations(classes=dataset.classes, pictures=pictures, problems=())
    coco.write(folder / f"{split}.json", annotations)
    return f"{split}.json"


def _things(boxes: Sequence[Box]) -> tuple[Thing, ...]:
    return tuple(
        Thing(label=k, x=x0, y=y0, width=x1 - x0, height=y1 - y0, crowd=bool(crowd))
        for x0, y0, x1, y1, k, crowd in boxes
    )
