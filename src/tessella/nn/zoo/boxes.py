"""Overlaps of boxes x0 y0 x1 y1, as losses want them."""

from __future__ import annotations

import torch
from torch import Tensor


def iou(one_4: Tensor, other_4: Tensor) -> Tensor:
    """Intersection over union of boxes whose leading axes broadcast; 0 where one has no area."""
    x0, y0, x1, y1 = one_4.unbind(-1)
    u0, v0, u1, v1 = other_4.unbind(-1)
    wide = (torch.minimum(x1, u1) - torch.maximum(x0, u0)).clamp(min=0)
    common = wide * (torch.minimum(y1, v1) - torch.maximum(y0, v0)).clamp(min=0)
    union = (x1 - x0) * (y1 - y0) + (u1 - u0) * (v1 - v0) - common
    return common / union.clamp(min=1e-9)


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
