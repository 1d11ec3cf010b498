"""Mask R-CNN: its boxes and masks are torchvision's own, and it learns what torchvision's does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchvision.models import detection as theirs
from torchvision.models.detection.image_list import ImageList

from tessella.core.errors import UsageError
from tessella.nn import zoo
from tessella.nn.zoo import mask_rcnn
from tessella.nn.zoo.mask_targets import shown
from tessella.tasks.instances.head import CELLS
from tests.support.detectors import has_layers_and_anchors_of, learns_from_nothing

SIZE, LEARNED = 96, 56


def built(classes: int = 3, channels: int = 3, **options: Any) -> mask_rcnn.MaskRCNN:
    """A network that nobody trained, which is surer than such ones are: it tells boxes."""
    torch.manual_seed(0)
    given = {"backbone": "resnet18", "width": 16, "anchor": 12, "proposals": 60, **options}
    record = zoo.network(
        "mask_rcnn", classes=classes, channels=channels, size=SIZE, answers="masks", options=given
    )
    module = zoo.build(record)
    assert isinstance(module, mask_rcnn.MaskRCNN)
    torch.nn.init.normal_(module.network.roi_heads.box_predictor.cls_score.weight, std=0.5)
    return module


def test_its_boxes_and_masks_are_torchvision_s() -> None:
    module = built().eval()
    network = module.network
    network.rpn._post_nms_top_n["testing"] = 60
    images, sizes = torch.randn(2, 3, SIZE, SIZE), [(SIZE, SIZE)] * 2
    with torch.no_grad():
        made = module(images)
        maps = network.backbone(images)
        proposals, _ = network.rpn(ImageList(images, sizes), maps)
        right, _ = network.roi_heads(maps, proposals, sizes)
    assert made.shape == (2, 100, 4 + 3 + CELLS)
    for one, wanted in zip(made, right, strict=True):
        count = len(wanted["boxes"])
        assert count > 10
        scores, labels = one[:, 4:7].max(1)
        assert (scores > 0).sum() == count
        torch.testing.assert_close(one[:count, :4] * SIZE, wanted["boxes"], atol=1e-3, rtol=0)
        torch.testing.assert_close(scores[:count], wanted["scores"], atol=1e-5, rtol=0)
        assert torch.equal(labels[:count] + 1, wanted["labels"])
        torch.testing.assert_close(one[:count, 7:], wanted["masks"].flatten(1), atol=1e-4, rtol=0)
        assert (one[count:] == 0).all()


def test_a_surest_box_outside_of_the_picture_is_no_box_and_spoils_none() -> None:
    """What is clipped to nothing has a score of −inf, also in the place that empty rows look at."""
    module = built(proposals=20, detections=5).eval()
    heads = module.network.roi_heads

    def predict(told: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, moves = torch.zeros(len(told), 4), torch.zeros(len(told), 16)
        scores[0, 1], scores[1, 2], moves[0, 4] = 9.0, 3.0, -300.0
        return scores, moves

    heads.box_predictor.forward = predict
    proposals = torch.tensor([10.0, 20.0, 30.0, 40.0]).expand(1, 20, 4)
    with torch.no_grad():
        boxes, scores, kinds = module._boxes(
            torch.zeros(1, 20, 16, 7, 7), proposals, torch.ones(1, 20, dtype=torch.bool),
            torch.full((4,), float(SIZE)),
        )  # fmt: skip
    assert scores.isfinite().all()
    assert scores[0, 0] == pytest.approx(torch.tensor([0.0, 0, 3, 0]).softmax(0)[2].item())
    assert kinds[0, 0] == 1
    assert boxes[0, 0].tolist() == [10.0, 20.0, 30.0, 40.0]


def targets_of(boxes: list[list[list[float]]]) -> torch.Tensor:
    """Things with the label of their place, whose masks fill the left half of their boxes."""
    out = torch.zeros(len(boxes), 3, 6 + LEARNED**2)
    out[:, :, 4] = -1
    for row, things in zip(out, boxes, strict=True):
        for place, box in enumerate(things):
            row[place, :6] = torch.tensor([*box, place % 3, 0])
            cells = torch.zeros(LEARNED, LEARNED)
            cells[:, : LEARNED // 2] = 1
            row[place, 6:] = cells.flatten()
    return out


def test_it_learns_what_torchvision_s_learns() -> None:
    """The sum of its losses for the same samples; masks of pixels differ by their edges alone."""
    module = built().train()
    images = torch.randn(2, 3, SIZE, SIZE)
    boxes = [[[0.125, 0.25, 0.5, 0.75], [0.625, 0.5, 0.875, 1.0]], [[0.25, 0.25, 0.75, 0.5]]]
    targets = targets_of(boxes)
    targets[1, 1, :6] = torch.tensor([0, 0, 1, 1, 1, 1])  # a crowd is no thing
    targets[1, 2, :6] = torch.tensor([0.3, 0.3, 0.3, 0.7, 1, 0])  # and neither is one of no area
    torch.manual_seed(5)
    loss, overlap = module(images, targets)
    things = []
    for row, count in zip(targets, (2, 1), strict=True):
        masks = torch.zeros(count, SIZE, SIZE)
        own = row[:count, :4] * SIZE
        for mask, (x0, y0, x1, y1) in zip(masks, own.round().long().tolist(), strict=True):
            mask[y0:y1, x0 : (x0 + x1) // 2] = 1
        things.append({"boxes": own, "labels": row[:count, 4].long() + 1, "masks": masks})
    torch.manual_seed(5)
    network, sizes = module.network, [(SIZE, SIZE)] * 2
    maps = network.backbone(images)
    proposals, first = network.rpn(ImageList(images, sizes), maps, things)
    _, second = network.roi_heads(maps, proposals, sizes, things)
    torch.testing.assert_close(loss, sum([*first.values(), *second.values()]), rtol=0.01, atol=0)
    assert 0 < overlap <= 1
    loss.backward()
    assert not [name for name, p in module.named_parameters() if p.grad is None]


def test_regions_of_zeros_beside_the_masks_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, where the number of masks is a power of two."""
    heads, drawn = built().network.roi_heads, []
    regions = torch.randn(5, 16, 14, 14)
    heads.mask_head.register_forward_pre_hook(lambda _, given: drawn.append(len(given[0])))
    made = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(mask_rcnn, "ROUNDED", devices)
        heads.zero_grad()
        logits = mask_rcnn._drawn(heads, regions)
        logits.square().sum().backward()
        made.append([logits.detach(), *(p.grad for p in heads.mask_head.parameters())])
    assert drawn == [5, 8]
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(one.abs().max()))
    assert not len(mask_rcnn._drawn(heads, regions[:0]))


