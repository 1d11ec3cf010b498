"""Targets of instances: detection's boxes, each with a mask of the fitted picture's size.

A thing that has a box and no mask is a crowd: nobody can say whether an answer there is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from tessella.annotations import coco, rle
from tessella.annotations.record import Picture
from tessella.artifacts.dataset import SkippedFile
from tessella.core.count import counted
from tessella.core.errors import DataError
from tessella.core.preprocess import Preprocess
from tessella.tasks.detection import examples as boxes
from tessella.tasks.detection.examples import (
    FIELDS,
    NAMES,
    NOTHING,
    PLACED,
    SMOOTHED,
    contradiction,
    occurs,
    renumbered,
    strata,
)
from tessella.tasks.found import Found, Request
from tessella.tasks.instances.cells import cells_of
from tessella.tasks.moves import Floats, Moves
from tessella.tasks.segmentation.examples import fitted

LEARNED = 56  # cells along the side of a box, of a mask that is learned: twice those that are told
CELLS = LEARNED * LEARNED
MOST = 1000  # things of a picture: 13 MB of cells in a batch, for each of its pictures

JOINED: tuple[str, ...] = ()  # masks are decoded for one picture at a time
Mask = npt.NDArray[np.uint8]

__all__ = [
    "JOINED", "NAMES", "PLACED", "SMOOTHED", "MaskSets", "blank", "column", "contradiction",
    "feature", "find", "lacking", "occurs", "renumbered", "stored", "strata", "targets",
]  # fmt: skip


def find(request: Request) -> Found:
    """Pictures with boxes and masks: outlines or run lengths, as COCO and YOLO have them."""
    found = boxes.find(request)
    things = [thing for source in found.sources for thing in source.label.things]
    lost = sum(not (t.polygons or t.rle) for t in things)
    if things and lost == len(things):
        raise DataError(
            "the annotations have no masks",
            seen="; ".join((f"{counted(lost, 'box', 'boxes')} in {request.source}", *found.notes)),
            fix="give outlines or run lengths, or learn boxes alone: --task detection",
        )
    found = _without_crowded(found)
    if not lost:
        return found
    note = f"{lost:,} things have a box and no mask: what is answered there counts as neither"
    return replace(found, notes=(*found.notes, f"{note} right nor wrong"))


def _without_crowded(found: Found) -> Found:
    """Without pictures of more than ``MOST`` things: those left out would be learned as nothing."""
    crowded = [s for s in found.sources if len(s.label.things) > MOST]
    kept = tuple(s for s in found.sources if len(s.label.things) <= MOST)
    if not kept:
        raise DataError(
            "every picture has too many things for instances",
            seen=f"{len(crowded[0].label.things):,} things in {crowded[0].path}",
            fix=f"cut the pictures into parts of at most {MOST:,} things",
        )
    reasons = [f"{len(s.label.things):,} things: instances take {MOST:,}" for s in crowded]
    skipped = [SkippedFile(path=s.path, reason=r) for s, r in zip(crowded, reasons, strict=True)]
    return replace(found, sources=kept, skipped=(*found.skipped, *skipped))


def stored(target: Picture, file: str, record: Preprocess) -> dict[str, Any]:
    """Detection's boxes, and ``masks``: run lengths in the size of the fitted picture."""
    made, kept = boxes.placed(target, file, record)
    masks, crowds = [], []
    for place, crowd, number in zip(made["boxes"], made["crowds"], kept, strict=True):
        counts = coco.mask_counts(target.things[number], target)
        mask = np.zeros((record.height, record.width), np.uint8)
        if counts is not None:
            mask = fitted(rle.mask_of(counts, target.height, target.width), record) == 1
        if not mask.any():  # none, or too small for a pixel's middle
            left, top = (int(v) for v in place[:2])
            right, bottom = (int(np.ceil(v)) for v in place[2:])
            mask[top:bottom, left:right] = 1
        masks.append(rle.compressed(rle.counts_of(mask)))
        crowds.append(crowd or counts is None)
    return {**made, "crowds": crowds, "masks": masks}


def lacking(classes: Sequence[str]) -> str | None:
    return None if classes else "instances need at least one class"


def column() -> pa.DataType:
    return pa.struct([*boxes.column(), ("masks", pa.list_(pa.binary()))])


def feature(classes: tuple[str, ...]) -> dict[str, Any]:
    masks = {"_type": "List", "feature": {"_type": "Value", "dtype": "binary"}}
    return {**boxes.feature(classes), "masks": masks}


