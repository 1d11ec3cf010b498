"""A network of fixed input over a whole volume: overlapping windows, weighed towards their middle.

As nnU-Net does it: windows half a side apart, whose scores count by a Gaussian of an eighth of the
side around the middle, since a network knows least of what lies at the edge of its input.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.core.tiles import starts

Predict = Callable[[Tensor], Tensor]

STEP = 0.5  # of a side, from window to window, at most
SIGMA = 1 / 8  # of a side
LEAST = 1e-3  # of the largest weight: nothing is divided by zero


def over_windows(
    predict: Predict, images: Tensor, sides: Sequence[int], *, outside: float
) -> Tensor:
    """The scores of a network of ``[N, C, *sides]`` for whole volumes.

    Args:
        predict: gives ``[N, K, *sides]``.
        images: ``[N, C, D, H, W]`` of any size; smaller ones are filled up with ``outside``.

    Returns:
        ``[N, K, D, H, W]`` in float32, on the device of what ``predict`` gives.
    """
    shape = images.shape[2:]
    if tuple(shape) == tuple(sides):
        return predict(images)
    less = [max(0, side - n) for side, n in zip(sides, shape, strict=True)]
    edges = [edge for n in reversed(less) for edge in (n // 2, n - n // 2)]
    if any(less):
        images = F.pad(images, edges, value=outside)
    sums: Tensor | None = None
    weights: Tensor | None = None
    along = zip(images.shape[2:], sides, strict=True)
    for first in itertools.product(*(starts(n, side, int(side * STEP)) for n, side in along)):
        place = _at(first, sides)
        made = predict(images[place].contiguous()).float()
        if sums is None or weights is None:
            sums = made.new_zeros(*made.shape[:2], *images.shape[2:])
            weights = made.new_zeros(images.shape[2:])
        weight = _weights(tuple(sides)).to(made.device)
        sums[place] += made * weight
        weights[place] += weight
    assert sums is not None, "a volume has a window"
    assert weights is not None, "a volume has a window"
    sums /= weights
    return sums[_at([n // 2 for n in less], shape)]


def _at(first: Sequence[int], sides: Sequence[int]) -> Any:
    """The place of a window in the last axes of a tensor."""
    return (..., *(slice(f, f + side) for f, side in zip(first, sides, strict=True)))


@functools.lru_cache(maxsize=4)
def _weights(sides: tuple[int, ...]) -> Tensor:
    made = torch.ones(())
    for side in sides:
        places = torch.arange(side) - (side - 1) / 2
        made = made[..., None] * torch.exp(-0.5 * (places / (side * SIGMA)) ** 2)
    return made.clamp(min=LEAST)
