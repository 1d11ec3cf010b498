"""Cross entropy of each voxel and the overlap of each class: nnU-Net's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from tessella.core.volumes import IGNORED
from tessella.tasks.segmentation import loss as pixelwise
from tessella.tasks.segmentation.loss import balanced, numbers
from tessella.tasks.task import LossSettings, Numbers

__all__ = ["STEP_MEASURE", "balanced", "loss", "numbers", "step_measure"]

STEP_MEASURE = "voxel_accuracy"
SMOOTH = 1e-5  # added above and below the line: a class that is nowhere is right where none is said


def loss(outputs: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
    """The mean cross entropy, plus 1 − the mean Dice of the classes but the first.

    Dice is that of probabilities, over all voxels of the batch that have a class.
    """
    known = targets != IGNORED
    shares = outputs.float().softmax(1)
    truth = torch.where(known, targets, 0).long()[:, None]
    right = torch.zeros_like(shares).scatter_(1, truth, 1.0)
    axes = (0, *range(2, outputs.dim()))
    shares, right = shares * known[:, None], right * known[:, None]
    common, both = (shares * right).sum(axes), (shares + right).sum(axes)
    dice = (2 * common + SMOOTH) / (both + SMOOTH)
    return pixelwise.loss(outputs, targets, settings) + 1 - dice[1:].mean()


def step_measure(outputs: Tensor, targets: Tensor, numbers: Numbers) -> Tensor:
    return pixelwise.step_measure(outputs, targets, numbers)
