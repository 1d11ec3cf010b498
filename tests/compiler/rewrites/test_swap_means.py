"""Means over windows and 1×1 convolutions in the better order: the same numbers in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella.compiler.rewrites import fuse_epilogue, fuse_pointwise, swap_means
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture, check, interpret
from tessella.graph.graph import Graph

IMAGE = (TensorSpec(name="x", dtype="float32", shape=(DimRange(min=1, opt=2, max=8), 12, 9, 7)),)

Forward = Callable[["Net", torch.Tensor], object]


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.few, self.six = nn.Conv2d(12, 4, 1), nn.Conv2d(12, 6, 1)
        self.bare, self.wide = nn.Conv2d(12, 6, 1, bias=False), nn.Conv2d(12, 4, 3, padding=1)
        self.step = nn.Conv2d(12, 4, 1, stride=2)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> object:
        return self._forward(self, x)


def around(x: torch.Tensor, **more: object) -> torch.Tensor:
    """Inception's."""
    return F.avg_pool2d(x, 3, 1, 1, **more)  # type: ignore[arg-type]


# what runs, and the operations afterwards
SWAPPED: dict[str, tuple[Forward, list[str]]] = {
    "few channels": (
        lambda m, x: F.relu(m.few(around(x))), ["conv2d", "avg_pool2d", "add", "relu"],
    ),
    "the image only": (
        lambda m, x: m.few(around(x, count_include_pad=False)), ["conv2d", "avg_pool2d", "add"],
    ),
    "another divisor": (
        lambda m, x: m.few(around(x, divisor_override=5)), ["conv2d", "avg_pool2d", "add"],
    ),
    "few pixels": (lambda m, x: F.avg_pool2d(m.six(x), 2), ["avg_pool2d", "conv2d"]),
    "few pixels, no bias": (
        lambda m, x: F.relu(F.avg_pool2d(m.bare(x), 3, 2, 1, True)),
        ["avg_pool2d", "conv2d", "relu"],
    ),
    "a bias, and the image only": (
        lambda m, x: F.avg_pool2d(m.six(x), 3, 2, 1, count_include_pad=False),
        ["avg_pool2d", "conv2d"],
    ),
}  # fmt: skip
KEPT: dict[str, tuple[Forward, list[str]]] = {
    "half the channels": (lambda m, x: m.six(around(x)), ["avg_pool2d", "conv2d"]),
    "a mean with other readers": (
        lambda m, x: (m.few(y := around(x)), y), ["avg_pool2d", "conv2d"],
    ),
    "fewer pixels already": (lambda m, x: m.few(F.avg_pool2d(x, 2)), ["avg_pool2d", "conv2d"]),
    "3×3": (lambda m, x: m.wide(around(x)), ["avg_pool2d", "conv2d"]),
    "in steps": (lambda m, x: m.step(around(x)), ["avg_pool2d", "conv2d"]),
    "an activation between": (
        lambda m, x: F.avg_pool2d(F.relu(m.six(x)), 2), ["conv2d", "relu", "avg_pool2d"],
    ),
    "a bias that padding dilutes": (
        lambda m, x: F.avg_pool2d(m.six(x), 3, 2, 1), ["conv2d", "avg_pool2d"],
    ),
    "more channels than the mean saves": (
        lambda m, x: F.avg_pool2d(m.few(x), (2, 1)), ["conv2d", "avg_pool2d"],
    ),
}  # fmt: skip


def answers(graph: Graph) -> list[torch.Tensor]:
    x = torch.randn(3, 12, 9, 7, generator=torch.Generator().manual_seed(1))
    made = interpret(graph, {"x": x}, upcast=torch.float64)
    return [made[v.name] for v in graph.outputs]


@pytest.mark.parametrize("case", [*SWAPPED, *KEPT])
def test_the_better_order(case: str) -> None:
    forward, ops = (SWAPPED | KEPT)[case]
    graph = capture(Net(forward).eval(), IMAGE)
    before, names = answers(graph), [v.name for v in graph.outputs]
    assert swap_means.apply(graph) == int(case in SWAPPED)
    check(graph)
    assert [n.op for n in graph.nodes] == ops
    assert [v.name for v in graph.outputs] == names
    for one, other in zip(before, answers(graph), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_what_follows_is_one_step_with_the_mean() -> None:
    graph = capture(Net(lambda m, x: F.relu(m.few(around(x)))).eval(), IMAGE)
    swap_means.apply(graph)
    fuse_epilogue.apply(graph)
    fuse_pointwise.apply(graph)
    conv, step = graph.nodes
    assert conv.op == "conv2d"
    assert [i[0] for i in step.attrs["program"]] == ["avg_pool2d", "add", "relu"]
