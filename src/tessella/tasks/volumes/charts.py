"""Loss, IoU and Dice over the training, and volumes in which each class occurs."""

from __future__ import annotations

from tessella.tasks.segmentation import charts
from tessella.tasks.segmentation.charts import CONFUSION, CURVES

PERCENT: tuple[str, ...] = (*charts.PERCENT, "voxel_accuracy")
CLASS_COUNTS = "volumes in which each occurs, by split"

__all__ = ["CLASS_COUNTS", "CONFUSION", "CURVES", "PERCENT"]
