"""The things in a picture, the surest first, each with its box and mask in the picture's pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tessella.annotations import rle
from tessella.core.pictures import Pixels
from tessella.core.task import TaskRecord
from tessella.tasks.detection import answers as boxes
from tessella.tasks.detection.answers import USUAL, thresholds, truth
from tessella.tasks.instances.cells import CELLS, PART, SIDE, counts_of, outlines
from tessella.tasks.task import Outputs, Query
from tessella.tasks.thing import Thing

VERB = "segment"
HEADER: tuple[str, ...] = (*boxes.HEADER, "pixels")
ALIKE = 0.8  # of two masks' cells, those in both over those in one: with so much they say the same
VEIL = 0.45  # of a mask's color over the picture

__all__ = [
    "HEADER", "USUAL", "VERB", "answer", "drawn", "lines", "marked", "said", "same", "things",
    "thresholds", "truth",
]  # fmt: skip


def answer(
    outputs: Outputs, labels: tuple[str, ...], record: TaskRecord, query: Query
) -> list[Any]:
    """Of [B, D, 4 + K + CELLS] the things at or above their thresholds, as detection tells them.

    ``mask`` is run lengths in COCO's compressed form, in the size of the picture that
    ``query.views`` tells of; without one it is of the box alone, ``SIDE`` · ``SIDE`` cells.
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
            around = view.around_picture(output[rows, :4].astype(np.float64))
        for one, row, box in zip(told, rows.tolist(), around.tolist(), strict=True):
            counts = counts_of(output[row, -CELLS:].reshape(SIDE, SIDE), box, size)
            one["mask"] = {"size": list(size), "counts": rle.compressed(counts).decode()}
    return answers


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
    mine = (one[rows, -CELLS:] >= PART).astype(np.float32)
    theirs = (other[others, -CELLS:] >= PART).astype(np.float32)
    common = mine @ theirs.T
    union = mine.sum(1)[:, None] + theirs.sum(1) - common
    return bool((alike & (common >= ALIKE * union)).any(axis=1).all())


def said(output: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    return boxes.said(output[:, :-CELLS], labels, record)


def drawn(picture: Pixels, answer: Any) -> Pixels:
    """The picture with each mask as a veil of its class's color, and detection's frames."""
    made = np.ascontiguousarray(picture).copy()
    for a in reversed(answer):
        mask = _mask(a)
        if mask.shape != made.shape[:2]:
            continue
        inside = mask.astype(bool)
        color = np.array(boxes.color_of(a["index"]))
        made[inside] = (made[inside] * (1 - VEIL) + color * VEIL).round().astype(np.uint8)
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


def _counts(one: dict[str, Any]) -> rle.Counts:
    return rle.expanded(one["mask"]["counts"].encode())


def _mask(one: dict[str, Any]) -> npt.NDArray[np.uint8]:
    return _decoded(one["mask"]["counts"].encode(), *one["mask"]["size"])


def _decoded(text: bytes, height: int, width: int) -> npt.NDArray[np.uint8]:
    """A mask; an empty one where the text does not hold one of this size."""
    if not rle.fits(text, height, width):
        return np.zeros((height, width), np.uint8)
    return rle.mask_of(rle.expanded(text), height, width)
