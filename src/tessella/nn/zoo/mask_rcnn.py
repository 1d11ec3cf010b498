"""Mask R-CNN: torchvision's network, from pixels to boxes and masks in one graph of fixed shapes.

He et al., Mask R-CNN, arXiv:1703.06870. A first head proposes boxes around the anchors of five
maps; a second one tells of each proposal which class it shows and moves its box; a third one draws
the mask in each box that is told. There are always as many proposals and as many boxes: those that
are missing have no score.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessella.artifacts.checkpoint import Network
from tessella.core.errors import UsageError
from tessella.nn.zoo import anchors, standard
from tessella.nn.zoo import boxes as overlap
from tessella.nn.zoo.mask_targets import mask_loss
from tessella.operations.reference.detect import nms, pyramid_roi_align
from tessella.tasks.detection.head import MOST

PUBLISHED = {"resnet50": "maskrcnn_resnet50_fpn"}
BACKBONE = "resnet50"
WIDTH = 256  # channels of the pyramid
ANCHOR = 32  # pixels: the sides of the smallest anchors
RATIOS = (0.5, 1.0, 2.0)
STRIDES = (4, 8, 16, 32)  # of the maps in which regions are looked at; a fifth one only proposes
CANDIDATES = 1000  # anchors of each level, and pairs of a proposal and a class, that are looked at
LEARN = 512  # proposals of a picture that learn, at most
APART = 0.7  # overlap of two proposals of which one goes
LEAST = 0.05  # score of a box
LIMIT = 0.5  # overlap of two boxes of a class of which one goes
SMALLEST = (1e-3, 1e-2)  # pixels of a side: of a proposal, and of a box
SCALES = (10.0, 10.0, 5.0, 5.0)  # of how a box differs from its proposal
LARGER = (112, 224, 448)  # pixels of a side: such boxes look at the next map, a coarser one
SAMPLES = 2  # points along a side of a region's cell
REGION, DRAWN = 7, 14  # cells along the side of a region that is named, and of one that is drawn
ROUNDED = ("cuda",)  # devices on which a step draws the masks of a power of two of things
HEADS = ("roi_heads.box_predictor.", "roi_heads.mask_predictor.mask_fcn_logits.")


class MaskRCNN(nn.Module):
    """The network: ``[N, channels, H, W]`` to ``[N, detections, 4 + classes + 28²]``, or its loss.

    Boxes, scores and masks are those that torchvision's answers, each with a score of one class,
    as long as no more than ``CANDIDATES`` pairs of a proposal and a class have a chance.

    Args:
        network: a ``torchvision.models.detection.MaskRCNN``, which becomes part of this.
        size: height and width of its inputs.
        proposals, detections: how many there always are.
    """

    anchors: Tensor

    def __init__(
        self, network: Any, channels: int, size: tuple[int, int], *, proposals: int, detections: int
    ) -> None:
        super().__init__()
        self.network = network
        self.classes = int(network.roi_heads.box_predictor.cls_score.out_features) - 1
        self.proposals, self.detections = proposals, detections
        generator = network.rpn.anchor_generator
        around, self.places = anchors.anchors(network.backbone, generator, channels, size)
        self.register_buffer("anchors", around, persistent=False)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Boxes and masks; in training [loss, mean overlap] of targets (``tasks.instances``).

        The overlap is that of boxes that learn a thing.
        """
        maps = self.network.backbone(images)
        if targets is not None:
            return self._loss(images, maps, targets)
        height, width = images.shape[-2:]
        sides = torch.tensor([width, height, width, height], device=images.device)
        seen = [maps[str(level)] for level in range(len(STRIDES))]
        value = torch.cat([m.flatten(2).transpose(1, 2) for m in seen], 1)
        sizes = [side for m in seen for side in m.shape[-2:]]
        proposals, there = self._proposals(list(maps.values()), sides)
        regions = _regions(value, proposals, sizes, REGION)
        boxes, scores, kinds = self._boxes(regions, proposals, there, sides)
        masks = self._masks(_regions(value, boxes, sizes, DRAWN), kinds)
        known = torch.arange(self.classes, device=kinds.device)
        shown = scores[:, :, None] * (kinds[:, :, None] == known)
        is_box = (scores > 0)[:, :, None]
        return torch.cat([boxes / sides * is_box, shown, masks * is_box], 2).to(images.dtype)

    def _proposals(self, maps: list[Tensor], sides_4: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes in pixels [N, P, 4], and whether there is one, [N, P]."""
        logits, moves = self.network.rpn.head(maps)
        scores, found, differ, groups = [], [], [], []
        begin = 0
        for level, (logit, move) in enumerate(zip(logits, moves, strict=True)):
            each = logit.shape[1]
            flat = logit.permute(0, 2, 3, 1).flatten(1)
            best = flat.topk(min(CANDIDATES, flat.shape[1]))
            move_NA4 = move.unflatten(1, (each, 4)).permute(0, 3, 4, 1, 2).flatten(1, 3)
            differ.append(move_NA4.gather(1, best.indices[:, :, None].expand(-1, -1, 4)))
            scores.append(best.values)
            found.append(best.indices + begin)
            groups.append(torch.full_like(best.indices, level))
            begin += self.places[level]
        around = nn.functional.embedding(torch.cat(found, 1), self.anchors)
        boxes = anchors.moved(torch.cat(differ, 1).float(), around).clamp(min=0).minimum(sides_4)
        score = _sized(torch.cat(scores, 1).float().sigmoid(), boxes, SMALLEST[0])
        kept = _apart()(
            boxes, score[:, None], torch.cat(groups, 1),
            iou_threshold=APART, score_threshold=None, most=self.proposals,
        )[:, 0]  # fmt: skip
        return boxes.gather(1, kept.clamp(min=0)[:, :, None].expand(-1, -1, 4)), kept >= 0

    def _boxes(
        self, regions: Tensor, proposals_NP4: Tensor, there_NP: Tensor, sides_4: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes in pixels [N, D, 4], their scores, 0 where there is none, and classes [N, D]."""
        heads, places = self.network.roi_heads, proposals_NP4.shape[1]
        logits, moves = heads.box_predictor(heads.box_head(regions.flatten(0, 1)))
        scores = logits.float().softmax(1)[:, 1:].unflatten(0, (-1, places))
        pairs = (scores * there_NP[:, :, None]).flatten(1)
        best = pairs.topk(min(CANDIDATES, pairs.shape[1]))
        place = torch.div(best.indices, self.classes, rounding_mode="floor")
        kinds = best.indices % self.classes
        move = moves.unflatten(1, (-1, 4))[:, 1:].unflatten(0, (-1, places)).flatten(1, 2)
        move = move.gather(1, best.indices[:, :, None].expand(-1, -1, 4)).float()
        base = proposals_NP4.gather(1, place[:, :, None].expand(-1, -1, 4))
        scales = torch.tensor(SCALES, device=move.device)
        boxes = anchors.moved(move / scales, base).clamp(min=0).minimum(sides_4)
        score = _sized(best.values, boxes, SMALLEST[1])
        kept = _apart()(
            boxes, score[:, None], kinds,
            iou_threshold=LIMIT, score_threshold=LEAST, most=self.detections,
        )[:, 0]  # fmt: skip
        at = kept.clamp(min=0)
        boxes = boxes.gather(1, at[:, :, None].expand(-1, -1, 4))
        # place 0, where none was kept, may be −inf
        told = score.gather(1, at).masked_fill(kept < 0, 0)
        return boxes, told, kinds.gather(1, at)

    def _masks(self, regions: Tensor, kinds_ND: Tensor) -> Tensor:
        """How sure each cell is part of the thing, [N, D, cells]."""
        heads, count = self.network.roi_heads, kinds_ND.shape[1]
        logits = heads.mask_predictor(heads.mask_head(regions.flatten(0, 1))).flatten(2)
        kind = (kinds_ND.flatten() + 1)[:, None, None].expand(-1, 1, logits.shape[2])
        told: Tensor = logits.gather(1, kind)[:, 0].float().sigmoid()
        return told.reshape(-1, count, told.shape[1])

    def _loss(self, images: Tensor, maps: dict[str, Tensor], targets: Tensor) -> Tensor:
        """The sum of the five losses that torchvision's has."""
        # not above: torchvision takes as long as torch, and most networks do without
        from torchvision.models.detection.image_list import ImageList
        from torchvision.models.detection.roi_heads import fastrcnn_loss

        network, heads = self.network, self.network.roi_heads
        height, width = images.shape[-2:]
        sides = images.new_tensor([width, height, width, height], dtype=torch.float32)
        things = _things(targets, sides)
        sizes = [(height, width)] * len(images)
        proposals, losses = network.rpn(ImageList(images, sizes), maps, things)
        proposals, owners, labels, moves = heads.select_training_samples(proposals, things)
        told = heads.box_head(heads.box_roi_pool(maps, proposals, sizes))
        logits, moved = (v.float() for v in heads.box_predictor(told))
        losses = [*losses.values(), *fastrcnn_loss(logits, moved, labels, moves)]
        learns = [label > 0 for label in labels]
        chosen = [p[at] for p, at in zip(proposals, learns, strict=True)]
        owners = [owner[at] for owner, at in zip(owners, learns, strict=True)]
        kinds = torch.cat([label[at] for label, at in zip(labels, learns, strict=True)])
        masks = _drawn(heads, heads.mask_roi_pool(maps, chosen, sizes))
        losses.append(mask_loss(masks.float(), kinds, chosen, owners, things))
        mean = sides.new_zeros(())
        if len(kinds):
            move = moved.detach().unflatten(1, (-1, 4))[torch.cat(learns)]
            move = move[torch.arange(len(kinds), device=kinds.device), kinds]
            made = anchors.moved(move / sides.new_tensor(SCALES), torch.cat(chosen))
            there = [t["boxes"][owner] for t, owner in zip(things, owners, strict=True)]
            mean = overlap.iou_and_giou(made, torch.cat(there))[0].mean()
        return torch.stack([torch.stack([loss.float() for loss in losses]).sum(), mean])


def _drawn(heads: Any, regions_PCSS: Tensor) -> Tensor:
    """The logits of masks. How many things a step draws is another number each time, and cuDNN
    measures its kernels anew for each: on a GPU it is a power of two, with regions of zeros.
    """
    count = len(regions_PCSS)
    if count and regions_PCSS.device.type in ROUNDED:
        more = (1 << (count - 1).bit_length()) - count
        regions_PCSS = F.pad(regions_PCSS, (0, 0, 0, 0, 0, 0, 0, more))
    logits: Tensor = heads.mask_predictor(heads.mask_head(regions_PCSS))
    return logits[:count]


def _apart() -> Any:
    """Suppression of boxes: one operation where a graph is captured, else its reference."""
    return torch.ops.tessella.nms if torch.compiler.is_exporting() else nms


def _sized(scores_NP: Tensor, boxes_NP4: Tensor, least: float) -> Tensor:
    """Scores, −inf of boxes with a side of fewer pixels."""
    sides = boxes_NP4[..., 2:] - boxes_NP4[..., :2]
    return scores_NP.masked_fill(sides.amin(2) < least, -torch.inf)


def _regions(value: Tensor, boxes_NP4: Tensor, sizes: list[int], side: int) -> Tensor:
    """The regions of boxes: small ones of fine maps, large ones of coarse maps."""
    wide, high = (boxes_NP4[..., 2:] - boxes_NP4[..., :2]).unbind(2)
    levels = torch.zeros_like(wide, dtype=torch.int64)
    for side_of_level in LARGER:
        levels = levels + (wide * high >= side_of_level**2).long()
    look = pyramid_roi_align
    if torch.compiler.is_exporting():
        look = torch.ops.tessella.pyramid_roi_align
    made: Tensor = look(
        value, boxes_NP4, levels, sizes=sizes, strides=STRIDES, side=side, samples=SAMPLES
    )
    return made


def _things(targets: Tensor, sides_4: Tensor) -> list[dict[str, Tensor]]:
    """What torchvision wants to know of each picture; a thing's mask is S × S cells of its box."""
    things = []
    for target in targets.float():
        kept = target[(target[:, 4] >= 0) & (target[:, 5] == 0)]
        boxes = kept[:, :4] * sides_4
        # of no area, nothing could be learned from: the logarithm of its sides
        seen = (boxes[:, 2:] > boxes[:, :2]).all(1)
        side = round((kept.shape[1] - 6) ** 0.5)
        masks = kept[seen, 6:].unflatten(1, (side, side))
        things.append({"boxes": boxes[seen], "labels": kept[seen, 4].long() + 1, "masks": masks})
    return things


def build(record: Network, *, pretrained: bool) -> nn.Module:
    """The network with fresh weights, or with torchvision's of COCO, the classes' aside.

    Raises:
        UsageError: a number in the options is none, the backbone is not known, or its weights
            cannot be had.
    """
    # not above: torchvision takes as long as torch, and most networks do without
    from torchvision.models.detection import anchor_utils, faster_rcnn, mask_rcnn, rpn

    options: dict[str, Any] = record.options
    classes, channels = record.classes, record.channels
    name = options.get("backbone", BACKBONE)
    usual = {"anchor": ANCHOR, "width": WIDTH, "proposals": CANDIDATES, "detections": MOST}
    anchor, depth, proposals, detections = (
        _whole(key, options.get(key, value), MOST if key == "detections" else None)
        for key, value in usual.items()
    )
    backbone = pyramid(name, channels, depth)
    generator = anchor_utils.AnchorGenerator(
        tuple((anchor << level,) for level in range(len(STRIDES) + 1)),
        (RATIOS,) * (len(STRIDES) + 1),
    )
    network = mask_rcnn.MaskRCNN(
        backbone,
        rpn_anchor_generator=generator,
        rpn_head=rpn.RPNHead(depth, generator.num_anchors_per_location()[0]),
        box_head=faster_rcnn.TwoMLPHead(depth * REGION**2, 4 * depth),
        box_predictor=faster_rcnn.FastRCNNPredictor(4 * depth, classes + 1),
        mask_head=mask_rcnn.MaskRCNNHeads(depth, (depth,) * 4, 1),
        mask_predictor=mask_rcnn.MaskRCNNPredictor(depth, depth, classes + 1),
        rpn_post_nms_top_n_train=2 * proposals,
        box_batch_size_per_image=min(LEARN, proposals),
    )
    del network.transform  # pictures come resized and normalized
    if pretrained:
        if depth != WIDTH:
            raise UsageError(
                "the published weights have another width", seen=depth, fix=f"width={WIDTH}"
            )
        standard.load_detector(network, PUBLISHED, name, channels, HEADS)
    size = record.height, record.width
    return MaskRCNN(network, channels, size, proposals=proposals, detections=detections)


def _whole(name: str, value: Any, most: int | None) -> int:
    if type(value) is not int or value < 1 or (most is not None and value > most):
        fix = f"{name} is a whole number from 1 on" + (f", at most {most}" if most else "")
        raise UsageError("an option of Mask R-CNN cannot be this", seen=f"{name}={value}", fix=fix)
    return value


def pyramid(name: Any, channels: int, width: int) -> nn.Module:
    """A feature pyramid over a fourth to a thirty-second of the picture, and a coarser map.

    Args:
        name: one of torchvision's networks for pictures: a ResNet, or one whose layers are a list
            (MobileNet, EfficientNet, ConvNeXt, VGG, DenseNet).
        width: channels of each map.

    Raises:
        UsageError: there is no such network, or it has no maps of these sizes.
    """
    # not above: torchvision takes as long as torch, and most networks do without
    from torchvision import models
    from torchvision.models.detection.backbone_utils import BackboneWithFPN

    refused = UsageError(
        "torchvision has no backbone of this name with maps of a fourth to a 32nd of the picture",
        seen=name,
        fix="take a ResNet, MobileNet, EfficientNet, ConvNeXt, DenseNet or VGG, as resnet18",
    )
    known = models.list_models(module=models)
    if name not in known:
        raise refused
    fixed = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    body: nn.Module = models.get_model(name, weights=None, **fixed)
    if not isinstance(body, models.ResNet):
        layers = getattr(body, "features", None)
        if not isinstance(layers, nn.Sequential):
            raise refused
        body = layers
    if channels != 3:
        first = next(n for n, m in body.named_modules() if isinstance(m, nn.Conv2d))
        adapted = standard.Architecture(first=first, heads=(), initialize=_initialize)
        standard.replace_first(body, adapted, channels)
    found = _maps(body, channels)
    if not set(STRIDES) <= set(found):
        raise refused
    layers_of = {found[stride][0]: str(level) for level, stride in enumerate(STRIDES)}
    depths = [found[stride][1] for stride in STRIDES]
    made: nn.Module = BackboneWithFPN(body, layers_of, depths, width)
    return made


def _initialize(conv: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(conv.weight)


def _maps(body: nn.Module, channels: int) -> dict[int, tuple[str, int]]:
    """By stride the last layer that makes a map of it, and the map's channels."""
    side = 2 * STRIDES[-1]
    found: dict[int, tuple[str, int]] = {}
    x = torch.zeros(1, channels, side, side)
    training = body.training
    body.eval()
    with torch.no_grad():
        for name, layer in body.named_children():
            if name in ("avgpool", "fc"):
                break
            x = layer(x)
            # of others, as Swin's, channels come last
            square = x.dim() == 4 and x.shape[2] == x.shape[3] > 0
            if square and side % x.shape[2] == 0:
                found[side // x.shape[2]] = (name, x.shape[1])
    body.train(training)
    return found
