"""CenterNet: a box and a class at each peak of a map of centres, on any of timm's backbones.

Zhou et al., Objects as points, arXiv:1904.07850, with what Liu et al. (TTFNet, arXiv:1909.00700)
teach it: boxes learn from all places near a centre. So do classes here, each place by cross
entropy, and one map says where centres are: with a few hundred pictures a class has few centres.
No anchors, no matching, and no suppression of boxes beyond a maximum over 3 × 3 places.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessella.core.errors import UsageError
from tessella.nn.zoo import boxes as overlap
from tessella.nn.zoo import timm_network
from tessella.operations.reference.detect import (
    CENTRE,
    KINDS,
    SIDES,
    boxes_of,
    peak_boxes,
    places,
)
from tessella.tasks.detection.head import MOST

STRIDE = 4  # pixels of the input beside each other for each place
COARSEST = 32
WIDTH = 64  # channels of the pyramid
BACKBONE = "resnet18"
SPREAD = 0.54  # of a box: the part of it that learns, TTFNet's alpha and beta
BOX_WEIGHT = 3.0  # of the loss of boxes beside those of centres and classes
PRIOR = 0.1  # the score of every place before the first step


class CenterNet(nn.Module):
    """The network: ``[N, channels, H, W]`` to boxes ``[N, P, 4 + classes]``, or to its loss.

    The boxes are those of the ``MOST`` peaks whose centres are the surest.

    Args:
        backbone: a network of timm.
        width: channels of the pyramid; the head has three times as many.
    """

    def __init__(
        self,
        *,
        classes: int,
        channels: int,
        pretrained: bool = False,
        backbone: str = BACKBONE,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.backbone, sides = timm_network.pyramid(
            backbone, channels=channels, pretrained=pretrained
        )
        self._levels = [i for i, (r, _) in enumerate(sides) if STRIDE <= r <= COARSEST]
        if not self._levels or sides[self._levels[0]][0] != STRIDE:
            raise UsageError(
                "a backbone of centernet has features of a fourth of the picture",
                seen=f"{backbone} has {', '.join(f'1/{r}' for r, _ in sides)}",
                fix="take a convolutional one, such as resnet18 or mobilenetv3_large_100",
            )
        self.lateral = nn.ModuleList(nn.Conv2d(sides[i][1], width, 1) for i in self._levels)
        self.merge = nn.ModuleList(_block(width, width) for _ in self._levels[:-1])
        # one head for all: after 15 epochs of the quick start's pictures mAP@50 0.52, where three
        # heads of their own had 0.47
        last = nn.Conv2d(3 * width, KINDS + classes, 1)
        nn.init.normal_(last.weight, std=0.01)
        nn.init.constant_(last.bias[CENTRE], -math.log(1 / PRIOR - 1))  # type: ignore[index]
        self.head = nn.Sequential(_block(width, 3 * width), last)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Boxes; in training [loss, mean overlap] of targets [N, M, 6] (``tasks.detection``)."""
        features = self.backbone(images)
        x = self.lateral[-1](features[self._levels[-1]])
        for level in reversed(range(len(self._levels) - 1)):
            finer = self.lateral[level](features[self._levels[level]])
            x = self.merge[level](finer + F.interpolate(x, size=finer.shape[-2:], mode="nearest"))
        told = self.head(x)
        step = {"down": STRIDE / images.shape[-2], "along": STRIDE / images.shape[-1]}
        if targets is None:
            # one operation where a graph is captured; elsewhere what it consists of
            exporting = torch.compiler.is_exporting()
            last = torch.ops.tessella.peak_boxes if exporting else peak_boxes
            boxes: Tensor = last(told, **step, most=MOST)
            return boxes
        told_NPC = told.flatten(2).transpose(1, 2).float()
        rows, columns = told.shape[-2:]
        places_P4 = places(rows, columns, told.device, **step)
        boxes = boxes_of(told_NPC[..., SIDES:KINDS], places_P4, **step)
        return loss(told[:, CENTRE].float(), told_NPC[..., KINDS:], boxes, targets)


def _block(channels: int, width: int) -> nn.Sequential:
    conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True))


# --- the loss -------------------------------------------------------------------------------------


