"""The things in a picture, the surest first, each with its box and mask in the picture's pixels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tessella.annotations import rle
from tessella.core.errors import InputError
from tessella.core.pictures import Pixels
from tessella.core.task import TaskRecord
from tessella.tasks.detection import answers as boxes
from tessella.tasks.detection.answers import USUAL, thresholds, truth
from tessella.tasks.detection.examples import FIELDS
from tessella.tasks.instances.cells import CELLS, PART, SIDE, counts_of, outlines
from tessella.tasks.task import Outputs, Query
from tessella.tasks.thing import Thing

VERB = "segment"
SLOW = True
HEADER: tuple[str, ...] = (*boxes.HEADER, "pixels")
ALIKE = 0.8  # of two masks' cells, those in both over those in one: with so much they say the same
MOST_COLUMNS = 1 << 21  # of pixels that the masks of an answer are drawn in: some 6 s
VEIL = 0.45  # of a mask's color over the picture

__all__ = [
    "HEADER", "SLOW", "USUAL", "VERB", "answer", "changes", "drawn", "lines", "marked", "said",
    "same", "taught", "things", "thresholds", "truth",
]  # fmt: skip


def answer(
    outputs: Outputs, labels: tuple[str, ...], record: TaskRecord, query: Query
) -> list[Any]:
    """Of [B, D, 4 + K + CELLS] the things at or above their thresholds, as detection tells them.

    ``mask`` is run lengths in COCO's compressed form, in the size of the picture that
    ``query.views`` tells of; without one it is of the box alone, ``SIDE`` · ``SIDE`` cells.

    Raises:
        InputError: so many things in so wide a picture would take minutes to draw.
    """
    answers = boxes.answer(outputs[..., :-CELLS], labels, record, query)
    classes = outputs.shape[2] - 4 - CELLS
    least_K = thresholds(record, classes)
    if query.threshold is not None:
        least_K = np.full(classes, query.threshold)
    for number, (output, told) in enumerate(zip(outputs, answers, strict=True)):
        rows = boxes.told(output[:, :-CELLS], least_K)[0][: len(told)]
        size, around = (SIDE, SIDE), np.tile([0.0, 0.0, SIDE, SIDE], (len(rows), 1))
        if query.views:
            view = query.views[number]
            size = (view.height, view.width)
            _require_drawable(len(rows), view.width)
            around = view.around_picture(output[rows, :4].astype(np.float64))
        for one, row, box in zip(told, rows.tolist(), around.tolist(), strict=True):
            counts = counts_of(output[row, -CELLS:].reshape(SIDE, SIDE), box, size)
            one["mask"] = {"size": list(size), "counts": rle.compressed(counts).decode()}
    return answers


def _require_drawable(things: int, width: int) -> None:
    if things * width > MOST_COLUMNS:
        raise InputError(
            "these are too many masks for so wide a picture",
            seen=f"{things} things, {width:,} pixels",
            fix=f"ask for fewer: top={MOST_COLUMNS // width}; or give parts of the picture",
        )


def lines(answer: Any) -> list[tuple[str, ...]]:
    if not answer:
        return [(*boxes.lines(answer)[0], "")]
    areas = [int(_counts(a)[1::2].sum()) for a in answer]
    told = zip(boxes.lines(answer), areas, strict=True)
    return [(*line, f"{area:,}") for line, area in told]


def same(one: Outputs, other: Outputs, record: TaskRecord) -> npt.NDArray[np.bool_]:
    """Whether every box that one tells has one like it in the other, with a mask like its own."""
    pairs = list(zip(one, other, strict=True))
    return np.array([_has(a, b, record) and _has(b, a, record) for a, b in pairs], bool)


def _has(one: Outputs, other: Outputs, record: TaskRecord) -> bool:
    alike, rows, others = boxes.alike(one[:, :-CELLS], other[:, :-CELLS], record)
    shared = _shared(one[rows, -CELLS:], other[others, -CELLS:])
    return bool((alike & (shared >= ALIKE)).any(axis=1).all())


def _shared(mine: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Of each pair of masks the cells in both over those in one; 1 where both are empty."""
    one, other = ((cells >= PART).astype(np.float32) for cells in (mine, theirs))
    common = one @ other.T
    union = one.sum(1)[:, None] + other.sum(1) - common
    return np.where(union > 0, common / np.maximum(union, 1), 1).astype(np.float32)


