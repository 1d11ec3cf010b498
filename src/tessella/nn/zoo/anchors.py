"""Anchors: boxes around each place of a network's maps, from which detectors tell boxes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

FARTHEST = math.log(1000 / 16)  # how much larger than its anchor a box may be, as a logarithm


def anchors(
    backbone: nn.Module, generator: Any, channels: int, size: tuple[int, int]
) -> tuple[Tensor, tuple[int, ...]]:
    """All anchors of a picture in pixels, [A, 4], and how many of them each level has.

    Args:
        generator: torchvision's ``AnchorGenerator``.
        size: height and width of a picture.
    """
    # not above: torchvision takes as long as torch, and most networks do without
    from torchvision.models.detection.image_list import ImageList

    training = backbone.training
    picture = torch.zeros(1, channels, *size)
    with torch.no_grad():
        maps = list(backbone.eval()(picture).values())
    backbone.train(training)
    (made,) = generator(ImageList(picture, [size]), maps)
    each = generator.num_anchors_per_location()
    counts = tuple(n * m.shape[2] * m.shape[3] for n, m in zip(each, maps, strict=True))
    return made, counts


def moved(moves_4: Tensor, anchors_4: Tensor) -> Tensor:
    """Boxes x0 y0 x1 y1 of how they differ from their anchors, [..., 4] each."""
    low, high = anchors_4[..., :2], anchors_4[..., 2:]
    sides = high - low
    middle = moves_4[..., :2] * sides + (low + sides / 2)
    half = moves_4[..., 2:].clamp(max=FARTHEST).exp() * sides / 2
    return torch.cat([middle - half, middle + half], -1)