class MaskSets(boxes.BoxSets):
    """The boxes and masks of a split; masks are decoded when they are asked for."""

    def __init__(self, column: pa.ChunkedArray, classes: int) -> None:
        super().__init__(column, classes)
        lists = pa.compute.struct_field(column, "masks").combine_chunks()
        counts = pa.compute.list_value_length(lists).fill_null(-1).to_numpy(zero_copy_only=False)
        if not np.array_equal(counts, np.diff(self.starts)):
            raise ValueError("boxes without a mask each")
        if counts.max(initial=0) > MOST:
            raise ValueError(f"a picture of {counts.max():,} things")
        self._masks = lists.flatten()
        if self._masks.null_count:
            raise ValueError("a box without its mask")
        longest = pa.compute.max(pa.compute.binary_length(self._masks)).as_py() or 0
        if longest > rle.MAX_TEXT:
            raise ValueError(f"a mask of {longest:,} bytes")

    def batch(self, indices: npt.NDArray[np.int64], moves: Sequence[Moves] | None = None) -> Any:
        """Boxes float32 [B, M, 6 + CELLS], as detection's, each followed by its mask's cells.

        A cell is the share of its area that is the thing. A box that was turned lies close around
        its turned mask.

        Raises:
            DataError: a mask is not one of its picture's size.
        """
        made = []
        for place, index in enumerate(indices.tolist()):
            move = self.still(index) if moves is None else moves[place]
            sides = np.array([move.width, move.height] * 2)
            things = [
                np.concatenate([row[:FIELDS], cells_of(mask, row[:4] * sides, LEARNED).ravel()])
                for row, mask in self._moved(index, move)
            ]
            made.append(np.array(things, np.float32).reshape(-1, FIELDS + CELLS))
        most = max((len(m) for m in made), default=0)
        out = np.zeros((len(made), most, FIELDS + CELLS), np.float32)
        out[:, :, 4] = NOTHING
        for row, boxed in zip(out, made, strict=True):
            row[: len(boxed)] = boxed
        return out

    def shown(self, index: int) -> Iterator[Mask]:
        """The masks of the boxes ``evaluated(index)``, of what an evaluated network sees."""
        return (mask for _, mask in self._moved(index, self.still(index)))

    def counts(self, index: int) -> list[rle.Counts]:
        """The same masks as run lengths."""
        top, left, *seen = self.views[index].tolist()
        size = (int(self.sizes[index, 0]), int(self.sizes[index, 1]))
        if (top, left, *seen) != (0, 0, *size):
            return [rle.counts_of(mask) for mask in self.shown(index)]
        _, owners = self.seen(index, self.still(index))
        return self._together(owners, size) or [self._counts(r, size) for r in owners.tolist()]

    def _together(
        self, rows: npt.NDArray[np.int64], size: tuple[int, int]
    ) -> list[rle.Counts] | None:
        """The run lengths of masks, read in one go; None where these are too long or are wrong."""
        texts = self._masks.take(pa.array(rows)).to_pylist()
        if sum(map(len, texts)) > rle.MAX_TEXT:
            return None
        try:
            found = rle.expanded_each(texts)
        except ValueError:
            return None
        return found if all(counts.sum() == size[0] * size[1] for counts in found) else None

    def _moved(self, index: int, moves: Moves) -> Iterator[tuple[Floats, Mask]]:
        """Each box as ``seen`` has it, and its mask of the whole that the network sees.

        Of masks that are as large as their picture one is held at a time.
        """
        rows, owners = self.seen(index, moves)
        size = (int(self.sizes[index, 0]), int(self.sizes[index, 1]))
        for row, owner in zip(rows, owners.tolist(), strict=True):
            mask = moves.mask(self._mask(owner, size))
            if moves.angle or moves.zoom != 1.0:
                _tighten(row, mask)
            yield row, mask

    def _mask(self, row: int, size: tuple[int, int]) -> Mask:
        return rle.mask_of(self._counts(row, size), *size)

    def _counts(self, row: int, size: tuple[int, int]) -> rle.Counts:
        try:
            counts = rle.expanded(self._masks[row].as_py())
        except ValueError:
            counts = np.zeros(0, np.int64)
        if counts.sum() != size[0] * size[1]:
            raise DataError(
                "a dataset's mask has not the size of its picture",
                seen=f"mask {row}, a picture of {size[0]} × {size[1]}",
                fix="import the dataset again",
            )
        return counts


def _tighten(row: Floats, mask: Mask) -> None:
    """Draw a box, in fractions, close around the mask inside of it; without one it is a crowd."""
    height, width = mask.shape
    x0, y0, x1, y1 = row[:4] * [width, height, width, height]
    left, top = int(x0), int(y0)
    part = mask[top : int(np.ceil(y1)), left : int(np.ceil(x1))]
    ys, xs = (np.flatnonzero(part.any(axis)) for axis in (1, 0))
    if not len(ys):
        row[5] = 1
        return
    low, high = (left + xs[0], top + ys[0]), (left + xs[-1] + 1, top + ys[-1] + 1)
    row[:4] = np.array([*low, *high]) / [width, height, width, height]


def targets(column: pa.ChunkedArray, classes: int) -> MaskSets:
    return MaskSets(column, classes)


def blank(count: int, classes: int, size: Sequence[int]) -> Any:
    """A box in the middle of each picture, all of it the thing."""
    middle = boxes.blank(count, classes, size)
    cells = np.zeros((*middle.shape[:2], CELLS), np.float32)
    cells[:, 0] = 1
    return np.concatenate([middle, cells], axis=2)
