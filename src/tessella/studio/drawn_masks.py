"""Masks that people draw on pictures of a segmentation: checked, as the dataset has them, painted.

A picture's mask is drawn as a list of things, an outline or the pixels of a brush each; later ones
lie over earlier ones. Pixels on which nothing lies are background where the dataset's first class
is called so, and of no class otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import cv2
import numpy as np
import numpy.typing as npt

from tessella.annotations import coco, rle
from tessella.annotations.check import MAX_LENGTH
from tessella.annotations.record import Annotations, Picture, Thing
from tessella.artifacts.dataset import Dataset
from tessella.core.errors import UsageError
from tessella.studio.drawn_boxes import is_number
from tessella.tasks.segmentation.examples import IGNORED, decoded, encoded, is_ground
from tessella.tasks.view import View

NAME = "masks"
MOST_THINGS = 2_000  # of a picture
MOST_POINTS = 4_096  # of an outline
MOST_RUNS = 1 << 22  # characters of all run lengths of a picture
MOST_WORK = 1 << 31  # things times pixels: painting them takes a second
MOST_APART = 300  # patches of a mask that are things of their own
SPECK = 1 / 4_000  # of a picture: a network's smaller patches are not proposed

Mask = npt.NDArray[np.uint8]
Size = tuple[int, int]  # height and width


class Drawn(TypedDict):
    """A thing: its class, or 255 for none; and its outline x0 y0 x1 y1 …, or its run lengths."""

    label: int
    polygon: NotRequired[list[float]]
    rle: NotRequired[str]


def ground_of(classes: Sequence[str]) -> int:
    """The class of pixels on which nothing was drawn."""
    return 0 if is_ground(classes[0]) else IGNORED


def checked(things: Any, classes: int, size: Size) -> tuple[Drawn, ...]:
    """What a browser sent as the things of a picture of a height and a width.

    Raises:
        UsageError: it is something else, or a thing is outside, too large, or of no class.
    """
    most = min(MOST_THINGS, MOST_WORK // (size[0] * size[1]))
    if not isinstance(things, list) or len(things) > most:
        seen = f"{len(things):,} of them" if isinstance(things, list) else type(things).__name__
        raise UsageError(f"this picture has a list of at most {most:,} things", seen=seen)
    made = tuple(_checked(thing, classes, size) for thing in things)
    runs = sum(len(thing.get("rle", "")) for thing in made)
    length = sum(_length(thing["polygon"]) for thing in made if "polygon" in thing)
    if runs > MOST_RUNS or length > MAX_LENGTH:
        seen = f"{runs:,} characters of run lengths, outlines of {length:,.0f} pixels"
        raise UsageError("the masks of a picture are too ragged to be drawn", seen=seen)
    return made


def _checked(thing: Any, classes: int, size: Size) -> Drawn:
    height, width = size
    if not isinstance(thing, dict) or set(thing) not in ({"label", "polygon"}, {"label", "rle"}):
        raise UsageError("a thing is a class with an outline or a mask", seen=str(thing)[:80])
    label = thing["label"]
    if type(label) is not int or (label not in range(classes) and label != IGNORED):
        raise UsageError("a thing has a class of the dataset", seen=str(label)[:40])
    if "rle" in thing:
        text = thing["rle"]
        fits = isinstance(text, str) and text.isascii() and rle.fits(text.encode(), height, width)
        if not fits:
            raise UsageError(f"a mask has {height} × {width} pixels", seen=str(text)[:40])
        return Drawn(label=label, rle=text)
    points = thing["polygon"]
    if not isinstance(points, list) or len(points) % 2 or not 6 <= len(points) <= 2 * MOST_POINTS:
        seen = f"{len(points):,} numbers" if isinstance(points, list) else type(points).__name__
        raise UsageError(f"an outline has 3 to {MOST_POINTS:,} points", seen=seen)
    if not all(map(is_number, points)):
        raise UsageError("an outline is pairs of finite numbers", seen=str(points)[:80])
    xs, ys = np.asarray(points[0::2], float), np.asarray(points[1::2], float)
    slack = 1e-6
    inside = min(xs.min(), ys.min()) >= -slack and xs.max() <= width + slack
    if not inside or ys.max() > height + slack:
        seen = f"x {xs.min():.6g} to {xs.max():.6g}, y {ys.min():.6g} to {ys.max():.6g}"
        raise UsageError(f"an outline lies in its picture of {height} × {width}", seen=seen)
    return Drawn(label=label, polygon=[float(v) for v in points])


def _length(points: Sequence[float]) -> float:
    """The pixels along an outline, across and down: drawing it walks them."""
    corners = np.reshape(points, (-1, 2))
    return float(np.abs(corners - np.roll(corners, 1, axis=0)).sum())


def stored(dataset: Dataset, split: str, index: int) -> tuple[Drawn, ...]:
    """The mask that a dataset of segmentation itself has, as things."""
    mask = decoded(dataset.split(split)[index].label["mask"])
    return things_of(mask, ground_of(dataset.classes))


def things_of(mask: Mask, ground: int, *, least: int = 1) -> tuple[Drawn, ...]:
    """The connected patches of a mask as things of their own, or, where there are hundreds of them,
    each class as one thing.

    Args:
        least: pixels of a patch; smaller ones are left out.
    """
    height, width = mask.shape
    counts = np.bincount(mask.ravel(), minlength=256)
    patches = {
        int(k): cv2.connectedComponentsWithStats((mask == k).astype(np.uint8))[1:3]
        for k in np.flatnonzero(counts)
        if k != ground
    }
    apart = sum(len(stats) - 1 for _, stats in patches.values()) <= MOST_APART
    found = []
    for label, (numbers, stats) in patches.items():
        kept = stats[:, cv2.CC_STAT_AREA] >= least
        kept[0] = False  # what is of another class
        if apart:
            made = [
                rle.of_part(numbers[y : y + h, x : x + w] == n, y, x, height, width)
                for n in np.flatnonzero(kept).tolist()
                for x, y, w, h in [stats[n, : cv2.CC_STAT_AREA].tolist()]
            ]
        else:
            made = [rle.counts_of(kept[numbers])] if kept.any() else []
        found += [Drawn(label=label, rle=rle.compressed(counts).decode()) for counts in made]
    return tuple(found)


def proposed(told: Sequence[dict[str, Any]], classes: Sequence[str], view: View) -> list[Drawn]:
    """What a network answers of a picture (see ``tasks.segmentation.answers``) as things.

    Patches of a few pixels are left out, and what the dataset has no class for. Where the network
    did not see the picture, nothing is proposed.
    """
    ground = ground_of(classes)
    mask = np.full((view.height, view.width), ground, np.uint8)
    left, top, right, bottom = view.around_picture(np.array([[0.0, 0.0, 1.0, 1.0]]))[0]
    for one in told:
        if one["label"] not in classes:
            continue
        height, width = one["mask"]["size"]
        inside = rle.mask_of(rle.expanded(one["mask"]["counts"].encode()), height, width)
        rows = _cells(view.height, top, bottom, height)
        columns = _cells(view.width, left, right, width)
        # of the cell after the last, which is empty, are the pixels that the network did not see
        placed = np.pad(inside, ((0, 1), (0, 1)))[np.ix_(rows, columns)]
        mask[placed.astype(bool)] = classes.index(one["label"])
    return list(things_of(mask, ground, least=max(1, round(SPECK * mask.size))))


def _cells(pixels: int, start: float, end: float, count: int) -> npt.NDArray[np.intp]:
    """In which of so many equal cells from ``start`` to ``end`` the middle of each pixel lies; in
    none: ``count``."""
    cells = np.floor((np.arange(pixels) + 0.5 - start) * count / (end - start)).astype(np.intp)
    return np.where((cells >= 0) & (cells < count), cells, count)


def painted(things: Sequence[Drawn], classes: Sequence[str], size: Size) -> Mask:
    """The class of each pixel of a picture, as a dataset's mask has it."""
    flat = np.full(size[0] * size[1], ground_of(classes), np.uint8)
    for thing in things:
        first, inside = _along(thing, size)
        flat[first : first + len(inside)][inside] = thing["label"]
    return np.ascontiguousarray(flat.reshape(size[::-1]).T)


