"""Average precision of masks and of boxes as COCO counts it, of each class and by size.

Masks are compared in the pixels of what the network sees. Their sizes are told in pixels of the
picture's own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.annotations import rle
from tessella.tasks.detection import metrics as boxes
from tessella.tasks.detection.errors import FIELDS
from tessella.tasks.detection.head import MOST
from tessella.tasks.instances.cells import counts_of
from tessella.tasks.instances.examples import MaskSets
from tessella.tasks.instances.head import CELLS, SIDE
from tessella.tasks.task import Rows

COUNTED = boxes.COUNTED
LEVELS = 255  # of a cell in a row: as many as fit into eight bits
TOGETHER = 3  # cells in a float32, which has 24 bits of whole numbers
PACKED = -(-CELLS // TOGETHER)
KEPT = 1 << 14  # masks, some 2 KB each: images that are drawn anew have the same ones again


@dataclass(frozen=True, kw_only=True)
class MaskEvaluation(boxes.Evaluation):
    """COCO's measures of masks; ``box_…`` those of boxes."""

    box_map: float
    box_map50: float

    @property
    def values(self) -> dict[str, float]:
        return {**super().values, "box_map": self.box_map, "box_map50": self.box_map50}


def width(classes: int) -> int:
    return MOST * (FIELDS + PACKED)


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


def _unpacked(numbers: Rows) -> npt.NDArray[np.float32]:
    """The cells [SIDE, SIDE] of a row's numbers."""
    whole = numbers.astype(np.int64)
    threes = np.stack([whole & 255, whole >> 8 & 255, whole >> 16 & 255], axis=-1)
    cells = threes.reshape(-1)[:CELLS].reshape(SIDE, SIDE) / LEVELS
    return np.asarray(cells, np.float32)


def measure(rows_NR: Rows, targets: MaskSets, labels: tuple[str, ...]) -> MaskEvaluation:
    """The ``MaskEvaluation`` of rows N×(MOST · (FIELDS + PACKED))."""
    told = rows_NR.reshape(len(rows_NR), -1, FIELDS + PACKED)
    of_boxes = boxes.measure(_boxes(rows_NR), targets, labels)
    truth = boxes.things(targets, len(labels))
    _draw(truth, targets)
    counted = boxes.counted(truth, _answers(told, targets), "segm", targets.zooms)
    found = boxes.evaluation(counted, truth, labels)
    same = {f.name: getattr(found, f.name) for f in fields(found)}
    return MaskEvaluation(**same, box_map=of_boxes.map, box_map50=of_boxes.map50)


def losses(rows_NR: Rows, targets: MaskSets) -> npt.NDArray[np.float64]:
    """As detection's: how wrong each image's boxes are."""
    return boxes.losses(_boxes(rows_NR), targets)


def _boxes(rows_NR: Rows) -> Rows:
    """The rows as detection has them."""
    told = rows_NR.reshape(len(rows_NR), -1, FIELDS + PACKED)[..., :FIELDS]
    return np.ascontiguousarray(told).reshape(len(rows_NR), -1)


def _draw(truth: dict[str, Any], targets: MaskSets) -> None:
    """Give each thing its mask."""
    place = 0
    for image in range(len(targets)):
        size = targets.views[image, 2:].tolist()
        for counts in targets.texts(image):
            truth["annotations"][place]["segmentation"] = {"size": size, "counts": counts}
            place += 1


@functools.lru_cache(maxsize=KEPT)
def _drawn(box: bytes, numbers: bytes, height: int, width: int) -> bytes:
    """The run lengths of a mask that was told, of the numbers of its row."""
    sides = np.frombuffer(box, np.float32).astype(np.float64) * [width, height, width, height]
    cells = _unpacked(np.frombuffer(numbers, np.float32))
    return rle.compressed(counts_of(cells, sides.tolist(), (height, width)))


def _answers(told: Rows, targets: MaskSets) -> list[dict[str, Any]]:
    """What was told as COCO takes it: one result for each mask."""
    found: list[dict[str, Any]] = []
    for image, rows_M in enumerate(told):
        height, width = targets.views[image, 2:].tolist()
        for row in rows_M[rows_M[:, 4] > 0]:
            counts = _drawn(row[:4].tobytes(), row[FIELDS:].tobytes(), height, width)
            found.append({
                "image_id": image, "category_id": int(row[5]), "score": float(row[4]),
                "segmentation": {"size": [height, width], "counts": counts},
            })  # fmt: skip
    if not found and len(told):  # nothing would be counted: an empty mask that hits nothing
        height, width = targets.views[0, 2:].tolist()
        empty = {"size": [height, width], "counts": rle.compressed(np.array([height * width]))}
        found = [{"image_id": 0, "category_id": 0, "score": 0.0, "segmentation": empty}]
    return found
