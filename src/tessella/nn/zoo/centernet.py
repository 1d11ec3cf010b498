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

STRIDE = 4  # pixels of the input beside each other for each place
COARSEST = 32
WIDTH = 64  # channels of the pyramid
BACKBONE = "resnet18"
SPREAD = 0.54  # of a box: the part of it that learns, TTFNet's alpha and beta
BOX_WEIGHT = 3.0  # of the loss of boxes beside those of centres and classes
PRIOR = 0.1  # the score of every place before the first step
MOST_LOG = 6.0  # e^6 · 8 pixels are more than any picture has


class CenterNet(nn.Module):
    """The network: ``[N, channels, H, W]`` to boxes ``[N, P, 4 + classes]``, or to its loss.

    Args:
        backbone: a network of timm.
        width: channels of the pyramid and the heads.
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
        self.centres = _head(width, 1)
        self.classes = _head(width, classes)
        self.sides = _head(width, 4)
        nn.init.constant_(self.centres[-1].bias, -math.log(1 / PRIOR - 1))  # type: ignore[arg-type]

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Boxes; in training [loss, mean overlap] of targets [N, M, 6] (``tasks.detection``)."""
        features = self.backbone(images)
        x = self.lateral[-1](features[self._levels[-1]])
        for level in reversed(range(len(self._levels) - 1)):
            finer = self.lateral[level](features[self._levels[level]])
            x = self.merge[level](finer + F.interpolate(x, size=finer.shape[-2:], mode="nearest"))
        centres, kinds = self.centres(x), self.classes(x).flatten(2).transpose(1, 2)
        boxes = self._boxes(self.sides(x), images.shape[-2], images.shape[-1])
        if targets is not None:
            return loss(centres[:, 0].float(), kinds.float(), boxes, targets)
        scores = centres.sigmoid() * (centres == F.max_pool2d(centres, 3, 1, 1))
        told = scores.flatten(2).transpose(1, 2) * kinds.softmax(2)
        return torch.cat([boxes.clamp(0, 1), told.to(boxes)], 2)

    def _boxes(self, sides: Tensor, height: int, width: int) -> Tensor:
        """Boxes [N, P, 4] in fractions of the input, by their distances from each place."""
        rows, columns = sides.shape[-2:]
        far = sides.float().flatten(2).transpose(1, 2).clamp(max=MOST_LOG).exp() * (2 * STRIDE)
        y = (torch.arange(rows, device=sides.device) + 0.5) * STRIDE
        x = (torch.arange(columns, device=sides.device) + 0.5) * STRIDE
        place = _places(x, y)
        scale = torch.tensor([width, height], dtype=far.dtype, device=far.device)
        return torch.cat([(place - far[..., :2]) / scale, (place + far[..., 2:]) / scale], 2)


def _block(channels: int, width: int) -> nn.Sequential:
    conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True))


def _head(width: int, outputs: int) -> nn.Sequential:
    last = nn.Conv2d(width, outputs, 1)
    nn.init.normal_(last.weight, std=0.01)
    return nn.Sequential(_block(width, width), last)


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
    y = (torch.arange(rows, device=device) + 0.5) / rows
    x = (torch.arange(columns, device=device) + 0.5) / columns
    return _places(x, y)


def _places(x: Tensor, y: Tensor) -> Tensor:
    """Every pair of an x and a y, row by row, [P, 2]."""
    shape = (len(y), len(x))
    return torch.stack([x[None].expand(shape), y[:, None].expand(shape)], 2).reshape(-1, 2)


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
