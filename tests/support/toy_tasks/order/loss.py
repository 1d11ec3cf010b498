"""The logistic loss of each pair of neighbours in a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from tessella.tasks.task import LossSettings, Numbers, Targets

STEP_MEASURE = "pairs"


def numbers(targets: Targets, classes: int) -> dict[str, tuple[float, ...]]:
    return {}


def balanced(counts: Sequence[int], images: int) -> None:
    return None


def _pairs(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    score = outputs[:, 0].float() - outputs[:, 1].float()
    place = targets[:, 0]
    return score - score.roll(1), (place > place.roll(1)).float()


def loss(outputs: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
    return F.binary_cross_entropy_with_logits(*_pairs(outputs, targets))


def step_measure(outputs: Tensor, targets: Tensor, numbers: Numbers) -> Tensor:
    difference, later = _pairs(outputs, targets)
    return ((difference > 0) == (later > 0.5)).float().mean()
