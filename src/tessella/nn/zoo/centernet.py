"""CenterNet: a box and a class at each peak of a map of centres, on any of timm's backbones.

Zhou et al., Objects as points, arXiv:1904.07850, with what Liu et al. (TTFNet, arXiv:1909.00700)
teach it: boxes learn from all places near a centre. So do classes here, each place by cross
entropy, and one map says where centres are: with a few hundred pictures a class has few centres.
No anchors, no matching, and no suppression of boxes beyond a maximum over 3 × 3 places.
"""

from __future__ import annotations

import math

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

    No shape depends on what a picture shows, so that a step on a GPU asks it nothing and is one
    graph. Picture by picture a step of 32 made 29,000 calls and asked 256 times.
    """
    if targets_NM6.shape[1] == 0:  # no picture shows anything
        targets_NM6 = F.pad(targets_NM6, (0, 0, 0, 1), value=-1.0)
    classes_NM, crowd_NM = targets_NM6[..., 4], targets_NM6[..., 5] > 0
    thing_NM = (classes_NM >= 0) & ~crowd_NM
    with torch.no_grad():
        bells_NMHW, near_NMHW, ignored_NHW = _around(targets_NM6, thing_NM, crowd_NM, centres_NHW)
        owner_NP, weight_NP = _owners(targets_NM6, bells_NMHW, near_NMHW)
    focal = _focal(centres_NHW, bells_NMHW.amax(1), ignored_NHW) / thing_NM.sum().clamp(min=1)
    truth_NP6 = targets_NM6.gather(1, owner_NP[..., None].expand(-1, -1, targets_NM6.shape[2]))
    # whatever lies where nothing learns must not be infinite: 0 times that is no number
    boxes_NP4 = boxes_NP4.masked_fill(weight_NP[..., None] == 0, 0.0)
    common, whole = overlap.iou_and_giou(boxes_NP4.flatten(0, 1), truth_NP6[..., :4].flatten(0, 1))
    kinds = truth_NP6[..., 4].clamp(min=0).long().flatten()
    wrong = F.cross_entropy(kinds_NPK.flatten(0, 1), kinds, reduction="none")
    weight = weight_NP.flatten() / weight_NP.sum().clamp(min=1e-9)
    apart = wrong + BOX_WEIGHT * (1 - whole)
    return torch.stack([focal + (weight * apart).sum(), (weight * common.detach()).sum()])


def _around(
    targets_NM6: Tensor, thing_NM: Tensor, crowd_NM: Tensor, like_NHW: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each thing a bell around its middle place, where it is 1, and which places are near it;
    and which places lie in a crowd."""
    x, y = (
        _along(targets_NM6[..., axis], targets_NM6[..., axis + 2], like_NHW.shape[2 - axis])
        for axis in (0, 1)
    )
    bells, near, within = (b[..., :, None] * a[..., None, :] for a, b in zip(x, y, strict=True))
    thing_NM11, crowd_NM11 = thing_NM[..., None, None], crowd_NM[..., None, None]
    bells = bells * thing_NM11
    near = near | (bells > 1 - 1e-4)  # a thing smaller than a place learns there
    return bells, near & thing_NM11, (within & crowd_NM11).any(1)


def _along(low_NM: Tensor, high_NM: Tensor, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same along one side of the map, [N, M, places], and which places lie in the boxes."""
    at = (torch.arange(places, device=low_NM.device) + 0.5) / places
    low, high = low_NM[..., None], high_NM[..., None]
    middle, side = (low + high) / 2, high - low
    off = at * places - (middle * places).floor().clamp(max=places - 1) - 0.5
    bell = torch.exp(-(6 * off / (SPREAD * side * places + 1)).square() / 2)
    return bell, (at - middle).abs() <= SPREAD * side / 2, (at >= low) & (at <= high)


def _focal(centres_NHW: Tensor, wanted_NHW: Tensor, ignored_NHW: Tensor) -> Tensor:
    """CenterNet's loss of maps of centres, summed: near a centre a high score costs less."""
    p = centres_NHW.sigmoid()
    hit = -(1 - p).square() * F.logsigmoid(centres_NHW)
    miss = -(1 - wanted_NHW).pow(4) * p.square() * F.logsigmoid(-centres_NHW)
    return torch.where(wanted_NHW > 1 - 1e-4, hit, miss * ~ignored_NHW).sum()


def _owners(targets_NM6: Tensor, bells_NMHW: Tensor, near_NMHW: Tensor) -> tuple[Tensor, Tensor]:
    """The thing from which each place learns a box, the smallest of several; and its weight.

    The weights of a thing sum to 1 where nothing covers it; 0 where nothing is learned. [N, P].
    """
    sides_NM2 = targets_NM6[..., 2:4] - targets_NM6[..., :2]
    area_NM1 = sides_NM2.prod(2, keepdim=True)
    near, bells = near_NMHW.flatten(2), bells_NMHW.flatten(2)
    # masked_fill: of two values, where() brings a number to the GPU, which a graph cannot
    least = area_NM1.expand_as(bells).masked_fill(~near, torch.inf).min(1)
    weight = bells.masked_fill(~near, 0.0)
    weight = weight / weight.sum(2, keepdim=True).clamp(min=1e-9)
    weight = weight.gather(1, least.indices[:, None])[:, 0]
    return least.indices, weight.masked_fill(least.values.isinf(), 0.0)
