"""Networks as the stages that fine-tuning freezes and slows down."""

from __future__ import annotations

import pytest
from torch import nn

from tessella.nn import zoo
from tessella.nn.zoo import stages


def built(name: str, **more) -> nn.Module:
    return zoo.build(zoo.network(name, classes=3, **more))


@pytest.mark.parametrize(
    ("name", "count", "first", "head"),
    [
        ("resnet18", 10, {"conv1.weight", "bn1.weight", "bn1.bias"}, {"fc.weight", "fc.bias"}),
        ("lenet", 4, {"conv1.weight", "conv1.bias"}, {"fc2.weight", "fc2.bias"}),
        ("alexnet", 8, {"features.0.weight", "features.0.bias"}, None),
        (
            "timm/vit_tiny_patch16_224", 14,
            {"cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"},
            {"head.weight", "head.bias"},
        ),
        ("timm/convnext_atto", 6, {"stem.0.weight", "stem.0.bias", "stem.1.weight", "stem.1.bias"},
         None),
        ("unet", None, None, {"head.weight", "head.bias"}),
    ],
)  # fmt: skip
def test_stages_of_networks(name, count, first, head):
    module = built(name, **({"answers": "pixels", "size": 32} if name == "unet" else {}))
    parts = stages(module)
    names = [name for stage in parts for name in stage.parameters]
    assert sorted(names) == sorted(n for n, _ in module.named_parameters())
    if count is not None:
        assert len(parts) == count
        assert set(parts[0].parameters) == first
    if head is not None:
        assert set(parts[-1].parameters) == head


def test_a_network_in_a_wrapper_is_opened():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(4, 3))

    parts = stages(Wrapper())
    assert [stage.parameters for stage in parts] == [
        ("inner.0.weight", "inner.0.bias", "inner.1.weight", "inner.1.bias"),
        ("inner.2.weight", "inner.2.bias"),
    ]
    assert list(parts[0].modules) == ["inner.0", "inner.1"]
