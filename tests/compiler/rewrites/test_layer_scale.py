"""Layer scale and residuals behind permutes go into layers: the same numbers, fewer steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import ConvNeXt
from torchvision.models.convnext import CNBlockConfig

from tessella import runtime
from tessella.compiler.pipeline import optimized
from tessella.compiler.rewrites import fold_scales, fuse_epilogue, turn_residuals
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture, check, interpret
from tessella.graph.graph import Graph
from tests.support.networks import build

BATCH = DimRange(min=1, opt=2, max=8)
IMAGE = TensorSpec(name="x", dtype="float32", shape=(BATCH, 6, 5, 6))

Forward = Callable[["Net", torch.Tensor], object]


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 6)
        self.bare = nn.Linear(6, 6, bias=False)
        self.column = nn.Parameter(torch.randn(6, 1, 1))
        self.one = nn.Parameter(torch.tensor(0.3))
        self.row = nn.Parameter(torch.randn(6))
        self.deep = nn.Parameter(torch.full((1, 1, 1, 1, 1), 0.3))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> object:
        return self._forward(self, x)


def mixed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A layer over channels, as ConvNeXt has it."""
    return layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


# what runs, and how many factors are folded, and how many residuals turned
CASES: dict[str, tuple[Forward, int, int]] = {
    "layer scale": (lambda m, x: x + m.column * mixed(m.linear, x), 1, 1),
    "on the left": (lambda m, x: mixed(m.bare, x) * m.column + x, 1, 1),
    "of a convolution": (lambda m, x: m.conv(x) * m.column + x, 1, 0),
    "one factor for all": (lambda m, x: m.conv(x) * m.one + x, 1, 0),
    "of tokens": (lambda m, x: m.linear(x) * m.row + x, 1, 0),
    "a residual alone": (lambda m, x: F.relu(mixed(m.linear, x) + x), 0, 1),
    # these stay
    "no sum": (lambda m, x: m.conv(x) * m.column, 0, 0),
    "another axis": (lambda m, x: m.conv(x) * m.row + x, 0, 0),
    "a factor of more axes": (lambda m, x: m.conv(x) * m.deep + x, 0, 0),
    "other readers": (lambda m, x: ((y := m.conv(x)) * m.column + x, y), 0, 0),
    "an activation between": (lambda m, x: F.relu(m.conv(x)) * m.column + x, 0, 0),
    "a factor that is computed": (lambda m, x: m.conv(x) * x.mean((2, 3), True) + x, 0, 0),
    "a sum that is scaled": (lambda m, x: torch.add(mixed(m.linear, x), x, alpha=2), 0, 0),
    "a residual that is broadcast": (lambda m, x: mixed(m.linear, x) + x[:, :1], 0, 0),
}


def answers(graph: Graph) -> list[torch.Tensor]:
    x = torch.randn(3, 6, 5, 6, generator=torch.Generator().manual_seed(1))
    made = interpret(graph, {"x": x}, upcast=torch.float64)
    return [made[v.name] for v in graph.outputs]


@pytest.mark.parametrize("case", CASES)
def test_one_by_one(case: str) -> None:
    forward, scales, residuals = CASES[case]
    graph = capture(Net(forward).eval(), (IMAGE,))
    before, names = answers(graph), [v.name for v in graph.outputs]
    assert fold_scales.apply(graph) == scales
    check(graph)
    assert turn_residuals.apply(graph) == residuals
    check(graph)
    assert [v.name for v in graph.outputs] == names
    for one, other in zip(before, answers(graph), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    if residuals:  # the sum is the layer's now
        assert fuse_epilogue.apply(graph) >= 1
        assert not [n for n in graph.nodes if n.op in ("add", "mul")]


def test_a_block_of_convnext_is_its_layers_and_a_norm() -> None:
    torch.manual_seed(0)
    module = ConvNeXt([CNBlockConfig(16, 24, 2), CNBlockConfig(24, None, 2)], layer_scale=0.5)
    module = module.eval()
    spec = TensorSpec(name="x", dtype="float32", shape=(BATCH, 3, 32, 32))
    graph = optimized(capture(module, (spec,)))
    assert not [n.op for n in graph.nodes if n.op in ("add", "mul")]
    blocks = [n for n in graph.nodes if n.op == "linear" and n.inputs[3] is not None]
    assert len(blocks) == 4
    x = torch.randn(2, 3, 32, 32)
    made = build(module, TensorSpec(name="x", dtype="float32", shape=(1, 3, 32, 32)))
    with torch.no_grad():
        right = module(x)
    torch.testing.assert_close(runtime.Engine(made)(x=x)["scores"], right, rtol=1e-4, atol=1e-5)
