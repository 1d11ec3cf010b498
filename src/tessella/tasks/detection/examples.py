"""Targets of detection: boxes in pixels of the fitted picture, each with its class.

A *crowd* is a box in which no answer counts as wrong: as COCO marks groups, and as a thing becomes
of which the network sees too little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from tessella.annotations import coco, read_annotations
from tessella.annotations.files import size_of
from tessella.annotations.record import Picture
from tessella.core.errors import DataError
from tessella.core.preprocess import Preprocess, placement
from tessella.tasks import tables
from tessella.tasks.detection import table
from tessella.tasks.found import Found, Request, Source
from tessella.tasks.moves import Floats, Moves, still
from tessella.tasks.pieces import Piece, seen_in

NAMES = "classes"
SMOOTHED = False
PLACED = True
JOINED: tuple[str, ...] = ("mosaic", "paste")
VISIBLE = 0.3  # of a thing's area: where less is seen, nobody could say what it is
LEAST = 1.0  # pixels of a side that the network sees
APART = 0.5  # intersection over union: boxes of two equal pictures with less contradict
FIELDS = 6  # of a box in a batch: x0 y0 x1 y1 in fractions of the input, label, crowd
NOTHING = -1.0  # the label of a row that fills a batch up
LEAST_ROWS = 8  # for boxes of each picture in a batch

Boxes = npt.NDArray[np.float32]


def find(request: Request) -> Found:
    """Pictures with their boxes: COCO, YOLO, Pascal VOC or KITTI, as ``annotations`` reads them; or
    a table with a row a box."""
    if tables.is_table(request.source):
        return table.find(request)
    found = read_annotations(request.source, labels=request.labels, image_root=request.image_root)
    if not (found.bare or any(picture.things for picture in found.pictures)):
        raise DataError(
            "the annotations name no things",
            seen=f"{len(found.pictures):,} pictures in {request.source}; {' '.join(found.said())}",
            fix="give pictures with boxes; tessella data annotations lists what is broken",
        )
    if not found.bare and all(t.crowd for picture in found.pictures for t in picture.things):
        raise DataError(
            "the annotations have nothing but crowds, of which nothing is learned",
            seen=f"each thing in {request.source} is marked as a crowd or as difficult",
            fix="export them without that mark: iscrowd 0 in COCO, difficult 0 in Pascal VOC",
        )
    return Found(
        classes=found.classes,
        sources=tuple(Source(p.file, p.path, p, p.split) for p in found.pictures),
        notes=found.said(),
        bare=found.bare,
    )


def stored(target: Picture, file: str, record: Preprocess) -> dict[str, Any]:
    return placed(target, file, record)[0]


def placed(target: Picture, file: str, record: Preprocess) -> tuple[dict[str, Any], list[int]]:
    """The boxes where ``core.preprocess.fit`` places their picture.

    ``areas`` are those of masks, or else of boxes, in the picture's own pixels; ``zoom`` is how
    many of these a pixel of the fitted picture shows. ``view``: what an evaluated network sees of
    the fitted picture, top, left, height and width.

    Returns:
        What the dataset holds, and which of the picture's things are seen at all.
    """
    size = size_of(file)
    if isinstance(size, str):
        raise DataError(size)
    if (target.height, target.width) != size:
        said = (target.height, target.width)
        raise DataError("the annotations are for another size", seen=f"{said}, not {size}")
    place = placement(*size, record)
    left, top, right, bottom = place.box
    x, y = place.width / (right - left), place.height / (bottom - top)
    boxes = np.array([(t.x, t.y, t.x + t.width, t.y + t.height) for t in target.things])
    boxes = (boxes.reshape(-1, 4) - [left, top, left, top]) * [x, y, x, y]
    frame = (0.0, 0.0, float(place.width), float(place.height))
    cut, share = inside(boxes, frame)
    kept = np.flatnonzero(share > 0).tolist()
    moves = still(record)
    made = {
        "boxes": (cut[kept] + [place.left, place.top, place.left, place.top]).tolist(),
        "labels": [target.things[i].label for i in kept],
        "crowds": [target.things[i].crowd or bool(share[i] < VISIBLE) for i in kept],
        "areas": [float(coco.area_of(target.things[i], target) * share[i]) for i in kept],
        "zoom": 1 / (x * y),
        "size": [record.height, record.width],
        "view": [moves.top, moves.left, moves.height, moves.width],
    }
    return made, kept


def inside(
    boxes_N4: Floats, frame: tuple[float, float, float, float]
) -> tuple[Floats, npt.NDArray[np.float64]]:
    """Boxes cut at a frame x0 y0 x1 y1, and which share of each is left; 0 of less than a pixel."""
    low, high = np.array(frame[:2] * 2), np.array(frame[2:] * 2)
    cut = np.clip(boxes_N4, low, high)
    sides, whole = cut[:, 2:] - cut[:, :2], boxes_N4[:, 2:] - boxes_N4[:, :2]
    least = np.minimum(LEAST, whole)  # a thing that is smaller than a pixel is seen, too
    share = (sides / whole).prod(axis=1)
    return cut, np.where((sides >= least - 1e-9).all(axis=1) & (sides > 0).all(axis=1), share, 0.0)


def lacking(classes: Sequence[str]) -> str | None:
    return None if classes else "detection needs at least one class"


def column() -> pa.DataType:
    return pa.struct(
        [
            ("boxes", pa.list_(pa.list_(pa.float64()))),
            ("labels", pa.list_(pa.int64())),
            ("crowds", pa.list_(pa.bool_())),
            ("areas", pa.list_(pa.float64())),
            ("zoom", pa.float64()),
            ("size", pa.list_(pa.int64())),
            ("view", pa.list_(pa.int64())),
        ]
    )


def feature(classes: tuple[str, ...]) -> dict[str, Any]:
    def each(feature: dict[str, Any]) -> dict[str, Any]:
        return {"_type": "List", "feature": feature}

    number, whole = ({"_type": "Value", "dtype": d} for d in ("float64", "int64"))
    return {
        "boxes": each(each(number)),
        "labels": each({"_type": "ClassLabel", "names": list(classes)}),
        "crowds": each({"_type": "Value", "dtype": "bool"}),
        "areas": each(number),
        "zoom": number,
        "size": each(whole),
        "view": each(whole),
    }


def occurs(target: dict[str, Any] | Picture) -> Iterable[int]:
    if isinstance(target, dict):
        return sorted(set(target["labels"]))
    return sorted({thing.label for thing in target.things})


def renumbered(target: Picture, numbers: Sequence[int], classes: int) -> Picture:
    things = tuple(replace(thing, label=numbers[thing.label]) for thing in target.things)
    return replace(target, things=things)


def contradiction(targets: Sequence[dict[str, Any]]) -> Callable[[Sequence[int]], bool]:
    """Whether a thing of one picture has none of its class at its place in an equal picture."""

    def contradict(places: Sequence[int]) -> bool:
        first, *others = (targets[i] for i in places)
        return any(_differ(first, other) or _differ(other, first) for other in others)

    return contradict


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    for box, label in zip(one["boxes"], one["labels"], strict=True):
        alike = [b for b, k in zip(other["boxes"], other["labels"], strict=True) if k == label]
        if not alike or overlap(np.array([box]), np.array(alike)).max() < APART:
            return True
    return False


def overlap(one_N4: npt.NDArray[Any], other_M4: npt.NDArray[Any]) -> Floats:
    """Intersection over union of boxes x0 y0 x1 y1, [N, M]."""
    low = np.maximum(one_N4[:, None, :2], other_M4[None, :, :2])
    high = np.minimum(one_N4[:, None, 2:], other_M4[None, :, 2:])
    common = (high - low).clip(0).prod(axis=2)
    one, other = ((b[:, 2:] - b[:, :2]).prod(axis=1) for b in (one_N4, other_M4))
    return np.asarray(common / np.maximum(one[:, None] + other[None] - common, 1e-12))


def strata(targets: Sequence[Picture]) -> npt.NDArray[np.int64]:
    """The rarest of a picture's classes, as multilabel has it."""
    sets = [set(occurs(target)) for target in targets]
    counts = np.bincount([k for labels in sets for k in labels] or [0])
    rarest = [min(s, key=lambda k: (counts[k], k)) + 1 if s else 0 for s in sets]
    return np.array(rarest, np.int64)