def _along(thing: Drawn, size: Size) -> tuple[int, npt.NDArray[np.bool_]]:
    """Where a thing begins, column by column, and which pixels from there to its end are in it."""
    if "polygon" in thing:
        counts = rle.of_polygons([thing["polygon"]], *size)
    else:
        counts = rle.expanded(thing["rle"].encode())
    counts = counts[: len(counts) // 2 * 2]  # what is behind the last pixel is left out
    within = np.arange(len(counts)) % 2 == 1
    return int(counts[:1].sum()), np.repeat(within[1:], counts[1:])


def folder_of(split: str) -> str:
    """Where the pictures of a split go in an export."""
    return f"{split}/images"


def write(
    folder: Path, split: str, dataset: Dataset, drawn: Sequence[tuple[str, Sequence[Drawn]]]
) -> str:
    """Write the masks of a split, by the path of each picture, beside the pictures; their folder.

    Where the first class is the background, they are also written as COCO's JSON.
    """
    classes, record = dataset.classes, dataset.preprocess
    size = record.height, record.width
    (folder / split / "masks").mkdir()
    (folder / split / "classes.txt").write_text("".join(f"{name}\n" for name in classes))
    pictures = []
    for path, things in drawn:
        content = encoded(painted(things, classes, size))
        (folder / split / "masks" / Path(path).name).write_bytes(content)
        seen = tuple(_seen(things, size))
        pictures.append(
            Picture(file=str(folder / path), path=path, height=size[0], width=size[1], things=seen)
        )
    if ground_of(classes) == 0:
        annotations = Annotations(classes=classes[1:], pictures=tuple(pictures), problems=())
        coco.write(folder / f"{split}.json", annotations)
    return split


def _seen(things: Sequence[Drawn], size: Size) -> Iterator[Thing]:
    """What can be seen of each thing under the later ones: COCO's form has no order."""
    owner = np.full(size[0] * size[1], -1, np.int32)
    places = [_along(thing, size) for thing in things]
    for number, (first, inside) in enumerate(places):
        owner[first : first + len(inside)][inside] = number
    for number, (thing, (first, inside)) in enumerate(zip(things, places, strict=True)):
        visible = owner[first : first + len(inside)] == number
        if thing["label"] == 0 or not visible.any():
            continue
        counts = rle.of_part(visible[:, None], first, 0, len(owner), 1)
        x, y, width, height = rle.box_of(counts, size[0])
        whole = "polygon" in thing and bool((visible == inside).all())
        crowd = thing["label"] == IGNORED
        yield Thing(
            label=0 if crowd else thing["label"] - 1,
            x=x,
            y=y,
            width=width,
            height=height,
            crowd=crowd,
            polygons=(tuple(thing["polygon"]),) if whole else (),
            rle=b"" if whole else rle.compressed(counts),
        )
