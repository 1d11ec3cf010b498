"""The errors for losses and gradients that are not finite, and the layer where that began."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tessella.artifacts.run import Recipe
from tessella.core.errors import TrainError
from tessella.training.sharding import whole

log = logging.getLogger(__name__)


def not_finite(
    loss: float, step: int, rate: float, recipe: Recipe, where: str | None = None
) -> TrainError:
    """The error for a loss that is NaN or infinite at ``step``.

    Args:
        where: what ``first_not_finite`` says.
    """
    fixes = [f"lower the learning rate (for example lr={recipe.solver.lr / 10:g})"]
    if recipe.precision != "fp32":
        fixes.append("or train with precision fp32")
    if not recipe.policy.warmup:
        fixes.append("or give the policy a warm-up (warmup=0.05)")
    seen = f"learning rate {rate:g}, precision {recipe.precision}, solver {recipe.solver.name}"
    return TrainError(
        f"the loss is {loss} at step {step}: training has diverged",
        seen=seen if where is None else f"{seen}; {where}",
        fix=", ".join(fixes),
    )


def only_skipped(count: int, step: int, where: str | None, *, seen_at: int) -> TrainError:
    """The error for a training of which the last ``count`` steps, up to ``step``, were skipped.

    Args:
        where: what ``gradient_not_finite`` says of the step ``seen_at``.
    """
    seen = f"fp16, step {step}"
    if where is not None:
        seen += f"; {where}" if seen_at == step else f"; {where} at step {seen_at}"
    return TrainError(
        f"the last {count} steps were skipped: their gradients are not finite, however little the "
        "loss is scaled",
        seen=seen,
        fix="train with precision bf16 or fp32; where it fails in these, too, look for a square "
        "root, a logarithm or a division of zero",
    )


def gradient_not_finite(module: nn.Module) -> str | None:
    """The first parameter whose gradient is not finite; None where all of them are."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and not _finite(parameter.grad):
            return f"the gradient of {name} is not finite"
    return None


def first_not_finite(module: nn.Module, call: Callable[[], object]) -> str | None:
    """Which weights are not finite, or else which layer's output is the first that is not.

    What is computed between layers shows in the output of the next one, or of the layer around it.

    Args:
        call: runs the module's forward pass.

    Returns:
        None where all of them are finite, or the pass fails.
    """
    weights = [name for name, p in module.named_parameters() if not _finite(p)]
    if weights:
        count = len(list(module.parameters()))
        return f"{len(weights)} of {count} weights are not finite, {weights[0]} the first"
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(layer: nn.Module, given: Any, made: Any) -> None:
            if not found and isinstance(made, Tensor) and not _finite(made):
                found.append(f"{name or 'the network'} ({type(layer).__name__})")

        return hook

    hooks = [layer.register_forward_hook(look(name)) for name, layer in module.named_modules()]
    try:
        with torch.no_grad():
            call()
    except Exception as error:  # whatever it is, another error is being told
        log.info("where numbers are not finite is not known: %s", error)
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return f"the output of {found[0]} is the first that is not finite" if found else None


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(whole(tensor)).all())
