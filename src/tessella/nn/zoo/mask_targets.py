"""What a network that draws masks learns: the part of each thing's mask that a proposal shows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def mask_loss(
    logits_PKSS: Tensor,
    kinds_P: Tensor,
    proposals: list[Tensor],
    owners: list[Tensor],
    things: list[dict[str, Tensor]],
) -> Tensor:
    """Binary cross entropy of the mask of each proposal's class, the mean over all cells.

    Args:
        kinds_P: the class that each proposal learns, of all pictures one behind another.
        proposals: of each picture [P, 4] in pixels; ``owners``: the thing that each learns, [P].
        things: of each picture, with ``boxes`` [M, 4] in pixels and ``masks`` [M, S, S]: the share
            of each cell of a thing's box that is the thing.
    """
    if not len(kinds_P):
        return logits_PKSS.sum() * 0
    side = logits_PKSS.shape[-1]
    wanted = [
        shown(thing["masks"], thing["boxes"], owner, boxes, side)
        for thing, owner, boxes in zip(things, owners, proposals, strict=True)
    ]
    told = logits_PKSS[torch.arange(len(kinds_P), device=kinds_P.device), kinds_P]
    return F.binary_cross_entropy_with_logits(told, torch.cat(wanted))


def shown(
    masks_MSS: Tensor, boxes_M4: Tensor, owners_P: Tensor, proposals_P4: Tensor, side: int
) -> Tensor:
    """The masks of things in the frames of proposals, [P, side, side]; outside of a box nothing."""
    # not above: torchvision takes as long as torch, and most networks do without
    from torchvision.ops import roi_align

    if not len(owners_P):
        return proposals_P4.new_zeros(0, side, side)
    own = boxes_M4[owners_P]
    low, sides = own[:, :2].repeat(1, 2), (own[:, 2:] - own[:, :2]).repeat(1, 2)
    # a border of a cell, so that at the edge a mask does not go on
    cells = masks_MSS.shape[-1]
    places = (proposals_P4 - low) / sides * cells + 1
    framed = F.pad(masks_MSS, (1, 1, 1, 1))[:, None]
    rows = torch.cat([owners_P[:, None].to(places), places], 1)
    made: Tensor = roi_align(framed, rows, side, sampling_ratio=4, aligned=True)
    return made[:, 0]
