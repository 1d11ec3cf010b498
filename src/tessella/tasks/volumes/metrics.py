"""Intersection over union and Dice of each class, over all voxels of a split together.

Means are over the classes but the first, which is what lies around things.
"""

from __future__ import annotations

from tessella.tasks.segmentation.metrics import COUNTED, Evaluation, evaluation, losses, rows, width
from tessella.tasks.task import Rows, Targets

__all__ = ["COUNTED", "losses", "measure", "rows", "width"]


def measure(rows_NR: Rows, targets: Targets, labels: tuple[str, ...]) -> Evaluation:
    """The ``Evaluation`` of rows N×(3·K + 1)."""
    return evaluation(rows_NR, labels, first=1)
