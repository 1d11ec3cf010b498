"""Networks of segmentation-models-pytorch: any backbone, any channels, and plans of them."""

from __future__ import annotations

import pytest
import torch

from tessella import api
from tessella.core.errors import UsageError
from tessella.core.spec import TensorSpec
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
    """Of a backbone of the library's or timm's; a plan answers as the module does."""
    module = built(name, channels=1, backbone=BACKBONES[name])
    assert module.training
    images = torch.randn(2, 1, 32, 64)
    with torch.no_grad():
        right = module.eval()(images)
    assert right.shape == (2, 4, 32, 64)
    if name == "unet_backbone":
        return  # whose layers the two others have, too
    spec = TensorSpec(name="x", dtype="float32", shape=(2, 1, 32, 64))
    plan = api.compile(module, inputs=[spec], untuned=True)
    (made,) = api.load(plan)(images).values()
    torch.testing.assert_close(torch.as_tensor(made), right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "size", "what"),
    [
        ("segformer", {}, (32, 40), "multiples of 32"),
        ("segformer", {"backbone": "no_such"}, (32, 32), "no network of this name"),
        ("unet_backbone", {"backbone": "hf_hub:some/body"}, (32, 32), "no network of this name"),
        ("deeplabv3plus", {"backbone": "mit_b0"}, (32, 32), "cannot be a backbone"),
        ("segformer", {"width": 3}, (32, 32), "does not take this option"),
    ],
)
def test_what_cannot_be_built_says_what_to_do(
    name: str, options: dict[str, object], size: tuple[int, int], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        built(name, size=size, **options)
