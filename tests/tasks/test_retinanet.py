"""RetinaNet the whole way: its boxes are torchvision's own, in a plan, in ONNX and on a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.models import detection as theirs
from torchvision.ops import nms

from tessella import api, graph
from tessella.core.errors import CompileError, UsageError
from tessella.core.spec import TensorSpec
from tessella.nn import zoo
from tessella.nn.zoo import retinanet
from tests.support.detectors import (
    HEAD,
    goes_the_whole_way,
    has_layers_and_anchors_of,
    kernels_of,
    learns_from_nothing,
    trained,
)

SIZE, ANCHOR = 64, 12


@pytest.fixture
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer in each head where there are four: torch.export takes seconds for all of them."""
    made = retinanet.RetinaNet.__init__

    def shorter(self: retinanet.RetinaNet, network: Any, *args: Any) -> None:
        for head in (network.head.classification_head, network.head.regression_head):
            head.conv = head.conv[:1]
        made(self, network, *args)

    monkeypatch.setattr(retinanet.RetinaNet, "__init__", shorter)


def built(classes: int = 3, **options: Any) -> retinanet.RetinaNet:
    """A network that nobody trained, which is surer than such ones are: it tells boxes."""
    torch.manual_seed(0)
    record = zoo.network(
        "retinanet_r18", classes=classes, size=SIZE, answers="boxes",
        options={"anchor": ANCHOR, **options},
    )  # fmt: skip
    module = zoo.build(record)
    assert isinstance(module, retinanet.RetinaNet)
    last = module.network.head.classification_head.cls_logits
    torch.nn.init.normal_(last.weight, std=0.3)
    torch.nn.init.constant_(last.bias, -1.5)
    return module


def test_the_whole_way(
    few_layers: None, captured_once: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A step or two, after which it is no good, but sure: plan and checkpoint say the same."""
    monkeypatch.setattr(retinanet, "LEAST", 0.008)
    run, _ = trained(
        tmp_path, "retinanet_r18", size=SIZE, val=2, epochs=1, batch_size=4, val_interval=1,
        network_options={"anchor": ANCHOR}, solver={"name": "adamw", "lr": 1e-4},
    )  # fmt: skip
    assert "val/map" in api.open_checkpoint(run).info.metrics
    made = goes_the_whole_way(tmp_path, run, least_boxes=20)
    assert [kernel for kernel in kernels_of(made) if kernel.startswith("nms.")] == ["nms.numpy"]


def test_its_boxes_are_torchvision_s() -> None:
    module = built().eval()
    images = torch.randn(2, 3, SIZE, SIZE)
    with torch.no_grad():
        made = module(images)
        told = module.network.head(list(module.network.backbone(images).values()))
    levels = {name: list(values.split(module.places, 1)) for name, values in told.items()}
    anchors = [list(module.anchors.split(module.places))] * 2
    right = module.network.postprocess_detections(levels, anchors, [(SIZE, SIZE)] * 2)
    for one, wanted in zip(made, right, strict=True):
        count = min(HEAD.MOST, len(wanted["boxes"]))
        assert count > 20
        scores, labels = one[:, 4:].max(1)
        assert (scores > 0).sum() == count
        torch.testing.assert_close(one[:count, :4] * SIZE, wanted["boxes"][:count])
        torch.testing.assert_close(scores[:count], wanted["scores"][:count])
        assert torch.equal(labels[:count], wanted["labels"][:count])


def test_it_learns_what_torchvision_s_learns() -> None:
    """The sum of its losses; a crowd is no thing, and neither is a box of no area."""
    module = built().train()
    images, targets = torch.randn(2, 3, SIZE, SIZE), torch.full((2, 3, 6), -1.0)
    targets[0, 0] = torch.tensor([0.1, 0.2, 0.5, 0.6, 2, 0])
    targets[1, 0] = torch.tensor([0.5, 0.5, 0.9, 0.8, 0, 0])
    targets[1, 1] = torch.tensor([0, 0, 1, 1, 1, 1])
    targets[1, 2] = torch.tensor([0.3, 0.3, 0.3, 0.7, 1, 0])
    loss, overlap = module(images, targets)
    things = [
        {"boxes": row[:1, :4] * SIZE, "labels": row[:1, 4].long()} for row in targets
    ]  # fmt: skip
    told = module.network.head(list(module.network.backbone(images).values()))
    right = module.network.compute_loss(things, told, [module.anchors] * 2)
    torch.testing.assert_close(loss, sum(right.values()))
    assert 0 < overlap < 1
    loss.backward()
    assert not [name for name, p in module.named_parameters() if p.grad is None]


def test_pictures_without_things_are_learned_from() -> None:
    module = built().train()
    learns_from_nothing(module, SIZE, torch.full((2, 1, 6), -1.0))


def test_it_has_the_layers_and_the_anchors_of_torchvision_s() -> None:
    """Of which published weights are; a thing that it learned is told in the same place."""
    record = zoo.network("retinanet_r50", classes=91, size=128, answers="boxes")
    module = zoo.build(record)
    assert isinstance(module, retinanet.RetinaNet)
    right = theirs.retinanet_resnet50_fpn(weights=None, weights_backbone=None)
    has_layers_and_anchors_of(module, right, right.anchor_generator)


def test_torchvision_s_own_module_is_told_what_to_do_instead() -> None:
    module = theirs.retinanet_resnet50_fpn(weights=None, weights_backbone=None)
    spec = TensorSpec(name="image", dtype="float32", shape=(1, 3, SIZE, SIZE))
    with pytest.raises(CompileError, match="retinanet_r50"):
        graph.capture(module, [spec])


class Suppressing(torch.nn.Module):
    """Somebody's detector: boxes and scores of a picture, of which those stay that are apart."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        corner, sides = x[:, :2].flatten(2).mT, x[:, 2:4].flatten(2).mT.abs()
        boxes, scores = torch.cat([corner, corner + sides], 2), x[:, 4].flatten(1)
        kept = torch.ops.tessella.nms(
            boxes, scores[:, None], iou_threshold=0.4, score_threshold=None, most=6
        )[:, 0]
        known = (kept >= 0)[:, :, None]
        place = kept.clamp(min=0)[:, :, None].expand(-1, -1, 4)
        return boxes.gather(1, place) * known, kept


def test_a_network_of_one_s_own_suppresses_boxes_by_the_same_operation() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=(1, 5, 3, 4))
    plan = api.compile(Suppressing(), inputs=[spec], batch=(1, 2, 3), untuned=True)
    assert "nms.numpy" in {step.kernel for step in plan.program.buckets[0].steps}
    x = torch.randn(3, 5, 3, 4)
    told = api.load(plan)(x)
    for one, (boxes, kept) in zip(
        x, zip(told["output"], told["output_1"], strict=True), strict=True
    ):
        given = torch.cat([one[:2], one[:2] + one[2:4].abs()]).flatten(1).T
        right = nms(given, one[4].flatten(), 0.4)[:6]
        assert kept[: len(right)].tolist() == right.tolist()
        assert torch.equal(boxes[: len(right)], given[right])
        assert (kept[len(right) :] == -1).all()


def test_what_cannot_be_built_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="whole pixels"):
        built(anchor=0)
    record = zoo.network("retinanet_r18", classes=2, size=SIZE, answers="boxes")
    with pytest.raises(UsageError, match="retinanet_r50"):
        zoo.build(record, pretrained=True)
    with pytest.raises(UsageError, match="retinanet_r50"):
        zoo.network("retinanet", classes=2, answers="boxes")
