"""The schedule of a training: steps, learning rates, validations and checkpoints.

Pure functions of the recipe and the size of the training split: a resumed run decides the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessella.artifacts.run import Recipe

_ROUNDING = 1e-9  # what a product of fractions may miss a whole number by


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A recipe's schedule in steps, counted from 1: ``step`` is the number of finished steps."""

    recipe: Recipe
    steps_per_epoch: int

    @property
    def total(self) -> int:
        """Steps of the whole training, at least one."""
        return max(1, math.ceil(self.recipe.epochs * self.steps_per_epoch - _ROUNDING))

    def epoch_at(self, step: int) -> float:
        return step / self.steps_per_epoch

    def rate(self, done: int) -> float:
        """Learning rate of the step that follows ``done`` finished ones (Caffe's convention)."""
        return self.recipe.solver.lr * self.recipe.policy.factor(done / self.total)

    def momentum(self, done: int) -> float:
        """The solver's momentum in the step that follows ``done`` finished ones."""
        return self.recipe.policy.momentum(self.recipe.solver.momentum, done / self.total)

    def validates(self, step: int) -> bool:
        return step == self.total or self._crosses(step, self.recipe.val_interval)

    def snapshots(self, step: int) -> bool:
        return step == self.total or self._crosses(step, self.recipe.snapshot_interval)

    def _crosses(self, step: int, epochs: float) -> bool:
        """Whether a multiple of ``epochs`` lies in the step that ends at ``step``."""
        period = epochs * self.steps_per_epoch
        return math.floor(step / period + _ROUNDING) > math.floor((step - 1) / period + _ROUNDING)
