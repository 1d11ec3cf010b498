"""Huber's loss of standardized numbers; a number that is missing counts nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.core.errors import DataError
from tessella.tasks.regression.examples import SCALES, scale
from tessella.tasks.task import LossSettings, Numbers, Targets

STEP_MEASURE = "error"  # mean absolute, in standard deviations


def numbers(targets: Targets, classes: int) -> dict[str, tuple[float, ...]]:
    """Mean and standard deviation of each number on the training split, in float64."""
    values_NK = torch.from_numpy(targets.batch(np.arange(len(targets)))).double()
    known_NK = ~values_NK.isnan()
    count_K = known_NK.sum(0)
    if (count_K == 0).any():
        raise DataError(
            "a number is missing in every training image",
            seen=f"number {int((count_K == 0).int().argmax())}",
            fix="import again without its column",
        )
    mean_K = values_NK.nanmean(0)
    std_K = (values_NK - mean_K).square().nansum(0).div(count_K).sqrt()
    # A number that is the same everywhere has nothing to scale by.
    std_K = torch.where(std_K > 0, std_K, 1.0)
    return {"mean": tuple(mean_K.tolist()), "std": tuple(std_K.tolist())}


def balanced(counts: Sequence[int], images: int) -> None:
    return None


def standardized(targets: Tensor, numbers: Numbers) -> Tensor:
    """Targets [B, K] in standard deviations from the mean, float32."""
    mean, std = (
        _on_device(tuple(scale(numbers, name, targets.shape[1]).tolist()), targets.device)
        for name in SCALES
    )
    return ((targets.double() - mean) / std).float()


@functools.lru_cache(maxsize=64)
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers in float64, copied once: a CUDA graph cannot wait for the host."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float64, device=device)


def loss(outputs: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
    """Huber's loss [N, K] in float32, the mean over the images of the mean over known numbers."""
    wanted = standardized(targets, settings.numbers)
    known = ~wanted.isnan()
    losses = F.huber_loss(outputs.float(), wanted.nan_to_num(), reduction="none") * known
    return (losses.sum(1) / known.sum(1).clamp(min=1)).mean()


def step_measure(outputs: Tensor, targets: Tensor, numbers: Numbers) -> Tensor:
    errors = (outputs.float() - standardized(targets, numbers)).abs()
    return errors.nanmean()
