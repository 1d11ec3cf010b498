"""What D-FINE and RF-DETR have in common around Hugging Face's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tessella.core.errors import UsageError
from tessella.operations.reference.detect import deformable_attention


def boxes_and_scores(boxes_NQ4: Tensor, logits_NQK: Tensor) -> Tensor:
    """Boxes of middle and sides, and logits, as our detectors answer."""
    boxes = boxes_NQ4.float()
    middle, half = boxes[..., :2], boxes[..., 2:] / 2
    boxes = torch.cat([middle - half, middle + half], 2).clamp(0, 1)
    return torch.cat([boxes, logits_NQK.float().sigmoid()], 2).to(logits_NQK.dtype)


def things_of(targets_M6: Tensor) -> dict[str, Tensor]:
    """What of a picture's targets is learned, as Hugging Face's loss wants it: no crowds."""
    kept = targets_M6[(targets_M6[:, 4] >= 0) & (targets_M6[:, 5] == 0)]
    low, high = kept[:, :2], kept[:, 2:4]
    boxes = torch.cat([(low + high) / 2, high - low], 1)
    return {"class_labels": kept[:, 4].long(), "boxes": boxes}


def looking() -> Callable[..., Tensor]:
    """Deformable attention: one operation where a network is exported, else what it does."""
    # torch.compile says that it exports, too
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    return torch.ops.tessella.deformable_attention if exporting else deformable_attention


def best_places(scores_NP: Tensor, most: int) -> Tensor:
    """Where the highest scores are, [N, most]."""
    return scores_NP.topk(most).indices


def at(values_NPC: Tensor, places_NM: Tensor) -> Tensor:
    """The values of some places of each picture, [N, M, C]."""
    return values_NPC.gather(1, places_NM[:, :, None].expand(-1, -1, values_NPC.shape[2]))


def sides_twice(boxes: Tensor) -> Tensor:
    """Width and height of boxes, twice: what shifts of the middle and of the sides are told in."""
    sides = boxes[..., 2:]
    return torch.cat([sides, sides], -1)


def require_transformers(network: str = "D-FINE") -> Any:
    """Hugging Face's transformers, whose import takes seconds.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"{network} needs transformers, which is not installed",
            seen=str(error),
            fix="pip install 'tessella[detectors]', or: pip install transformers",
        ) from error
    return transformers
