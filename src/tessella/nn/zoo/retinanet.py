"""RetinaNet: torchvision's network, whose boxes are found and suppressed in one graph.

Lin et al., Focal loss for dense object detection, arXiv:1708.02002. Each place of five maps tells
of nine boxes around it, the anchors, which classes they show and how they differ from the thing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tessella.core.errors import UsageError
from tessella.nn.zoo import anchors, standard
from tessella.nn.zoo import boxes as overlap
from tessella.operations.reference.detect import nms
from tessella.tasks.detection.head import MOST

BACKBONES = {"retinanet_r18": "resnet18", "retinanet_r50": "resnet50"}
PUBLISHED = {"retinanet_r50": "retinanet_resnet50_fpn"}
ANCHOR = 32  # pixels: the sides of the smallest anchors
LEVELS = 5
RATIOS = (0.5, 1.0, 2.0)
CANDIDATES = 1000  # pairs of a box and a class of each level that are looked at
LEAST = 0.05  # and their least score
LIMIT = 0.5  # overlap of two boxes of a class of which one goes


class RetinaNet(nn.Module):
    """The network: ``[N, channels, H, W]`` to boxes ``[N, MOST, 4 + classes]``, or to its loss.

    The boxes are those that torchvision's answers, each with a score of one class.

    Args:
        network: a ``torchvision.models.detection.RetinaNet``, which becomes part of this.
        size: height and width of its inputs.
    """

    anchors: Tensor

    def __init__(self, network: Any, channels: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.network, self.classes = network, int(network.head.classification_head.num_classes)
        generator = network.anchor_generator
        around, self.places = anchors.anchors(network.backbone, generator, channels, size)
        self.register_buffer("anchors", around, persistent=False)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Boxes; in training [loss, mean overlap] of targets [N, M, 6] (``tasks.detection``).

        The overlap is that of boxes that learn a thing.
        """
        told = self.network.head(list(self.network.backbone(images).values()))
        logits_NAK, moves_NA4 = told["cls_logits"], told["bbox_regression"]
        height, width = images.shape[-2:]
        if targets is None:
            return self._boxes(logits_NAK, moves_NA4, height, width)
        sides = images.new_tensor([width, height, width, height])
        return self._loss(logits_NAK, moves_NA4, targets, sides)

    def _boxes(self, logits_NAK: Tensor, moves_NA4: Tensor, height: int, width: int) -> Tensor:
        """The surest boxes in fractions of the picture, those apart that say the same."""
        scores, found, kinds = [], [], []
        begin = 0
        for count in self.places:
            level = logits_NAK[:, begin : begin + count].flatten(1)
            best = level.topk(min(CANDIDATES, level.shape[1]))
            scores.append(best.values)
            found.append(torch.div(best.indices, self.classes, rounding_mode="floor") + begin)
            kinds.append(best.indices % self.classes)
            begin += count
        found_NP, kind_NP = torch.cat(found, 1), torch.cat(kinds, 1)
        score_NP = torch.cat(scores, 1).float().sigmoid()
        moves_NP4 = moves_NA4.gather(1, found_NP[:, :, None].expand(-1, -1, 4)).float()
        boxes = anchors.moved(moves_NP4, nn.functional.embedding(found_NP, self.anchors))
        sides = torch.tensor([width, height, width, height], device=boxes.device)
        boxes = boxes.clamp(min=0).minimum(sides)
        # one operation where a graph is captured; elsewhere what it consists of
        apart = torch.ops.tessella.nms if torch.compiler.is_exporting() else nms
        kept = apart(
            boxes, score_NP[:, None], kind_NP,
            iou_threshold=LIMIT, score_threshold=LEAST, most=MOST,
        )[:, 0]  # fmt: skip
        place = kept.clamp(min=0)
        is_box = (kept >= 0)[:, :, None]
        told = (boxes / sides).gather(1, place[:, :, None].expand(-1, -1, 4)) * is_box
        score = score_NP.gather(1, place)[:, :, None] * is_box
        known = torch.arange(self.classes, device=kept.device)
        shown = kind_NP.gather(1, place)[:, :, None] == known
        return torch.cat([told, score * shown], 2).to(logits_NAK.dtype)

    def _loss(
        self, logits_NAK: Tensor, moves_NA4: Tensor, targets: Tensor, sides_4: Tensor
    ) -> Tensor:
        head = self.network.head
        things, owners, overlaps = [], [], []
        for targets_M6, moves_A4 in zip(targets, moves_NA4.detach().float(), strict=True):
            kept = targets_M6[(targets_M6[:, 4] >= 0) & (targets_M6[:, 5] == 0)]
            boxes = kept[:, :4] * sides_4
            # of no area, nothing could be learned from: the logarithm of its sides
            seen = (boxes[:, 2:] > boxes[:, :2]).all(1)
            boxes, labels = boxes[seen], kept[seen, 4].long()
            owner = torch.full((len(self.anchors),), -1, device=boxes.device)
            if len(boxes):
                owner = self.network.proposal_matcher(_iou(boxes, self.anchors))
                learns = owner >= 0
                made = anchors.moved(moves_A4[learns], self.anchors[learns])
                overlaps.append(overlap.iou_and_giou(made, boxes[owner[learns]])[0])
            things.append({"boxes": boxes, "labels": labels})
            owners.append(owner)
        told = {"cls_logits": logits_NAK.float(), "bbox_regression": moves_NA4.float()}
        losses = head.compute_loss(things, told, [self.anchors] * len(targets), owners)
        found = torch.cat([*overlaps, sides_4.new_zeros(0)])
        mean = found.mean() if len(found) else sides_4.new_zeros(())
        return torch.stack([losses["classification"] + losses["bbox_regression"], mean])


def _iou(boxes_M4: Tensor, anchors_A4: Tensor) -> Tensor:
    from torchvision.ops import box_iou

    found: Tensor = box_iou(boxes_M4, anchors_A4)
    return found


def build(
    name: str,
    *,
    classes: int,
    channels: int,
    height: int,
    width: int,
    options: dict[str, Any],
    pretrained: bool,
) -> nn.Module:
    """The network with fresh weights, or with torchvision's of COCO, the classes' aside.

    Raises:
        UsageError: smallest anchors of less than a pixel, or weights that cannot be had.
    """
    from torchvision import models
    from torchvision.models.detection import anchor_utils, backbone_utils, retinanet
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    anchor = options.get("anchor", ANCHOR)
    if not isinstance(anchor, int) or anchor < 1:
        raise UsageError(
            "the sides of the smallest anchors are whole pixels",
            seen=anchor,
            fix=f"anchor={ANCHOR}",
        )
    body = models.get_model(BACKBONES[name], weights=None)
    if channels != 3:
        standard.replace_first(body, standard.ARCHITECTURES[BACKBONES[name]], channels)
    backbone = backbone_utils._resnet_fpn_extractor(
        body, 5, returned_layers=[2, 3, 4], extra_blocks=LastLevelP6P7(256, 256)
    )
    sizes = tuple(
        tuple(int(anchor * 2**level * 2 ** (third / 3)) for third in range(3))
        for level in range(LEVELS)
    )
    generator = anchor_utils.AnchorGenerator(sizes, (RATIOS,) * LEVELS)
    network = retinanet.RetinaNet(backbone, classes, anchor_generator=generator)
    del network.transform  # pictures come resized and normalized
    if pretrained:
        heads = ("head.classification_head.cls_logits.",)
        standard.load_detector(network, PUBLISHED, name, channels, heads)
    return RetinaNet(network, channels, (height, width))
