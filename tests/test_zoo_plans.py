"""Every network of the zoo becomes a plan for the CPU and agrees with eager, at any batch."""

from __future__ import annotations

import pytest
import torch

import tessella as ts
from tessella.core.spec import TensorSpec
from tessella.nn import zoo

SMALL = {  # a size at which the network still has all its layers, and a test its patience
    "lenet": 28,
    "alexnet": 96,
    "vgg16": 48,
    "googlenet": 64,
    "resnet18": 64,
    "resnet50": 64,
    "timm/convnext_atto": 64,
    "timm/efficientnet_b0": 64,
    "timm/vit_tiny_patch16_224": 224,
}

# Their layers are of the kinds that networks beside them and those of ``tests.support.networks``
# have, whose kernels are measured.
UNTUNED = ("alexnet", "vgg16", "googlenet", "resnet18", "resnet50")

DEEPER = {"resnet152": "resnet50"}  # of the same blocks: its plan has more of the same steps


def test_no_network_of_the_zoo_is_left_out() -> None:
    assert set(zoo.names()) <= set(SMALL) | set(DEEPER)


@pytest.mark.parametrize(("name", "like"), DEEPER.items())
def test_a_deeper_network_asks_nothing_else(name: str, like: str) -> None:
    """Its layers are those of the one that is compiled, by kind and all they are told."""
    assert _layers(name) == _layers(like)


@pytest.mark.parametrize("name", SMALL)
def test_a_plan_agrees_with_eager(name: str) -> None:
    torch.manual_seed(0)
    network = zoo.network(name, classes=7, size=SMALL[name])
    shape = (network.channels, network.height, network.width)
    module = _alive(zoo.build(network), shape)
    spec = TensorSpec(name="image", dtype="float32", shape=(1, *shape))
    plan = ts.compile(module, inputs=[spec], batch=(1, 2, 2), target="cpu", untuned=name in UNTUNED)
    steps = plan.program.buckets[-1].steps
    assert not [s for s in steps if s.op in ("batch_norm", "fallback")]

    images = torch.randn(3, *shape)
    answer = ts.load(plan)(image=images)["output"]
    with torch.inference_mode():
        eager = module(images)
        exact = module.double()(images.double())
    largest = exact.abs().max()
    assert (exact - exact.mean(0)).abs().max() > 1e-3 * largest  # it depends on the image
    # a very deep network amplifies rounding: then eager's own error is the measure
    allowed = max(1e-4, 4 * float((eager - exact).abs().max() / largest))
    assert allowed < 1e-2
    assert (answer - exact).abs().max() < allowed * largest


def _layers(name: str) -> set[str]:
    with torch.device("meta"):
        module = zoo.build(zoo.network(name, classes=7, size=64))
    return {repr(layer) for layer in module.modules() if not list(layer.children())}


def _alive(module: torch.nn.Module, shape: tuple[int, ...]) -> torch.nn.Module:
    """Batch norms that know their inputs, as after training: a fresh one lets a signal fade."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
            layer.momentum = None
    module.train()
    with torch.no_grad():
        module(torch.randn(4, *shape))
    return module.eval()
