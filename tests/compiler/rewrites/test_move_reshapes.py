"""Reshapes between element-wise operations move, so that one chain is left: same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tessella.compiler.rewrites import fuse_pointwise, move_reshapes
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture, check, interpret
from tessella.graph.graph import Graph

BATCH = DimRange(min=1, opt=2, max=8)
WINDOWS = TensorSpec(name="x", dtype="float32", shape=(BATCH, 4, 3, 5, 5))

Forward = Callable[["Net", torch.Tensor], object]


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Parameter(torch.randn(1, 3, 5, 5))
        self.mask = nn.Parameter(torch.randn(1, 4, 1, 5, 5))
        self.norm, self.each = nn.LayerNorm(5), nn.Parameter(torch.randn(4, 3, 5, 5))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> object:
        return self._forward(self, x)


def window(m: Net, x: torch.Tensor, after: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What shifted windows do to the products of queries and keys."""
    joined = x.flatten(0, 1).transpose(2, 3) + m.bias
    return after((joined.view(-1, 4, 3, 5, 5) + m.mask).view(-1, 3, 5, 5)) @ m.bias[0]


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, 3)


# what runs, how many moves, and the operations after fusion
CASES: dict[str, tuple[Forward, int, list[str]]] = {
    "shifted windows": (
        lambda m, x: window(m, x, softmax), 2,
        ["reshape", "permute", "reshape", "pointwise", "reshape", "select", "matmul"],
    ),
    "a norm": (
        lambda m, x: window(m, x, m.norm), 2,
        ["reshape", "permute", "reshape", "pointwise", "reshape", "select", "matmul"],
    ),
    "one operand twice": (
        lambda m, x: ((y := x.flatten(0, 1).transpose(2, 3)) * y).view(-1, 4, 3, 5, 5).exp(), 1,
        ["reshape", "permute", "reshape", "reshape", "pointwise"],
    ),
    "a function behind a permute": (
        lambda m, x: m.norm(x.flatten(0, 1)).transpose(2, 3).sigmoid(), 1,
        ["reshape", "pointwise", "permute"],
    ),
    "permutes that meet": (
        lambda m, x: m.norm(x.flatten(0, 1)).transpose(2, 3).sigmoid().transpose(2, 3).flatten(1),
        2, ["reshape", "pointwise", "reshape"],
    ),
    # these stay
    "softmax of the first axis": (
        lambda m, x: torch.softmax(x.exp().flatten(0, 1), 0), 0, ["exp", "reshape", "softmax"],
    ),
    "no step before": (lambda m, x: x.flatten(0, 1).exp(), 0, ["reshape", "exp"]),
    "the last axes": (lambda m, x: x.exp().flatten(3).neg(), 0, ["exp", "reshape", "neg"]),
    "other readers": (
        lambda m, x: ((y := x.exp().flatten(0, 1)).neg(), y.sum(3)), 0,
        ["exp", "reshape", "neg", "sum"],
    ),
}  # fmt: skip


def answers(graph: Graph) -> list[torch.Tensor]:
    x = torch.randn(3, 4, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    made = interpret(graph, {"x": x}, upcast=torch.float64)
    return [made[v.name] for v in graph.outputs]


@pytest.mark.parametrize("case", CASES)
def test_one_chain_is_left(case: str) -> None:
    forward, moves, ops = CASES[case]
    graph = capture(Net(forward).eval(), (WINDOWS,))
    before, names = answers(graph), [v.name for v in graph.outputs]
    assert move_reshapes.apply(graph) == moves
    check(graph)
    fuse_pointwise.apply(graph)
    check(graph)
    assert [n.op for n in graph.nodes] == ops
    assert [v.name for v in graph.outputs] == names
    for one, other in zip(before, answers(graph), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
