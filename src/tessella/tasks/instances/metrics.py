"""Average precision of masks and of boxes as COCO counts it, of each class and by size.

Masks are compared in the pixels of what the network sees. Their sizes are told in pixels of the
picture's own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.core.task import TaskRecord
from tessella.tasks.detection import metrics as boxes
from tessella.tasks.detection.errors import FIELDS
from tessella.tasks.detection.head import MOST
from tessella.tasks.detection.precision import ClassMatches, Ints, Told, matched
from tessella.tasks.instances.errors import match, thresholds
from tessella.tasks.instances.examples import MaskSets
from tessella.tasks.instances.head import CELLS
from tessella.tasks.instances.packing import (
    LEVELS,
    PACKED,
    TOGETHER,
    WIDTH,
    drawn,
    run_lengths,
    size_of,
    things_of,
)
from tessella.tasks.known import Floats
from tessella.tasks.task import Rows

COUNTED = boxes.COUNTED


@dataclass(frozen=True, kw_only=True)
class MaskEvaluation(boxes.Evaluation):
    """COCO's measures of masks; ``box_…`` those of boxes."""

    box_map: float
    box_map50: float

    @property
    def values(self) -> dict[str, float]:
        return {**super().values, "box_map": self.box_map, "box_map50": self.box_map50}


def width(classes: int) -> int:
    return MOST * WIDTH


def rows(outputs: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Detection's ``MOST`` pairs of a box and a class, and behind each its mask."""
    scores_BP = outputs[..., 4:-CELLS].flatten(1)
    best = scores_BP.topk(min(MOST, scores_BP.shape[1]), dim=1)
    box = (best.indices // classes)[:, :, None]
    told = boxes.rows(outputs[..., :-CELLS], targets, classes)
    told = told.reshape(len(told), -1, FIELDS)
    masks = outputs[..., -CELLS:].gather(1, box.expand(-1, -1, CELLS)).float()
    # a number that is none must not pass unseen because its score is low
    finite = outputs.flatten(1).isfinite().all(1)[:, None]
    found = torch.cat([told.float(), _packed(masks)], 2).flatten(1)
    return torch.where(finite, found, torch.nan)


def _packed(cells: Tensor) -> Tensor:
    """Cells [..., CELLS] from 0 to 1 in steps of a 255th, three in a number."""
    steps = (cells * LEVELS).round()
    padded = F.pad(steps, (0, PACKED * TOGETHER - CELLS))
    first, second, third = padded.reshape(*steps.shape[:-1], PACKED, TOGETHER).unbind(-1)
    return first + 256 * second + 65536 * third


def measure(rows_NR: Rows, targets: MaskSets, labels: tuple[str, ...]) -> MaskEvaluation:
    """The ``MaskEvaluation`` of rows N×(MOST · WIDTH)."""
    around = boxes.measure(_boxes(rows_NR), targets, labels)
    found = boxes.evaluation(_matched(rows_NR, targets, len(labels)), len(targets), labels)

    def again(drawn_NS: Floats) -> dict[str, Floats]:
        of_boxes = around.resampled(drawn_NS)
        also = {f"box_{name}": of_boxes[name] for name in ("map", "map50")}
        return found.resampled(drawn_NS) | also

    same = {f.name: getattr(found, f.name) for f in fields(found)} | {"resampled": again}
    return MaskEvaluation(**same, box_map=around.map, box_map50=around.map50)


def losses(rows_NR: Rows, targets: MaskSets, record: TaskRecord, classes: int) -> Floats:
    """1 − F1 of each image's masks, as detection's losses are of boxes."""
    least_K = thresholds(record, classes)
    return match(rows_NR, targets, least_K=least_K).losses(least_K, len(rows_NR))


def _boxes(rows_NR: Rows) -> Rows:
    """The rows as detection has them."""
    told = things_of(rows_NR)[..., :FIELDS]
    return np.ascontiguousarray(told).reshape(len(rows_NR), -1)


def _matched(rows_NR: Rows, targets: MaskSets, classes: int) -> list[ClassMatches]:
    """Every mask that is told with what it hits, by class."""
    from faster_coco_eval import mask as coco_mask

    told_NMF = things_of(rows_NR)
    images, places = np.nonzero(told_NMF[..., 4] > 0)
    rows = told_NMF[images, places]
    masks = [
        run_lengths(drawn(row, size_of(targets, image)), size_of(targets, image))
        for image, row in zip(images.tolist(), rows, strict=True)
    ]
    _, there = boxes.things(targets)
    truth = [
        run_lengths(counts, size_of(targets, image))
        for image in range(len(targets))
        for counts in targets.texts(image)
    ]

    def shares(told_M: Ints, there_M: Ints) -> Floats:
        pairs = images[told_M] * (classes + 1) + there.labels[there_M]
        ends = np.append(np.flatnonzero(np.diff(pairs)) + 1, len(pairs))
        made = [np.zeros(0)]
        for start, end in pairwise([0, *ends.tolist()] if len(pairs) else [0]):
            one, other = (np.unique(v[start:end]) for v in (told_M, there_M))
            alone = there.crowds[other].tolist()
            common = coco_mask.iou([masks[i] for i in one], [truth[i] for i in other], alone)
            places = (
                np.searchsorted(one, told_M[start:end]), np.searchsorted(other, there_M[start:end])
            )  # fmt: skip
            made.append(np.asarray(common)[places])
        return np.concatenate(made)

    areas = np.asarray(coco_mask.area(masks), np.float64) * targets.zooms[images]
    told = Told(
        images=images,
        labels=rows[:, 5].astype(np.int64),
        areas=areas,
        scores=rows[:, 4].astype(np.float64),
    )
    return matched(there, told, classes, shares)