def loss(centres_NHW: Tensor, kinds_NPK: Tensor, boxes_NP4: Tensor, targets_NM6: Tensor) -> Tensor:
    """[loss, mean overlap], a scalar each, of the batch.

    Centres learn by CenterNet's focal loss from a bell around each thing; boxes by GIoU, and
    classes by cross entropy, at the places around it, the nearer the more.
    """
    size = (centres_NHW.shape[1], centres_NHW.shape[2])
    grid = _grid(*size, centres_NHW.device)
    focal = 0 * (boxes_NP4.sum() + kinds_NPK.sum())  # data-parallel training wants all parameters
    found: list[tuple[Tensor, Tensor, Tensor]] = []  # weight, loss and overlap of places
    samples = zip(centres_NHW, kinds_NPK, boxes_NP4, targets_NM6, strict=True)
    for centres_HW, kinds_PK, boxes_P4, targets_M6 in samples:
        things = targets_M6[(targets_M6[:, 4] >= 0) & (targets_M6[:, 5] == 0)]
        crowds = targets_M6[targets_M6[:, 5] > 0, :4]
        bells_MP = _bells(things[:, :4], grid, size)
        focal = focal + _focal(centres_HW.flatten(), bells_MP, _within(crowds, grid))
        if not len(things):
            continue
        owner_P, weight_P = _owners(things[:, :4], bells_MP, grid)
        learns = weight_P > 0
        truth = things[owner_P[learns]]
        common, whole = overlap.iou_and_giou(boxes_P4[learns], truth[:, :4])
        wrong = F.cross_entropy(kinds_PK[learns], truth[:, 4].long(), reduction="none")
        found.append((weight_P[learns], wrong + BOX_WEIGHT * (1 - whole), common.detach()))
    is_thing = (targets_NM6[..., 4] >= 0) & (targets_NM6[..., 5] == 0)
    total = focal / is_thing.sum().clamp(min=1)
    if not found:
        return torch.stack([total, total.new_zeros(())])
    weight, apart, overlaps = (torch.cat(parts) for parts in zip(*found, strict=True))
    weight = weight / weight.sum()
    return torch.stack([total + (weight * apart).sum(), (weight * overlaps).sum()])


def _grid(rows: int, columns: int, device: torch.device) -> Tensor:
    """The middle of each place in fractions of the map, [P, 2], x first."""
    return places(rows, columns, device, down=1 / rows, along=1 / columns)[:, :2]


def _bells(boxes_M4: Tensor, grid_P2: Tensor, size: tuple[int, int]) -> Tensor:
    """A bell around each thing's middle place, where it is 1; [M, P]."""
    scale = grid_P2.new_tensor([size[1], size[0]])
    middle = (boxes_M4[:, :2] + boxes_M4[:, 2:]) / 2 * scale
    middle = torch.minimum(middle.floor(), scale - 1) + 0.5
    sigma = (SPREAD * (boxes_M4[:, 2:] - boxes_M4[:, :2]) * scale + 1) / 6
    off = (grid_P2[None] * scale - middle[:, None]) / sigma[:, None]
    return torch.exp(-off.square().sum(2) / 2)


def _within(boxes_M4: Tensor, grid_P2: Tensor) -> Tensor:
    """Which places lie in one of the boxes, bool [P]."""
    inside = (grid_P2[None] >= boxes_M4[:, None, :2]) & (grid_P2[None] <= boxes_M4[:, None, 2:])
    return inside.all(2).any(0)


def _focal(centres_P: Tensor, bells_MP: Tensor, ignored_P: Tensor) -> Tensor:
    """CenterNet's loss of a map of centres: near a centre a high score costs less."""
    wanted_P = bells_MP.amax(0) if len(bells_MP) else torch.zeros_like(centres_P)
    p = centres_P.sigmoid()
    hit = -(1 - p).square() * F.logsigmoid(centres_P)
    miss = -(1 - wanted_P).pow(4) * p.square() * F.logsigmoid(-centres_P)
    return torch.where(wanted_P > 1 - 1e-4, hit, miss * ~ignored_P).sum()


def _owners(boxes_M4: Tensor, bells_MP: Tensor, grid_P2: Tensor) -> tuple[Tensor, Tensor]:
    """The thing from which each place learns a box, the smallest of several; and its weight.

    The weights of a thing sum to 1 where nothing covers it.
    """
    middle, half = (boxes_M4[:, :2] + boxes_M4[:, 2:]) / 2, boxes_M4[:, 2:] - boxes_M4[:, :2]
    near = ((grid_P2[None] - middle[:, None]).abs() <= SPREAD * half[:, None] / 2).all(2)
    near |= bells_MP > 1 - 1e-4  # a thing smaller than a place learns there
    area = (half[:, 0] * half[:, 1])[:, None].expand_as(bells_MP)
    least = torch.where(near, area, torch.inf).min(0)
    weight_MP = torch.where(near, bells_MP, 0.0)
    weight_MP = weight_MP / weight_MP.sum(1, keepdim=True)
    weight_P = weight_MP.gather(0, least.indices[None])[0]
    return least.indices, torch.where(least.values.isfinite(), weight_P, 0.0)


def build(*, classes: int, channels: int, options: dict[str, Any], pretrained: bool) -> nn.Module:
    """The network; ``pretrained``: the backbone's weights are timm's."""
    return CenterNet(classes=classes, channels=channels, pretrained=pretrained, **options)
