"""The classification loss, class weights, and the error for a loss that is not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.artifacts.dataset import Split
from tessella.artifacts.run import Recipe
from tessella.core.errors import DataError, TrainError


def balanced_weights(counts: Sequence[int]) -> Tensor:
    """One weight a class, the inverse of its frequency: images / (classes · images of the class).

    Their mean over the images is 1. A class without images weighs 0.
    """
    count = torch.tensor(counts, dtype=torch.float64)
    weights = count.sum() / (len(counts) * count)
    return torch.where(count > 0, weights, 0.0).float()


def classification_loss(
    logits_NK: Tensor, labels_N: Tensor, weights_K: Tensor | None, *, smoothing: float = 0.0
) -> Tensor:
    """Cross entropy in float32: the mean over the images of weight · loss.

    The mean divides by the number of images and not by the sum of weights, so that the loss of a
    batch is the mean of the losses of its parts, on however many processes they lie. ``smoothing``
    is the share of the target that all classes have alike.
    """
    losses_N = F.cross_entropy(
        logits_NK.float(), labels_N, reduction="none", label_smoothing=smoothing
    )
    if weights_K is not None:
        losses_N = losses_N * weights_K[labels_N]
    return losses_N.mean()


def check_labels(split: Split, classes: int) -> None:
    """Raise ``DataError`` where a label of the split names no class."""
    labels = split.labels
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        index = int(outside.argmax())
        raise DataError(
            f"the {split.name} split has a label that names no class",
            seen=f"label {labels[index]} of {split[index].path}, {classes} classes",
            fix="import the dataset again",
        )


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
