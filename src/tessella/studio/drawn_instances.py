"""Things that people outline on pictures of instances: each has a mask of its own.

Masks may overlap: what lies under another thing stays part of its own, as COCO has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessella.annotations import coco, rle
from tessella.annotations.record import Annotations, Picture, Thing
from tessella.artifacts.dataset import Dataset
from tessella.core.errors import UsageError
from tessella.studio import drawn_masks
from tessella.studio.drawn_boxes import LEAST_SIDE, folder_of
from tessella.studio.drawn_masks import Drawn, Size
from tessella.tasks.instances.examples import MOST as MOST_THINGS
from tessella.tasks.segmentation.examples import IGNORED
from tessella.tasks.view import View

NAME = "outlines"

__all__ = ["NAME", "checked", "folder_of", "proposed", "stored", "write"]


class Outlined(Drawn):
    """A thing with a mask of its own; ``crowd`` is 1 where nobody can tell its things apart."""

    crowd: int


def checked(things: Any, classes: int, size: Size) -> tuple[Outlined, ...]:
    """What a browser sent as the things of a picture of a height and a width.

    Raises:
        UsageError: it is something else, or a thing is outside, without a pixel, or of no class.
    """
    if isinstance(things, list) and len(things) > MOST_THINGS:
        seen = f"{len(things):,} of them"
        raise UsageError(f"a picture of instances has at most {MOST_THINGS:,} things", seen=seen)
    masks, crowds = things, []
    if isinstance(things, list) and all(isinstance(thing, dict) for thing in things):
        crowds = [thing.get("crowd", 0) for thing in things]
        masks = [{k: v for k, v in thing.items() if k != "crowd"} for thing in things]
    made = drawn_masks.checked(masks, classes, size)
    for thing, crowd in zip(made, crowds, strict=True):
        if thing["label"] == IGNORED or type(crowd) is not int or crowd not in (0, 1):
            raise UsageError("a thing has a class, and is a crowd or is none", seen=str(thing)[:80])
        if min(_box(thing, size)[2:]) < LEAST_SIDE:
            raise UsageError(
                "a thing is at least a pixel wide and high",
                seen=str(thing)[:80],
                fix="draw it again, or delete it",
            )
    return tuple(Outlined(**thing, crowd=crowd) for thing, crowd in zip(made, crowds, strict=True))


def _box(thing: Drawn, size: Size) -> tuple[float, float, float, float]:
    """The box x, y, width, height around a thing."""
    if "rle" in thing:
        return rle.box_of(rle.expanded(thing["rle"].encode()), size[0])
    xs, ys = thing["polygon"][0::2], thing["polygon"][1::2]
    return min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)


def stored(dataset: Dataset, split: str, index: int) -> tuple[Outlined, ...]:
    """The things that a dataset of instances itself has."""
    target = dataset.split(split)[index].label
    each = zip(target["labels"], target["masks"], target["crowds"], strict=True)
    return tuple(
        Outlined(label=int(label), rle=mask.decode(), crowd=int(crowd))
        for label, mask, crowd in each
    )


def proposed(told: Sequence[dict[str, Any]], classes: Sequence[str], view: View) -> list[Outlined]:
    """What a network answers of a picture (see ``tasks.instances.answers``) as things, the surest
    last; without what the dataset has no class for."""
    size = view.height, view.width
    things = [
        Outlined(label=classes.index(one["label"]), rle=one["mask"]["counts"], crowd=0)
        for one in reversed(told)
        if one["label"] in classes and one["mask"]["size"] == list(size)
    ]
    return [thing for thing in things if min(_box(thing, size)[2:]) >= LEAST_SIDE]


def write(
    folder: Path, split: str, dataset: Dataset, drawn: Sequence[tuple[str, Sequence[Outlined]]]
) -> str:
    """Write the things of a split, by the path of each picture, as COCO's JSON; its name."""
    height, width = size = dataset.preprocess.height, dataset.preprocess.width
    pictures = tuple(
        Picture(
            file=str(folder / path),
            path=path,
            height=height,
            width=width,
            things=tuple(_thing(thing, size) for thing in things),
        )
        for path, things in drawn
    )
    annotations = Annotations(classes=dataset.classes, pictures=pictures, problems=())
    coco.write(folder / f"{split}.json", annotations)
    return f"{split}.json"


def _thing(thing: Outlined, size: Size) -> Thing:
    x, y, width, height = _box(thing, size)
    return Thing(
        label=thing["label"],
        x=x,
        y=y,
        width=width,
        height=height,
        crowd=bool(thing["crowd"]),
        polygons=(tuple(thing["polygon"]),) if "polygon" in thing else (),
        rle=thing.get("rle", "").encode(),
    )
