"""Networks of segmentation-models-pytorch: any backbone, any channels."""

from __future__ import annotations

import pytest
import torch

from tessella.core.errors import UsageError
from tessella.nn import zoo

BACKBONES = {
    "deeplabv3plus": "resnet18", "segformer": "mit_b0", "unet_backbone": "mobilenetv3_small_050"
}  # fmt: skip


def built(name: str, channels: int = 3, size: tuple[int, int] = (32, 64), **options: object):
    torch.manual_seed(0)
    record = zoo.network(
        name, classes=4, channels=channels, size=size, answers="pixels", options=options
    )
    return zoo.build(record)


@pytest.mark.parametrize("name", BACKBONES)
def test_a_class_for_each_pixel(name: str) -> None:
    """Of a backbone of the library's or timm's; how plans of them answer, benchmarks.masks says."""
    module = built(name, channels=1, backbone=BACKBONES[name])
    assert module.training
    with torch.no_grad():
        assert module.eval()(torch.randn(2, 1, 32, 64)).shape == (2, 4, 32, 64)


@pytest.mark.parametrize(
    ("name", "options", "size", "what"),
    [
        ("segformer", {}, (32, 40), "multiples of 32"),
        ("segformer", {"backbone": "no_such"}, (32, 32), "no network of this name"),
        ("unet_backbone", {"backbone": "hf_hub:some/body"}, (32, 32), "no network of this name"),
        ("segformer", {"width": 3}, (32, 32), "does not take this option"),
    ],
)
def test_what_cannot_be_built_says_what_to_do(
    name: str, options: dict[str, object], size: tuple[int, int], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        built(name, size=size, **options)
