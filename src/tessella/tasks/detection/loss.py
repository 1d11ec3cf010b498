"""The network's own loss: which box learns which thing depends on what the network predicts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tessella.tasks.task import LossSettings, Numbers, Targets

STEP_MEASURE = "overlap"  # mean intersection over union of the boxes that learn a thing


def numbers(targets: Targets, classes: int) -> dict[str, tuple[float, ...]]:
    return {}


def balanced(counts: Sequence[int], images: int) -> None:
    return None


def loss(outputs: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
    """The first of [loss, measure], in which a taught network answers. Labels are not smoothed."""
    return outputs[0].float()


def step_measure(outputs: Tensor, targets: Tensor, numbers: Numbers) -> Tensor:
    return outputs[1].float()
