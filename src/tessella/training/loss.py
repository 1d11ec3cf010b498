"""The error for a loss that is not finite."""

from __future__ import annotations

from tessella.artifacts.run import Recipe
from tessella.core.errors import TrainError


def not_finite(loss: float, step: int, rate: float, recipe: Recipe) -> TrainError:
    """The error for a loss that is NaN or infinite at ``step``."""
    fixes = [f"lower the learning rate (for example lr={recipe.solver.lr / 10:g})"]
    if recipe.precision != "fp32":
        fixes.append("or train with precision fp32")
    if not recipe.policy.warmup:
        fixes.append("or give the policy a warm-up (warmup=0.05)")
    return TrainError(
        f"the loss is {loss} at step {step}: training has diverged",
        seen=f"learning rate {rate:g}, precision {recipe.precision}, solver {recipe.solver.name}",
        fix=", ".join(fixes),
    )
