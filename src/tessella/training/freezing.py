"""Stages that keep their weights: for good (``freeze``), or while the head learns (a probe).

Which are frozen depends on the step alone, so a resumed training freezes the same.
"""

from __future__ import annotations

import math

from torch import nn

from tessella.artifacts.run import Recipe
from tessella.core.errors import UsageError
from tessella.nn.zoo import stages

_ROUNDING = 1e-9


class Freezing:
    """Which stages of a network learn at a step.

    A frozen stage computes as in evaluation: batch norms keep their statistics, dropout is off.

    Raises:
        UsageError: no stage would learn.
    """

    def __init__(self, module: nn.Module, recipe: Recipe, steps_per_epoch: int) -> None:
        self._module, self._stages = module, stages(module)
        count = len(self._stages)
        self._for_good = recipe.freeze if recipe.freeze >= 0 else max(0, count + recipe.freeze)
        if recipe.freeze and self._for_good >= count:
            raise UsageError(
                "no stage of the network would learn",
                seen=f"freeze={recipe.freeze}, {count} stages",
                fix=f"freeze at most {count - 1}, which leaves the head; or -1, which does so, too",
            )
        self._probing = max(self._for_good, count - 1)
        self._probe = math.ceil(recipe.probe_epochs * steps_per_epoch - _ROUNDING)
        self._frozen: int | None = None
        if self._for_good:  # before an optimizer is made: it need not know them
            self._require(self._for_good)

    def at(self, done: int) -> int:
        """How many stages are frozen in the step that follows ``done`` finished ones."""
        return self._probing if done < self._probe else self._for_good

    def apply(self, done: int) -> bool:
        """Freeze and thaw for the step that follows; whether other parameters learn than before."""
        count = self.at(done)
        changed = count != self._frozen
        if changed:
            self._require(count)
            self._frozen = count
            self.train()
        return changed

    def train(self) -> None:
        """Training mode, but for frozen stages."""
        self._module.train()
        for stage in self._stages[: self._frozen or 0]:
            for part in stage.modules.values():
                part.eval()

    def _require(self, frozen: int) -> None:
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        for number, stage in enumerate(self._stages):
            for name in stage.parameters:
                parameters[name].requires_grad_(number >= frozen)
                if number < frozen:
                    parameters[name].grad = None
