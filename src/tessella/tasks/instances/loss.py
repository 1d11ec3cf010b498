"""The network's own loss, as detection has it: what learns a thing depends on what it predicts."""

from __future__ import annotations

from tessella.tasks.detection.loss import STEP_MEASURE, balanced, loss, numbers, step_measure

__all__ = ["STEP_MEASURE", "balanced", "loss", "numbers", "step_measure"]
