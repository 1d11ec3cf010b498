"""Cross entropy, with class weights and smoothed labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.tasks.task import LossSettings, Numbers, Targets

STEP_MEASURE = "accuracy"


def numbers(targets: Targets, classes: int) -> dict[str, tuple[float, ...]]:
    return {}


def balanced(counts: Sequence[int], images: int) -> Tensor:
    """One weight a class, the inverse of its frequency: images / (classes · images of the class).

    Their mean over the images is 1. A class without images weighs 0.
    """
    count = torch.tensor(counts, dtype=torch.float64)
    weights = images / (len(counts) * count)
    return torch.where(count > 0, weights, 0.0).float()


def loss(outputs: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
    """Cross entropy of logits [N, K] in float32: the mean over the images of weight · loss.

    The mean divides by the number of images and not by the sum of weights, so that the loss of a
    batch is the mean of the losses of its parts, on however many processes they lie.
    """
    losses_N = F.cross_entropy(
        outputs.float(), targets, reduction="none", label_smoothing=settings.smoothing
    )
    if settings.weights_K is not None:
        losses_N = losses_N * settings.weights_K[targets]
    return losses_N.mean()


def step_measure(outputs: Tensor, targets: Tensor, numbers: Numbers) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()
