"""RetinaNet: torchvision's network, whose boxes are found and suppressed in one graph.

Lin et al., Focal loss for dense object detection, arXiv:1708.02002. Each place of five maps tells
of nine boxes around it, the anchors, which classes they show and how they differ from the thing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tessella.artifacts.checkpoint import Network
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
MATCHED, APART = 0.5, 0.4  # overlaps: an anchor learns a box, or that it shows nothing
BALANCE = 0.25  # of a score's loss where the thing is there; the rest where it is not
PAIRS = 1 << 26  # of a box and an anchor that are compared at once: 256 MB of numbers


class RetinaNet(nn.Module):
    """The network: ``[N, channels, H, W]`` to boxes ``[N, MOST, 4 + classes]``, or to its loss.

    The boxes are those that torchvision's answers, each with a score of one class.

    Args:
        network: a ``torchvision.models.detection.RetinaNet``, which becomes part of this.
        size: height and width of its inputs.
    """

    anchors: Tensor
    sides: Tensor  # of a picture: width, height, width, height

    def __init__(self, network: Any, channels: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.network, self.classes = network, int(network.head.classification_head.num_classes)
        generator = network.anchor_generator
        around, self.places = anchors.anchors(network.backbone, generator, channels, size)
        self.register_buffer("anchors", around, persistent=False)
        sides = torch.tensor([size[1], size[0]] * 2, dtype=torch.float32)
        self.register_buffer("sides", sides, persistent=False)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Boxes; in training [loss, mean overlap] of targets [N, M, 6] (``tasks.detection``).

        The overlap is that of boxes that learn a thing.
        """
        told = self.network.head(list(self.network.backbone(images).values()))
        logits_NAK, moves_NA4 = told["cls_logits"], told["bbox_regression"]
        if targets is None:
            return self._boxes(logits_NAK, moves_NA4)
        return self._loss(logits_NAK, moves_NA4, targets)

    def _boxes(self, logits_NAK: Tensor, moves_NA4: Tensor) -> Tensor:
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
        boxes = boxes.clamp(min=0).minimum(self.sides)
        # one operation where a graph is captured; elsewhere what it consists of
        apart = torch.ops.tessella.nms if torch.compiler.is_exporting() else nms
        kept = apart(
            boxes, score_NP[:, None], kind_NP,
            iou_threshold=LIMIT, score_threshold=LEAST, most=MOST,
        )[:, 0]  # fmt: skip
        place = kept.clamp(min=0)
        is_box = (kept >= 0)[:, :, None]
        told = (boxes / self.sides).gather(1, place[:, :, None].expand(-1, -1, 4)) * is_box
        score = score_NP.gather(1, place)[:, :, None] * is_box
        known = torch.arange(self.classes, device=kept.device)
        shown = kind_NP.gather(1, place)[:, :, None] == known
        return torch.cat([told, score * shown], 2).to(logits_NAK.dtype)

    def _loss(self, logits_NAK: Tensor, moves_NA4: Tensor, targets_NM6: Tensor) -> Tensor:
        """torchvision's: every shape is known before, so that a step is one graph on a GPU."""
        boxes_NM4 = targets_NM6[:, :, :4] * self.sides
        # of no area, nothing could be learned from: the logarithm of its sides
        seen_NM = (boxes_NM4[:, :, 2:] > boxes_NM4[:, :, :2]).all(2)
        seen_NM &= (targets_NM6[:, :, 4] >= 0) & (targets_NM6[:, :, 5] == 0)
        # finite where nobody learns
        boxes_NM4 = boxes_NM4.where(seen_NM[:, :, None], nn.functional.pad(self.sides[2:], (2, 0)))
        owner_NA, learns_NA, counts_NA = self._matched(boxes_NM4, seen_NM)
        label_NA = targets_NM6[:, :, 4].gather(1, owner_NA)
        things_N = learns_NA.sum(1).clamp(min=1)
        known = torch.arange(self.classes, device=label_NA.device)
        shown_NAK = learns_NA[:, :, None] & (label_NA[:, :, None] == known)
        focal = _focal(logits_NAK.float(), shown_NAK) * counts_NA[:, :, None]
        box_NA4 = boxes_NM4.gather(1, owner_NA[:, :, None].expand(-1, -1, 4))
        off_NA4 = (moves_NA4.float() - _moves(box_NA4, self.anchors)).abs()
        off = off_NA4.where(learns_NA[:, :, None], 0.0)
        with torch.no_grad():
            made = anchors.moved(moves_NA4.float(), self.anchors)
            iou = overlap.iou_and_giou(made.flatten(0, 1), box_NA4.flatten(0, 1))[0]
            mean = (iou.view_as(learns_NA) * learns_NA).sum() / learns_NA.sum().clamp(min=1)
        each_N = (focal.sum((1, 2)) + off.sum((1, 2))) / things_N
        return torch.stack([each_N.mean(), mean])

    def _matched(self, boxes_NM4: Tensor, seen_NM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each anchor the box that it overlaps most, [N, A], whether it learns that box, and
        whether its scores learn at all.

        It learns from an overlap of ``MATCHED`` on, or where no anchor overlaps a box more; less
        than ``APART`` is no thing, and what lies between is left out.
        """
        each = max(1, PAIRS // (seen_NM.shape[1] * len(self.anchors)))  # pictures at a time
        found = []
        for boxes_PM4, seen_PM in zip(
            torch.split(boxes_NM4, each), torch.split(seen_NM, each), strict=True
        ):
            # no box overlaps less than nothing, and none is such a thing's best
            iou_PMA = overlap.iou(boxes_PM4[:, :, None], self.anchors)
            iou_PMA = iou_PMA.where(seen_PM[:, :, None], -1.0)
            most_PA, owner_PA = iou_PMA.max(1)
            highest_PM1 = iou_PMA.amax(2, keepdim=True)
            best_PA = ((iou_PMA == highest_PM1) & seen_PM[:, :, None]).any(1)
            learns_PA = (most_PA >= MATCHED) | best_PA
            found.append((owner_PA, learns_PA, learns_PA | (most_PA < APART)))
        owner, learns, counts = (torch.cat(parts) for parts in zip(*found, strict=True))
        return owner, learns, counts


def _focal(logits: Tensor, shown: Tensor) -> Tensor:
    """Of each score (Lin et al.): what is right already counts little."""
    right = logits.where(shown, -logits)
    wrong = (-right).sigmoid()
    balance = torch.where(shown, BALANCE, 1 - BALANCE)
    return balance * wrong * wrong * nn.functional.softplus(-right)


def _moves(boxes_4: Tensor, anchors_4: Tensor) -> Tensor:
    """How boxes differ from anchors: what ``anchors.moved`` takes back."""
    sides, wanted = (b[..., 2:] - b[..., :2] for b in (anchors_4, boxes_4))
    middle, target = (b[..., :2] + s / 2 for b, s in ((anchors_4, sides), (boxes_4, wanted)))
    return torch.cat([(target - middle) / sides, (wanted / sides).log()], -1)


def build(record: Network, *, pretrained: bool) -> nn.Module:
    """The network with fresh weights, or with torchvision's of COCO, the classes' aside.

    Raises:
        UsageError: smallest anchors of less than a pixel, or weights that cannot be had.
    """
    # not above: torchvision takes as long as torch, and most networks do without
    from torchvision import models
    from torchvision.models.detection import anchor_utils, backbone_utils, retinanet
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    name, channels = record.name, record.channels
    anchor = record.options.get("anchor", ANCHOR)
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
    network = retinanet.RetinaNet(backbone, record.classes, anchor_generator=generator)
    del network.transform  # pictures come resized and normalized
    if pretrained:
        heads = ("head.classification_head.cls_logits.",)
        standard.load_detector(network, PUBLISHED, name, channels, heads)
    return RetinaNet(network, channels, (record.height, record.width))
