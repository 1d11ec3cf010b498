"""Average precision of boxes as COCO counts it, of each class and by the size of things.

Counted by faster-coco-eval, whose numbers are those of pycocotools in a tenth of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchvision.ops import box_iou

from tessella.core.record import to_plain
from tessella.tasks.detection.answers import USUAL
from tessella.tasks.detection.errors import FIELDS
from tessella.tasks.detection.examples import BoxSets
from tessella.tasks.detection.head import MOST
from tessella.tasks.task import Rows

SIZES = ("small", "medium", "large")  # below 32², below 96², and above, in pixels of the picture's
HALF_SURE = 0.5  # the score and the overlap from which a box counts in an image's loss
HALF, THREE_QUARTERS = 0, 5  # of the overlaps 0.50, 0.55, … 0.95
EVERY_SIZE, ALL = 0, -1  # places of COCO's tables: areas, and most boxes a picture
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

    @property
    def values(self) -> dict[str, float]:
        found = {n: getattr(self, n) for n in ("map", "map50", "map75", "recall", *SIZES)}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def numbers(self) -> dict[str, tuple[float, ...]]:
        return {"threshold": tuple(c.threshold for c in self.classes)}

    def to_json(self) -> dict[str, Any]:
        return {k: to_plain(v) for k, v in vars(self).items()}

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
    truth, told = things(targets, len(labels)), _told(rows_NR, targets)
    if not len(told):  # nothing would be counted: a box of score 0 that hits nothing
        told = np.array([[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    return evaluation(counted(truth, told, "bbox"), truth, labels)


def evaluation(
    counted: dict[str, Any], truth: dict[str, Any], labels: tuple[str, ...]
) -> Evaluation:
    """What COCO's tables say of the things of a split."""
    precision, recall, scores = (counted[n] for n in ("precision", "recall", "scores"))

    def mean(values: npt.NDArray[np.float64]) -> float | None:
        known = values[values > -1]  # COCO's mark of what has nothing to count
        return float(known.mean()) if known.size else None

    support = np.bincount(
        [a["category_id"] for a in truth["annotations"] if not a["iscrowd"]],
        minlength=len(labels),
    )
    reports = tuple(
        ClassReport(
            label=label,
            average_precision=mean(precision[:, :, k, EVERY_SIZE, ALL]),
            at_half=mean(precision[HALF, :, k, EVERY_SIZE, ALL]),
            recall=mean(recall[:, k, EVERY_SIZE, ALL]),
            threshold=_threshold(
                precision[HALF, :, k, EVERY_SIZE, ALL], scores[HALF, :, k, EVERY_SIZE, ALL]
            ),
            support=int(support[k]),
        )
        for k, label in enumerate(labels)
    )
    of_size = {n: mean(precision[:, :, :, i, ALL]) for i, n in enumerate(SIZES, start=1)}
    return Evaluation(
        count=len(truth["images"]),
        map=mean(precision[:, :, :, EVERY_SIZE, ALL]) or 0.0,
        map50=mean(precision[HALF, :, :, EVERY_SIZE, ALL]) or 0.0,
        map75=mean(precision[THREE_QUARTERS, :, :, EVERY_SIZE, ALL]) or 0.0,
        recall=mean(recall[:, :, EVERY_SIZE, ALL]) or 0.0,
        small=of_size["small"],
        medium=of_size["medium"],
        large=of_size["large"],
        classes=reports,
    )


def losses(rows_NR: Rows, targets: BoxSets) -> npt.NDArray[np.float64]:
    """1 − F1 of each image's boxes at a score and an overlap of one half; 0 where nothing is told
    of a picture with nothing."""
    told = rows_NR.reshape(len(rows_NR), -1, FIELDS)
    return np.array([_wrong(told[i], targets.evaluated(i)) for i in range(len(told))], np.float64)


