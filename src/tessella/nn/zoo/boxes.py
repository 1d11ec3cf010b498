"""Overlaps of boxes x0 y0 x1 y1, as losses want them."""

from __future__ import annotations

import torch
from torch import Tensor


def iou_and_giou(one_N4: Tensor, other_N4: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union of pairs of boxes [..., 4], and the generalized one
    (arXiv:1902.09630)."""
    common = _area(torch.maximum(one_N4[..., :2], other_N4[..., :2]),
                   torch.minimum(one_N4[..., 2:], other_N4[..., 2:]))  # fmt: skip
    around = _area(torch.minimum(one_N4[..., :2], other_N4[..., :2]),
                   torch.maximum(one_N4[..., 2:], other_N4[..., 2:]))  # fmt: skip
    union = (
        _area(one_N4[..., :2], one_N4[..., 2:])
        + _area(other_N4[..., :2], other_N4[..., 2:])
        - common
    )
    iou = common / union.clamp(min=1e-9)
    return iou, iou - (around - union) / around.clamp(min=1e-9)


def _area(low_N2: Tensor, high_N2: Tensor) -> Tensor:
    # prod() asks the GPU, on the way back, whether a side is 0
    sides = (high_N2 - low_N2).clamp(min=0)
    return sides[..., 0] * sides[..., 1]