def test_what_a_proposal_shows_of_a_mask() -> None:
    """A box's left half is the thing; a proposal that is shifted sees it shifted, and no more."""
    masks = torch.zeros(1, LEARNED, LEARNED)
    masks[0, :, : LEARNED // 2] = 1
    boxes = torch.tensor([[10.0, 20.0, 50.0, 60.0]])
    proposals = torch.tensor([[10.0, 20.0, 50.0, 60.0], [30.0, 20.0, 70.0, 60.0],
                              [-10.0, 0.0, 30.0, 40.0], [10.0, 20.0, 30.0, 60.0]])  # fmt: skip
    made = shown(masks, boxes, torch.zeros(4, dtype=torch.long), proposals, 8)
    left = torch.cat([torch.ones(8, 4), torch.zeros(8, 4)], 1)
    corner = torch.zeros(8, 8)
    corner[4:, 4:] = 1
    for one, wanted in zip(made, (left, torch.zeros(8, 8), corner, torch.ones(8, 8)), strict=True):
        assert (one - wanted).abs().max() < 0.06


def test_pictures_without_things_are_learned_from() -> None:
    module = built().train()
    learns_from_nothing(module, SIZE, targets_of([[], []]))


def test_it_has_the_layers_and_the_anchors_of_torchvision_s() -> None:
    """Of which published weights are: a thing that was learned is told in the same place."""
    record = zoo.network("mask_rcnn", classes=90, size=128, answers="masks")
    module = zoo.build(record)
    assert isinstance(module, mask_rcnn.MaskRCNN)
    right = theirs.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    has_layers_and_anchors_of(module, right, right.rpn.anchor_generator)


@pytest.mark.parametrize(
    ("backbone", "channels"), [("mobilenet_v3_small", 3), ("efficientnet_b0", 1)]
)
def test_other_backbones_make_the_same_maps(backbone: str, channels: int) -> None:
    module = mask_rcnn.pyramid(backbone, channels, 8).eval()
    with torch.no_grad():
        maps = module(torch.zeros(1, channels, 64, 96))
    assert [tuple(m.shape[1:]) for m in maps.values()] == [
        (8, 16, 24), (8, 8, 12), (8, 4, 6), (8, 2, 3), (8, 1, 2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"anchor": 0}, "anchor is a whole number"),
        ({"detections": 101}, "at most 100"),
        ({"proposals": True}, "proposals"),
        ({"backbone": "vit_b_16"}, "resnet18"),
        ({"backbone": "alexnet"}, "resnet18"),
        ({"backbone": "swin_t"}, "resnet18"),
        ({"backbone": "no_such"}, "resnet18"),
        ({"backbone": "/etc/passwd"}, "resnet18"),
        ({"backbone": 3}, "resnet18"),
    ],
)
def test_what_cannot_be_built_says_what_to_do(options: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        built(**options)


def test_weights_that_nobody_publishes_are_refused() -> None:
    record = zoo.network(
        "mask_rcnn", classes=2, size=SIZE, answers="masks", options={"backbone": "resnet18"}
    )
    with pytest.raises(UsageError, match="resnet50"):
        zoo.build(record, pretrained=True)
    with pytest.raises(UsageError, match=r"asks? .*boxes with masks|mask_rcnn"):
        zoo.network("retinanet_r18", classes=2, answers="masks")
