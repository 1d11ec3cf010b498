"""Cross entropy of each pixel; pixels without a class count nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.tasks.segmentation.examples import IGNORED
from tessella.tasks.task import LossSettings, Numbers, Targets

STEP_MEASURE = "pixel_accuracy"


def numbers(targets: Targets, classes: int) -> dict[str, tuple[float, ...]]:
    return {}


def balanced(counts: Sequence[int], images: int) -> Tensor:
    """The inverse of the share of images that have a class; 0 for a class that none has."""
    count = torch.tensor(counts, dtype=torch.float64)
    return torch.where(count > 0, images / count, 0.0).float()


def loss(outputs: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
    """The mean over the images of the mean over their pixels, in float32."""
    wanted = targets.long()
    losses_BHW = F.cross_entropy(
        outputs.float(),
        wanted,
        weight=settings.weights_K,
        reduction="none",
        ignore_index=IGNORED,
        label_smoothing=settings.smoothing,
    )
    known_B = (wanted != IGNORED).flatten(1).sum(1).clamp(min=1)
    return (losses_BHW.flatten(1).sum(1) / known_B).mean()


def step_measure(outputs: Tensor, targets: Tensor, numbers: Numbers) -> Tensor:
    known = targets != IGNORED
    right = (outputs.argmax(1) == targets) & known
    return right.sum() / known.sum().clamp(min=1)
