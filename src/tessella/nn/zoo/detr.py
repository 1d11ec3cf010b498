"""What D-FINE and RF-DETR have in common around Hugging Face's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tessella.core.errors import UsageError, first_line
from tessella.operations.reference.detect import deformable_attention

# middle and sides of a box → x0 y0 x1 y1
CORNERS = [[1, 0, -0.5, 0], [0, 1, 0, -0.5], [1, 0, 0.5, 0], [0, 1, 0, 0.5]]


def boxes_and_scores(boxes_NQ4: Tensor, logits_NQK: Tensor) -> Tensor:
    """Boxes of middle and sides, and logits, as our detectors answer."""
    boxes = boxes_NQ4.float()
    if exporting():  # one product, not five steps; autocast would round it
        boxes = F.linear(boxes, boxes.new_tensor(CORNERS))
    else:
        middle, half = boxes[..., :2], boxes[..., 2:] / 2
        boxes = torch.cat([middle - half, middle + half], 2)
    boxes = boxes.clamp(0, 1)
    return torch.cat([boxes, logits_NQK.float().sigmoid()], 2).to(logits_NQK.dtype)


def things_of(targets_M6: Tensor) -> dict[str, Tensor]:
    """What of a picture's targets is learned, as Hugging Face's loss wants it: no crowds."""
    kept = targets_M6[(targets_M6[:, 4] >= 0) & (targets_M6[:, 5] == 0)]
    low, high = kept[:, :2], kept[:, 2:4]
    boxes = torch.cat([(low + high) / 2, high - low], 1)
    return {"class_labels": kept[:, 4].long(), "boxes": boxes}


def looking() -> Callable[..., Tensor]:
    """Deformable attention: one operation where a network is exported, else what it does."""
    return torch.ops.tessella.deformable_attention if exporting() else deformable_attention


def exporting() -> bool:
    """Whether a network's forward pass is written down; torch.compile says so of its own, too."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def pixels(map_NCHW: Tensor) -> Tensor:
    """The pixels of a map, row by row, [N, H · W, C]; as channels_last lies they do so already."""
    return map_NCHW.permute(0, 2, 3, 1).flatten(1, 2)


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


def published(kind: Any, config: Any, names: tuple[str, str], channels: int) -> Any:
    """A network with the weights that its authors learned from COCO, for pictures normalized as
    ImageNet's.

    Args:
        kind: the class of ``transformers``.
        names: of the network, ours and that under which its weights are published.

    Raises:
        UsageError: the pictures have not three channels, or the weights cannot be fetched.
    """
    import httpx  # by which transformers fetches; no other network needs it

    name, place = names
    if channels != 3:
        raise UsageError(
            f"the published weights of {name} are for pictures of three channels",
            seen=f"{channels} channels",
            fix="import the pictures in color, or start from random weights",
        )
    try:
        return kind.from_pretrained(place, config=config, ignore_mismatched_sizes=True)
    except (OSError, httpx.HTTPError) as error:
        raise UsageError(
            f"the pretrained weights of {name} could not be fetched",
            seen=first_line(error),
            fix="go online once (the file is cached), or start from random weights or a checkpoint",
        ) from error