def changes(one: Outputs, other: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    """As detection's; and things whose masks are others in boxes that stayed."""
    words = boxes.changes(one[:, :-CELLS], other[:, :-CELLS], labels, record)
    alike, rows, others = boxes.alike(one[:, :-CELLS], other[:, :-CELLS], record)
    shared = np.where(alike, _shared(one[rows, -CELLS:], other[others, -CELLS:]), -1)
    best = shared.max(axis=1, initial=-1)
    drawn = [
        f"{labels[int(one[row, 4:-CELLS].argmax())]} drawn otherwise (overlap {share:.2f})"
        for row, share in zip(rows.tolist(), best.tolist(), strict=True)
        if 0 <= share < ALIKE
    ]
    return ", ".join(filter(None, [words, *drawn[: boxes.SHOWN]]))


def said(output: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    return boxes.said(output[:, :-CELLS], labels, record)


def drawn(picture: Pixels, answer: Any) -> Pixels:
    """The picture with each mask as a veil of its class's color, and detection's frames."""
    made = np.ascontiguousarray(picture).copy()
    for a in reversed(answer):
        mask = _mask(a)
        if mask.shape != made.shape[:2]:
            continue
        x0, y0, x1, y1 = a["box"]
        part = slice(int(y0), math.ceil(y1)), slice(int(x0), math.ceil(x1))
        _veil(made[part], mask[part].astype(bool), a["index"])
    return boxes.drawn(made, answer)


def things(answer: Any) -> tuple[Thing, ...]:
    return tuple(
        Thing(
            box=tuple(a["box"]),
            name=boxes.name_of(a),
            color=boxes.color_of(a["index"]),
            outlines=outlines(_mask(a)),
        )
        for a in answer
    )


def marked(target: dict[str, Any], labels: tuple[str, ...]) -> tuple[Thing, ...]:
    height, width = target["size"]
    found = []
    for thing, text in zip(boxes.marked(target, labels), target["masks"], strict=True):
        around = outlines(_decoded(text, height, width))
        found.append(Thing(box=thing.box, name=thing.name, color=thing.color, outlines=around))
    return tuple(found)


def taught(picture: Pixels, target: Any, labels: tuple[str, ...]) -> Pixels:
    """The picture with detection's frames, and in each the cells of its mask as a veil."""
    import cv2  # not above: a plan is loaded without OpenCV, which holds 15 MB

    made = np.ascontiguousarray(picture).copy()
    height, width = made.shape[:2]
    for row in target:
        x0, y0, x1, y1 = np.round(row[:4] * [width, height, width, height]).astype(int).tolist()
        if row[4] < 0 or x1 <= x0 or y1 <= y0:
            continue
        side = math.isqrt(len(row) - FIELDS)
        cells = row[FIELDS:].reshape(side, side).astype(np.float32)
        inside = cv2.resize(cells, (x1 - x0, y1 - y0)) >= PART
        _veil(made[y0:y1, x0:x1], inside, int(row[4]))
    return boxes.taught(made, target[:, :FIELDS], labels)


def _veil(picture: Pixels, inside: npt.NDArray[np.bool_], index: int) -> None:
    """Lay a class's color over a part of the picture."""
    color = np.array(boxes.color_of(index))
    picture[inside] = (picture[inside] * (1 - VEIL) + color * VEIL).round().astype(np.uint8)


def _counts(one: dict[str, Any]) -> rle.Counts:
    return rle.expanded(one["mask"]["counts"].encode())


def _mask(one: dict[str, Any]) -> npt.NDArray[np.uint8]:
    return _decoded(one["mask"]["counts"].encode(), *one["mask"]["size"])


def _decoded(text: bytes, height: int, width: int) -> npt.NDArray[np.uint8]:
    """A mask; an empty one where the text does not hold one of this size."""
    if not rle.fits(text, height, width):
        return np.zeros((height, width), np.uint8)
    return rle.mask_of(rle.expanded(text), height, width)
