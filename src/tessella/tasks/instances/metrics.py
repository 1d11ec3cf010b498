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
from tessella.tasks.detection.precision import ClassMatches, Ints, Told, inside, matched
from tessella.tasks.instances.cells import areas_between, columns_of
from tessella.tasks.instances.errors import match, thresholds
from tessella.tasks.instances.examples import MaskSets
from tessella.tasks.instances.head import CELLS
from tessella.tasks.instances.packing import (
    LEVELS,
    PACKED,
    TOGETHER,
    WIDTH,
    boxes_of,
    drawn,
    is_part,
    size_of,
    things_of,
)
from tessella.tasks.instances.runs import of_counts
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
    """Every mask that is told with what it hits, by class.

    Drawn are those that may hit a thing, and those whose area may be of one size or another.
    """
    told_NMF = things_of(rows_NR)
    images, places = np.nonzero(told_NMF[..., 4] > 0)
    _, there = boxes.things(targets)
    numbers = np.arange(len(targets) + 1)
    told_ends, there_ends = (np.searchsorted(v, numbers) for v in (images, there.images))
    areas, pairs, values = np.zeros(len(images)), [np.zeros(0, np.int64)], [np.zeros(0)]
    for image, ((begin, end), (first, last)) in enumerate(
        zip(pairwise(told_ends.tolist()), pairwise(there_ends.tolist()), strict=True)
    ):
        size, rows = size_of(targets, image), told_NMF[image, places[begin:end]]
        place_D4 = boxes_of(rows, size)
        things = of_counts(targets.counts(image), size)
        chosen_DG = rows[:, 5, None] == there.labels[first:last]
        chosen_DG &= things.reached(*columns_of(place_D4, size[1]))
        # of the others it is enough to know how they count by size, which few must be drawn for
        some, most = areas_between(is_part(rows), place_D4, size) * targets.zooms[image]
        unsure = (inside(some) != inside(most)).any(axis=0)
        seen = np.flatnonzero(chosen_DG.any(axis=1) | unsure)
        masks = drawn(rows[seen], size)
        some[seen] = masks.areas() * targets.zooms[image]
        areas[begin:end] = some
        found = masks.shares(things, there.crowds[first:last], chosen_DG[seen])
        one, other = np.nonzero(found)
        pairs.append((begin + seen[one]) * len(there.images) + first + other)
        values.append(found[one, other])
    known_P, share_P = np.concatenate(pairs), np.concatenate(values)

    def shares(told_M: Ints, there_M: Ints) -> Floats:
        asked = told_M * len(there.images) + there_M
        at = np.searchsorted(known_P, asked)
        return np.where(np.append(known_P, -1)[at] == asked, np.append(share_P, 0)[at], 0.0)

    told = Told(
        images=images,
        labels=told_NMF[images, places, 5].astype(np.int64),
        areas=areas,
        scores=told_NMF[images, places, 4].astype(np.float64),
    )
    return matched(there, told, classes, shares)
