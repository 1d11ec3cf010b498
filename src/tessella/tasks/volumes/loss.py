"""Cross entropy of each voxel, and how far each class covers its own: the loss of pixels."""

from __future__ import annotations

from tessella.tasks.segmentation.loss import balanced, loss, numbers, step_measure

__all__ = ["STEP_MEASURE", "balanced", "loss", "numbers", "step_measure"]

STEP_MEASURE = "voxel_accuracy"
