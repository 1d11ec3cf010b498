"""Average precision of boxes as COCO counts it, of each class and by the size of things."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessella.core.record import to_plain
from tessella.core.task import TaskRecord
from tessella.tasks.detection.answers import USUAL
from tessella.tasks.detection.errors import FIELDS, match, thresholds
from tessella.tasks.detection.examples import BoxSets
from tessella.tasks.detection.head import MOST
from tessella.tasks.detection.precision import (
    EVERY_SIZE,
    SIZES,
    Bools,
    ClassMatches,
    Ints,
    There,
    Told,
    matched,
)
from tessella.tasks.known import Floats, mean_known
from tessella.tasks.task import Resampled, Rows

HALF, THREE_QUARTERS = 0, 5  # of the overlaps 0.50, 0.55, … 0.95
COUNTED = False


@dataclass(frozen=True, kw_only=True)
class ClassReport:
    """One class: average precision over overlaps 0.50 to 0.95, and at 0.50.

    Attributes:
        threshold: the score at which F1 is highest, at an overlap of one half.
        support: things of the class; None of a measure: there are none.
    """

    label: str
    average_precision: float | None
    at_half: float | None
    recall: float | None
    threshold: float
    support: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """COCO's measures of a split; those that have nothing to count are None, and not logged."""

    count: int
    map: float
    map50: float
    map75: float
    recall: float
    small: float | None
    medium: float | None
    large: float | None
    classes: tuple[ClassReport, ...]
    resampled: Resampled = field(repr=False, compare=False)

    @property
    def values(self) -> dict[str, float]:
        found = {n: getattr(self, n) for n in ("map", "map50", "map75", "recall", *SIZES)}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def numbers(self) -> dict[str, tuple[float, ...]]:
        return {"threshold": tuple(c.threshold for c in self.classes)}

    def to_json(self) -> dict[str, Any]:
        return {k: to_plain(v) for k, v in vars(self).items() if k != "resampled"}

    def table(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        return ("class", "things", "AP", "AP at 0.5", "recall", "threshold"), [
            (c.label, c.support, c.average_precision, c.at_half, c.recall, c.threshold)
            for c in self.classes
        ]


def width(classes: int) -> int:
    return MOST * FIELDS


def rows(outputs: Tensor, targets: Tensor, classes: int) -> Tensor:
    """The ``MOST`` surest pairs of a box and a class of each image, [B, MOST · FIELDS]."""
    scores_BP = outputs[..., 4:].flatten(1)
    found = scores_BP.topk(min(MOST, scores_BP.shape[1]), dim=1)
    box, label = found.indices // classes, found.indices % classes
    boxes = outputs[..., :4].gather(1, box[:, :, None].expand(-1, -1, 4))
    told = torch.cat([boxes, found.values[:, :, None], label[:, :, None].to(boxes)], 2)
    # a number that is none must not pass unseen because its score is low
    told = torch.where(outputs.flatten(1).isfinite().all(1)[:, None, None], told, torch.nan)
    return told.flatten(1)


def measure(rows_NR: Rows, targets: BoxSets, labels: tuple[str, ...]) -> Evaluation:
    """The ``Evaluation`` of rows N×(MOST · FIELDS)."""
    return evaluation(matched_boxes(rows_NR, targets, len(labels)), len(targets), labels)


def matched_boxes(rows_NR: Rows, targets: BoxSets, classes: int) -> list[ClassMatches]:
    """Everything told with what it hits, by class."""
    boxes, there = things(targets)
    told, about = _told(rows_NR, targets)
    shares = functools.partial(_shares, about, boxes, there.crowds)
    return matched(there, told, classes, shares)


def drawn(found: list[ClassMatches], drawn_NS: Floats) -> dict[str, Floats]:
    """Each measure of draws of the images, [S]; NaN where there is nothing to count."""
    return _measures([of_class.precisions(drawn_NS) for of_class in found])


def _measures(made: list[tuple[Floats, Floats]]) -> dict[str, Floats]:
    """The measures of each class's average precision [A, T, S] and recall [T, S]."""
    average_KATS = np.stack([average for average, _ in made])
    recall_KTS = np.stack([recall for _, recall in made])
    every_KTS = average_KATS[:, EVERY_SIZE]
    measures = {
        "map": every_KTS, "map50": every_KTS[:, HALF], "map75": every_KTS[:, THREE_QUARTERS],
        "recall": recall_KTS,
    }  # fmt: skip
    draws = every_KTS.shape[2]
    values = {n: np.nan_to_num(mean_known(v.reshape(-1, draws))) for n, v in measures.items()}
    of_size = {n: average_KATS[:, a].reshape(-1, draws) for a, n in enumerate(SIZES, start=1)}
    return values | {name: mean_known(value) for name, value in of_size.items()}


def evaluation(found: list[ClassMatches], count: int, labels: tuple[str, ...]) -> Evaluation:
    """What COCO's tables say of ``count`` images."""
    whole_N1 = np.ones((count, 1))
    made = [of_class.precisions(whole_N1) for of_class in found]
    values = {name: float(value[0]) for name, value in _measures(made).items()}
    small, medium, large = (_known(values.pop(name)) for name in SIZES)
    reports = []
    for label, of_class, (average_AT1, recall_T1) in zip(labels, found, made, strict=True):
        reports.append(
            ClassReport(
                label=label,
                average_precision=_known(average_AT1[EVERY_SIZE].mean()),
                at_half=_known(average_AT1[EVERY_SIZE, HALF, 0]),
                recall=_known(recall_T1.mean()),
                threshold=_threshold(*of_class.curve(HALF)),
                support=int(of_class.counts_AG[EVERY_SIZE].sum()),
            )
        )
    return Evaluation(
        count=count,
        small=small,
        medium=medium,
        large=large,
        classes=tuple(reports),
        resampled=functools.partial(drawn, found),
        **values,
    )


def _known(value: float) -> float | None:
    """A measure; None where there is nothing to count."""
    return None if np.isnan(value) else float(value)


def losses(rows_NR: Rows, targets: BoxSets, record: TaskRecord, classes: int) -> Floats:
    """1 − F1 of each image's boxes at the thresholds of their classes and an overlap of one half; 0
    where nothing is told of a picture with nothing."""
    return match(rows_NR, targets).losses(thresholds(record, classes), len(rows_NR))


def _threshold(precision_R: Floats, scores_R: Floats) -> float:
    """The score at which F1 is highest, of precision and score at recalls 0.00, 0.01, … 1.00."""
    recall_R = np.linspace(0, 1, len(precision_R))
    f1_R = 2 * precision_R * recall_R / np.maximum(precision_R + recall_R, 1e-12)
    if not f1_R.max() > 0:
        return USUAL
    return float(np.clip(scores_R[f1_R.argmax()], 1e-6, 1.0))


def _scales(targets: BoxSets) -> Floats:
    """What brings fractions of an image's input to pixels of the picture's own, [N, 4].

    Sides that ``squash`` has scaled differently share their mean, which keeps every area and every
    overlap.
    """
    sides = targets.views[:, [3, 2, 3, 2]] * np.sqrt(targets.zooms)[:, None]
    return np.asarray(sides, np.float64)


def things(targets: BoxSets) -> tuple[Floats, There]:
    """The things of a split, and their boxes: x, y, width and height in the picture's pixels."""
    seen = [targets.evaluated(image) for image in range(len(targets))]
    images = np.repeat(np.arange(len(seen)), [len(boxes) for boxes in seen])
    flat = np.concatenate([np.zeros((0, 7)), *seen])
    there = There(
        images=images,
        labels=flat[:, 4].astype(np.int64),
        areas=flat[:, 6],
        crowds=flat[:, 5] > 0,
    )
    return _placed(flat[:, :4], images, targets), there


def _told(rows_NR: Rows, targets: BoxSets) -> tuple[Told, Floats]:
    """All that is told, and the boxes of it."""
    told = rows_NR.reshape(len(rows_NR), -1, FIELDS).astype(np.float64)
    images, places = np.nonzero(told[..., 4] > 0)
    flat = told[images, places]
    boxes = _placed(flat[:, :4], images, targets)
    areas = boxes[:, 2] * boxes[:, 3]
    labels = flat[:, 5].astype(np.int64)
    return Told(images=images, labels=labels, areas=areas, scores=flat[:, 4]), boxes


def _placed(boxes_M4: Floats, images_M: Ints, targets: BoxSets) -> Floats:
    boxes = boxes_M4 * _scales(targets)[images_M]
    boxes[:, 2:] -= boxes[:, :2]
    return boxes


def _shares(
    told_D4: Floats, there_G4: Floats, crowds_G: Bools, told_M: Ints, there_M: Ints
) -> Floats:
    """The overlaps of so many pairs of boxes, in COCO's order of operations: of a crowd the share
    of the told box."""
    one, other = told_D4[told_M], there_G4[there_M]
    low = np.maximum(one[:, :2], other[:, :2])
    high = np.minimum(one[:, :2] + one[:, 2:], other[:, :2] + other[:, 2:])
    sides = (high - low).clip(0)
    common = sides[:, 0] * sides[:, 1]
    area, others = (b[:, 2] * b[:, 3] for b in (one, other))
    either = np.where(crowds_G[there_M], area, area + others - common)
    return np.asarray(common / np.where(either > 0, either, 1.0))