def _wrong(told: Rows, boxes: npt.NDArray[np.float64]) -> float:
    """1 − F1 of told boxes, the surest first, each of which may hit one thing; crowds apart."""
    told = told[told[:, 4] >= HALF_SURE]
    things = torch.from_numpy(boxes[boxes[:, 5] == 0])
    overlaps = box_iou(torch.from_numpy(told[:, :4]).double(), things[:, :4])
    overlaps *= torch.from_numpy(told[:, 5]).double()[:, None] == things[:, 4]
    hits = 0
    for row in overlaps:
        if len(row) and row.max() >= HALF_SURE:
            overlaps[:, row.argmax()] = 0  # a view: the rows to come see it
            hits += 1
    return 1 - 2 * hits / (len(told) + len(things)) if len(told) + len(things) else 0.0


def _threshold(precision_R: npt.NDArray[np.float64], scores_R: npt.NDArray[np.float64]) -> float:
    """The score at which F1 is highest, of precision and score at recalls 0.00, 0.01, … 1.00."""
    recall_R = np.linspace(0, 1, len(precision_R))
    f1_R = 2 * precision_R * recall_R / np.maximum(precision_R + recall_R, 1e-12)
    if not f1_R.max() > 0:
        return USUAL
    return float(np.clip(scores_R[f1_R.argmax()], 1e-6, 1.0))


def _scales(targets: BoxSets) -> npt.NDArray[np.float64]:
    """What brings fractions of an image's input to pixels of the picture's own, [N, 4].

    Sides that ``squash`` has scaled differently share their mean, which keeps every area and every
    overlap.
    """
    sides = targets.views[:, [3, 2, 3, 2]] * np.sqrt(targets.zooms)[:, None]
    return np.asarray(sides, np.float64)


def things(targets: BoxSets, classes: int) -> dict[str, Any]:
    """The things of a split in COCO's form."""
    scales = _scales(targets)
    found: list[dict[str, Any]] = []
    for image in range(len(targets)):
        boxes = targets.evaluated(image)
        placed = boxes[:, :4] * scales[image]
        placed[:, 2:] -= placed[:, :2]
        for box, (label, crowd, area) in zip(placed.tolist(), boxes[:, 4:].tolist(), strict=True):
            found.append({
                "id": len(found) + 1, "image_id": image, "category_id": int(label),
                "bbox": box, "area": area, "iscrowd": int(crowd),
            })  # fmt: skip
    return {
        "images": [
            {"id": image, "height": height, "width": width}
            for image, (height, width) in enumerate(targets.views[:, 2:].tolist())
        ],
        "categories": [{"id": k} for k in range(classes)],
        "annotations": found,
    }


def _told(rows_NR: Rows, targets: BoxSets) -> npt.NDArray[np.float64]:
    """All told boxes: image, x, y, width, height, score and class in a row, as COCO takes them."""
    told = rows_NR.reshape(len(rows_NR), -1, FIELDS).astype(np.float64)
    boxes = told[..., :4] * _scales(targets)[:, None]
    boxes[..., 2:] -= boxes[..., :2]
    image = np.broadcast_to(np.arange(len(told))[:, None, None], (*told.shape[:2], 1))
    flat = np.concatenate([image, boxes, told[..., 4:]], axis=2).reshape(-1, FIELDS + 1)
    return np.asarray(flat[flat[:, 5] > 0])


def counted(
    truth: dict[str, Any],
    told: npt.NDArray[np.float64] | list[dict[str, Any]],
    of: Literal["bbox", "segm"],
    zooms: npt.NDArray[np.float64] | None = None,
) -> dict[str, Any]:
    """COCO's tables: precision [T, R, K, A, M], scores of the same, recall [T, K, A, M].

    Args:
        told: what the network answers, as COCO takes it; not nothing.
        zooms: by image, what brings areas that were told to the truth's unit.
    """
    from faster_coco_eval import COCO, COCOeval_faster

    known = COCO(truth)
    answers = known.loadRes(told)
    if zooms is not None:
        for one in answers.dataset["annotations"]:
            one["area"] = float(one["area"]) * zooms[one["image_id"]]
    run = COCOeval_faster(known, answers, of, print_function=_silent)
    run.evaluate()
    run.accumulate()
    found: dict[str, Any] = run.eval
    return found


def _silent(*_: object) -> None:
    """What faster-coco-eval would print."""