class BoxSets:
    """The boxes of a split: those of image i are rows ``starts[i]`` to ``starts[i + 1]``.

    Attributes:
        boxes: x0 y0 x1 y1 in pixels of the fitted pictures, whose ``sizes`` [N, 2] are these.
        views: top, left, height and width of what an evaluated network sees, [N, 4].
        zooms: pixels of the picture's own that a pixel of the fitted one shows, [N].
    """

    def __init__(self, column: pa.ChunkedArray, classes: int) -> None:
        fields = {
            name: pa.compute.struct_field(column, name).combine_chunks()
            for name in ("boxes", "labels", "crowds", "areas", "zoom", "size", "view")
        }
        labels = fields["labels"]
        counts = pa.compute.list_value_length(labels)
        if any(values.null_count for values in fields.values()):
            raise ValueError("a row without boxes")
        for name in ("boxes", "crowds", "areas"):
            if not pa.compute.list_value_length(fields[name]).equals(counts):
                raise ValueError(f"boxes without a label each, or {name}")
        self.starts = np.concatenate([[0], np.cumsum(counts.to_numpy(zero_copy_only=False))])
        self.starts = self.starts.astype(np.int64)
        self.boxes = _rows(fields["boxes"].flatten(), 4).astype(np.float64)
        self.labels = _numbers(labels.flatten()).astype(np.int64)
        self.crowds = _numbers(fields["crowds"].flatten()).astype(bool)
        self.areas = _numbers(fields["areas"].flatten()).astype(np.float64)
        self.zooms = _numbers(fields["zoom"]).astype(np.float64)
        self.sizes = _rows(fields["size"], 2).astype(np.int64)
        self.views = _rows(fields["view"], 4).astype(np.int64)
        self._check(classes)

    def _check(self, classes: int) -> None:
        if len(self.labels) and not 0 <= self.labels.min() <= self.labels.max() < classes:
            raise ValueError(f"a box of no class: {self.labels.min()} to {self.labels.max()}")
        if len(self.sizes) and self.sizes.min() < 1:
            raise ValueError("a picture of no size")
        top, left, height, width = self.views.T
        sees = (top >= 0) & (left >= 0) & (height > 0) & (width > 0)
        sees &= (top + height <= self.sizes[:, 0]) & (left + width <= self.sizes[:, 1])
        finite = np.isfinite(self.zooms) & (self.zooms > 0)
        if not (sees & finite).all():
            raise ValueError("a view that does not lie in its picture")
        sizes = np.repeat(self.sizes[:, ::-1], np.diff(self.starts), axis=0)
        low, high = self.boxes[:, :2], self.boxes[:, 2:]
        good = (low >= 0).all(1) & (high > low).all(1) & (high <= sizes + 1e-6).all(1)
        if not (good & np.isfinite(self.areas)).all():  # NaN compares as false
            raise ValueError(f"a box outside of its picture: {self.boxes[~good][:1].tolist()}")

    def __len__(self) -> int:
        return len(self.starts) - 1

    def having(self, label: int) -> npt.NDArray[np.int64]:
        rows = np.flatnonzero(self.labels == label)
        return np.unique(np.searchsorted(self.starts, rows, side="right") - 1)

    def batch(self, indices: npt.NDArray[np.int64], moves: Sequence[Moves] | None = None) -> Boxes:
        """Boxes float32 [B, M, 6], M of the image with most or more; all others are filled up.

        M is one of few numbers, since code and a graph are made for each.
        A box is x0 y0 x1 y1 in fractions of what the network sees, its label, and 1 for a crowd.
        """
        made = []
        for place, i in enumerate(indices.tolist()):
            seen, _ = self.seen(i, self.still(i) if moves is None else moves[place])
            made.append(seen[:, :FIELDS])
        out = _nothing(len(made), max((len(m) for m in made), default=0))
        for row, boxes in zip(out, made, strict=True):
            row[: len(boxes)] = boxes
        return out

    def evaluated(self, index: int) -> Floats:
        """The boxes of an image that an evaluated network sees, and their areas: [M, 7].

        An area is the share that is seen of the thing's, in pixels of the picture's own.
        """
        return self.seen(index, self.still(index))[0]

    def still(self, index: int) -> Moves:
        """What an evaluated network sees of an image."""
        top, left, height, width = self.views[index].tolist()
        return Moves(top=top, left=left, height=height, width=width)

    def things(self, index: int) -> Floats:
        """The boxes of an image's things, without crowds, in pixels of the fitted image, [M, 4]."""
        mine = self._rows_of(index)
        return np.asarray(self.boxes[mine[~self.crowds[mine]]])

    def _rows_of(self, index: int) -> npt.NDArray[np.int64]:
        return np.arange(self.starts[index], self.starts[index + 1])

    def seen(self, index: int, moves: Moves) -> tuple[Floats, npt.NDArray[np.int64]]:
        """The boxes of an image as ``evaluated`` has them, moved; and of which row each is made."""
        rows = self._rows_of(index)
        boxes, left_over = self.boxes[rows], np.ones(len(rows))
        if moves.pieces:
            rows, boxes, left_over = self._joined(moves.pieces)
        height, width = self.sizes[index].tolist()
        moved, made_of = moves.boxes(boxes, (height, width))
        cut, share = inside(moved, (0.0, 0.0, float(moves.width), float(moves.height)))
        kept, rows, share = share > 0, rows[made_of], share * left_over[made_of]
        cut[:, [0, 2]] /= moves.width
        cut[:, [1, 3]] /= moves.height
        crowds = self.crowds[rows] | (share < VISIBLE)
        areas = self.areas[rows] * share
        columns = (cut, *(v[:, None] for v in (self.labels[rows], crowds, areas)))
        seen = np.concatenate(columns, axis=1, dtype=np.float64)[kept]
        return np.asarray(seen), rows[kept]

    def _joined(
        self, pieces: Sequence[Piece]
    ) -> tuple[npt.NDArray[np.int64], Floats, npt.NDArray[np.float64]]:
        """What a joined picture shows: rows, the boxes around what is seen, and shares of it."""
        rows = [self._rows_of(piece.index) for piece in pieces]
        found = [seen_in(pieces, place, self.boxes[mine]) for place, mine in enumerate(rows)]
        boxes, shares = (np.concatenate(parts) for parts in zip(*found, strict=True))
        kept = (boxes[:, 2:] - boxes[:, :2] >= LEAST).all(axis=1)
        return np.concatenate(rows)[kept], boxes[kept], shares[kept]


def _numbers(values: pa.Array) -> npt.NDArray[Any]:
    if values.null_count:
        raise ValueError("a box without all of its numbers")
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _rows(lists: pa.Array, width: int) -> npt.NDArray[Any]:
    """Lists of so many numbers each, as rows."""
    lengths = pa.compute.list_value_length(lists)
    if lists.null_count or pa.compute.sum(pa.compute.not_equal(lengths, width)).as_py():
        raise ValueError(f"a list that has not {width} numbers")
    return _numbers(lists.flatten()).reshape(-1, width)


def targets(column: pa.ChunkedArray, classes: int) -> BoxSets:
    return BoxSets(column, classes)


def blank(count: int, classes: int, size: Sequence[int]) -> Boxes:
    """A box in the middle of each picture."""
    out = _nothing(count, 1)
    out[:, 0] = 0.25, 0.25, 0.75, 0.75, 0.0, 0.0
    return out


def _nothing(count: int, boxes: int) -> Boxes:
    """Rows for so many boxes of each of ``count`` pictures, and up to twice as many, all empty."""
    out = np.zeros((count, max(LEAST_ROWS, 1 << (boxes - 1).bit_length()), FIELDS), np.float32)
    out[:, :, 4] = NOTHING
    return out
