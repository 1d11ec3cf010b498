"""Intersection over union and Dice of each class, over all voxels of a split together.

Means are over the classes but the first, which is what lies around things.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessella.tasks.segmentation import metrics as pixelwise
from tessella.tasks.segmentation.metrics import COUNTED, Evaluation, losses, rows, width
from tessella.tasks.task import Rows, Targets

__all__ = ["COUNTED", "losses", "measure", "rows", "width"]


def measure(rows_NR: Rows, targets: Targets, labels: tuple[str, ...]) -> Evaluation:
    """The ``Evaluation`` of rows N×(3·K + 1)."""
    found = pixelwise.measure(rows_NR, targets, labels)
    things = found.classes[1:]
    return replace(
        found,
        miou=_mean([thing.iou for thing in things]),
        dice=_mean([thing.dice for thing in things]),
    )


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
