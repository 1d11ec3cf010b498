"""Cross entropy of each pixel, and how much of each class is missed; some pixels have no class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.tasks.segmentation.examples import IGNORED
from tessella.tasks.task import LossSettings, Numbers, Targets

STEP_MEASURE = "pixel_accuracy"
DICE = 1.0  # what `uncovered` weighs beside cross entropy


def numbers(targets: Targets, classes: int) -> dict[str, tuple[float, ...]]:
    return {}


def balanced(counts: Sequence[int], images: int) -> Tensor:
    """The inverse of the share of images that have a class; 0 for a class that none has."""
    count = torch.tensor(counts, dtype=torch.float64)
    return torch.where(count > 0, images / count, 0.0).float()


def loss(outputs: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
    """The mean over the images of their cross entropy and of what is ``uncovered``, in float32."""
    wanted = targets.long()
    logits = outputs.float()
    losses = F.cross_entropy(
        logits,
        wanted,
        weight=settings.weights_K,
        reduction="none",
        ignore_index=IGNORED,
        label_smoothing=settings.smoothing,
    )
    known_B = (wanted != IGNORED).flatten(1).sum(1).clamp(min=1)
    entropy_B = losses.flatten(1).sum(1) / known_B
    return (entropy_B + DICE * uncovered(logits, wanted)).mean()


def uncovered(logits: Tensor, wanted: Tensor) -> Tensor:
    """1 − Dice of probabilities [B, K, …] and classes [B, …], a mean of the classes of each image.

    Milletari et al., V-Net, arXiv:1606.04797. A class counts as much as any other, however few
    pixels it has, which cross entropy alone learns late.
    """
    classes = torch.arange(logits.shape[1], device=logits.device)
    true_BKP = wanted.flatten(1)[:, None] == classes[:, None]
    known_BP = (wanted != IGNORED).flatten(1)
    said_BKP = logits.softmax(1).flatten(2) * known_BP[:, None]
    common_BK = torch.where(true_BKP, said_BKP, 0.0).sum(2)
    there_BK = true_BKP.sum(2)
    dice_BK = 2 * common_BK / (said_BKP.sum(2) + there_BK).clamp(min=1e-6)
    known_BK = there_BK > 0
    return ((1 - dice_BK) * known_BK).sum(1) / known_BK.sum(1).clamp(min=1)


def step_measure(outputs: Tensor, targets: Tensor, numbers: Numbers) -> Tensor:
    known = targets != IGNORED
    right = (outputs.argmax(1) == targets) & known
    return right.sum() / known.sum().clamp(min=1)
