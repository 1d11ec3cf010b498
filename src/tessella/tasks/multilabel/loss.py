"""Binary cross entropy of each class, with weights for rare classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.tasks.task import LossSettings, Numbers, Targets

STEP_MEASURE = "label_accuracy"
MOST_WEIGHT = 100.0  # of a positive: a class of one picture in a million would drown the others


def numbers(targets: Targets, classes: int) -> dict[str, tuple[float, ...]]:
    return {}


def balanced(counts: Sequence[int], images: int) -> Tensor:
    """The weight of a class's positives: images without the class for each with it."""
    count = torch.tensor(counts, dtype=torch.float64)
    weights = (images - count) / count
    return torch.where(count > 0, weights.clamp(max=MOST_WEIGHT), 1.0).float()


def loss(outputs: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
    """Binary cross entropy of logits [N, K] in float32, the mean over images and classes.

    Smoothing s makes 1 − s/2 of a 1 and s/2 of a 0.
    """
    smooth = settings.smoothing
    targets_NK = targets.float() * (1 - smooth) + smooth / 2
    return F.binary_cross_entropy_with_logits(
        outputs.float(), targets_NK, pos_weight=settings.weights_K
    )


def step_measure(outputs: Tensor, targets: Tensor, numbers: Numbers) -> Tensor:
    """The share of (image, class) pairs that are right at probability one half."""
    return ((outputs > 0) == (targets > 0.5)).float().mean()
