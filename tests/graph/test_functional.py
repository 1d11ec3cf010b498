"""In-place operators by hand, and what must not be: results that share memory are traced again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture
from tessella.graph.functional import made_functional
from tessella.graph.interpret import interpret
from tessella.graph.show import text

Tensor = torch.Tensor
X = TensorSpec(name="x", dtype="float32", shape=(DimRange(min=1, opt=2, max=8), 4, 6, 6))


class Network(torch.nn.Module):
    def __init__(self, forward: Callable[[Network, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.drop = torch.nn.Dropout(0.5)
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def changed_after_it_was_read(net: Network, x: Tensor) -> Tensor:
    y = net.conv(x)
    before = y * 2
    y.relu_()
    return before + y.mul_(3) - y


def added_to_a_residual(net: Network, x: Tensor) -> Tensor:
    y = net.norm(net.conv(x))
    y += x
    return F.relu(y, inplace=True).flatten(1)


def a_view_changes_the_whole(net: Network, x: Tensor) -> Tensor:
    y = net.conv(x)
    y[:, :2].relu_()
    return y


def a_view_sees_the_change(net: Network, x: Tensor) -> Tensor:
    y = net.conv(x)
    rows = y.flatten(1)
    y.mul_(2)
    return rows


def dropout_that_drops_nothing(net: Network, x: Tensor) -> Tensor:
    y = net.conv(x)
    same = net.drop(y)
    same.mul_(2)
    return y


def contiguous_that_copies_nothing(net: Network, x: Tensor) -> Tensor:
    y = net.conv(x)
    y.contiguous().mul_(2)
    return y


def a_conversion_to_the_same(net: Network, x: Tensor) -> Tensor:
    y = net.conv(x)
    y.to(torch.float32).add_(x)
    return y


def parts_of_one_result(net: Network, x: Tensor) -> Tensor:
    y = net.conv(x)
    first, _ = y.chunk(2, 1)
    first.relu_()
    return y


def another_element_type(net: Network, x: Tensor) -> Tensor:
    y = net.conv(x).to(torch.bfloat16) * 1
    y.add_(x)
    return y.float()


PLAIN = [changed_after_it_was_read, added_to_a_residual, contiguous_that_copies_nothing]
SHARED = [
    a_view_changes_the_whole,
    a_view_sees_the_change,
    dropout_that_drops_nothing,
    a_conversion_to_the_same,
    parts_of_one_result,
    another_element_type,
]


@pytest.mark.parametrize("forward", [*PLAIN, *SHARED], ids=lambda f: f.__name__)
def test_the_graph_says_what_the_module_says(forward: Callable[..., Tensor]) -> None:
    network = Network(forward).eval()
    decided: list[bool] = []

    def watched(exported: torch.export.ExportedProgram) -> bool:
        decided.append(made_functional(exported))
        return decided[-1]

    file = sys.modules[capture.__module__]
    with mock.patch.object(file, "made_functional", watched):
        graph = capture(network, [X])
    assert decided == [forward in PLAIN]
    if forward in PLAIN:
        with mock.patch.object(file, "made_functional", return_value=False):
            assert text(graph) == text(capture(network, [X]))
    x = torch.randn(3, 4, 6, 6)
    (made,) = interpret(graph, {"x": x}).values()
    with torch.no_grad():
        torch.testing.assert_close(made, network(x), rtol=1e-5, atol=1e-5)
