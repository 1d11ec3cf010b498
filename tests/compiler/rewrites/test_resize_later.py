"""Maps that are mixed before they are resized: the same numbers in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella.compiler.rewrites import fuse_epilogue, resize_later
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture, check, interpret

IMAGE = (TensorSpec(name="x", dtype="float32", shape=(DimRange(min=1, opt=2, max=8), 5, 8, 8)),)
Forward = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """``rows``: as many as channels, so that a layer by row could be taken for one by pixel."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.few = nn.Linear(5, 16), nn.Linear(5, 16)
        self.mix, self.bare = nn.Conv2d(48, 16, 1), nn.Conv2d(32, 16, 1, bias=False)
        self.wide, self.more = nn.Conv2d(5, 16, 1), nn.Conv2d(48, 40, 1)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)

    def map(self, x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        """SegFormer's: pixels as rows, a layer, and a map again."""
        made = layer(x.flatten(2).transpose(1, 2)).transpose(1, 2)
        return made.reshape(-1, 16, *x.shape[2:])


def up(x: torch.Tensor, mode: str = "bilinear", **more: object) -> torch.Tensor:
    return F.interpolate(x, size=(8, 8), mode=mode, **more)  # type: ignore[arg-type]


def half(x: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(x, 2)


MIXED: dict[str, tuple[Forward, int, int]] = {  # what runs, resizes, and convolutions that are left
    "layers take the product": (
        lambda m, x: F.relu(m.mix(torch.cat(
            [up(m.map(half(x), m.rows)), up(m.map(half(half(x)), m.few)), m.wide(x)], 1))), 2, 2,
    ),
    "nothing has all pixels": (
        lambda m, x: m.bare(torch.cat(
            [up(m.map(half(x), m.rows), "nearest"), up(m.wide(half(x)), align_corners=True)], 1)),
        2, 2,
    ),
    "two have all pixels": (
        lambda m, x: m.mix(torch.cat([up(half(x.repeat(1, 6, 1, 1)[:, :24])), m.wide(x),
                                      x.repeat(1, 2, 1, 1)[:, :8]], 1)), 1, 3,
    ),
    "only a bias": (
        lambda m, x: m.mix(torch.cat(
            [up(m.wide(half(x))), up(m.wide(half(half(x)))), up(m.map(half(x), m.few))], 1)),
        3, 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_the_numbers_are_the_same(name: str) -> None:
    forward, resizes, convolutions = MIXED[name]
    net = Net(forward)
    graph = capture(net, IMAGE)
    assert resize_later.apply(graph) == resizes
    check(graph)
    fuse_epilogue.apply(graph)
    check(graph)
    assert sum(node.op == "conv2d" for node in graph.nodes) == convolutions
    x = torch.randn(3, 5, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        right = net.double()(x.double())
    (made,) = interpret(graph, {"x": x}).values()
    torch.testing.assert_close(made.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("forward", [
    lambda m, x: m.more(torch.cat(  # makes more channels
        [up(m.wide(half(x))), up(m.wide(half(half(x)))), m.wide(x)], 1)),
    lambda m, x: m.mix(torch.cat([m.wide(x), m.wide(x), up(m.wide(half(x)))], 1)),  # few resized
    lambda m, x: m.bare(torch.cat(  # made smaller
        [F.interpolate(m.wide(x), size=(4, 4)), F.interpolate(m.wide(x), size=(4, 4))], 1)),
])  # fmt: skip
def test_what_would_cost_more_stays(forward: Forward) -> None:
    graph = capture(Net(forward), IMAGE)
    assert resize_later.apply(graph) == 0
