"""Networks for the tests of compiler and runtime: small, with statistics that are not trivial."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

from tessella import compiler
from tessella.artifacts.plan import Plan
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import Graph, capture


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.ip1, self.ip2 = nn.Linear(800, 500), nn.Linear(500, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.conv1(x), 2, 2)
        x = F.max_pool2d(self.conv2(x), 2, 2)
        return self.ip2(F.relu(self.ip1(x.flatten(1))))


def _vit() -> nn.Module:
    return models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64,
        num_classes=10,
    )  # fmt: skip


# name → (how to make it, channels, image size)
NETWORKS = {
    "lenet": (LeNet, 1, 28),
    "resnet18": (lambda: models.resnet18(weights=None), 3, 32),
    "googlenet": (lambda: models.googlenet(weights=None, init_weights=False), 3, 32),
    "mobilenet_v3": (lambda: models.mobilenet_v3_small(weights=None), 3, 32),
    "alexnet": (lambda: models.alexnet(weights=None), 3, 64),
    "vit": (_vit, 3, 32),
}


@functools.cache
def network(name: str) -> tuple[nn.Module, TensorSpec]:
    """A network in evaluation mode and what it takes, without its batch range."""
    torch.manual_seed(0)
    make, channels, size = NETWORKS[name]
    module = make().eval()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.running_mean, 0.0, 0.1)
            nn.init.uniform_(layer.running_var, 0.8, 1.2)
            nn.init.normal_(layer.bias, 0.0, 0.1)
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0.0, layer.in_features**-0.5)
    return module, TensorSpec(name="image", dtype="float32", shape=(1, channels, size, size))


def graph_of(module: nn.Module, spec: TensorSpec, batch: DimRange) -> Graph:
    """The captured module; its output is called ``scores``."""
    ranged = TensorSpec(name=spec.name, dtype=spec.dtype, shape=(batch, *spec.shape[1:]))
    return capture(module, (ranged,), outputs=("scores",))


@functools.cache
def captured(name: str) -> Graph:
    """One of ``NETWORKS``, for batches up to 8; the compiler does not change it."""
    return graph_of(*network(name), DimRange(min=1, opt=2, max=8))


ABOUT = compiler.About(built_from="a test", rebuild="tessella compile a-test")


def plan(
    graph: Graph,
    batch: tuple[int, int, int] = (1, 2, 2),
    target: str = "cpu",
    *,
    cache: Path | None = None,
    lock: str | None = None,
    budget_s: float = 0.0,
    untuned: bool = False,
    **settings: Any,
) -> Plan:
    """The graph's plan, after short measurements or, ``untuned``, after none."""
    return compiler.compile_graph(
        graph,
        target=target,
        batch=DimRange(min=batch[0], opt=batch[1], max=batch[2]),
        about=ABOUT,
        measuring=compiler.Measuring(cache=cache, lock=lock, budget_s=budget_s, untuned=untuned),
        **settings,
    )


def build(module: nn.Module, spec: TensorSpec, **settings: Any) -> Plan:
    """The plan of a module for batches 1 and 2."""
    return plan(graph_of(module, spec, DimRange(min=1, opt=2, max=2)), **settings)
