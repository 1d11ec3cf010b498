"""A convolution of one tap beside one of 3×3, whose results are added, is its middle tap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tessella.compiler.rewrites import fuse_epilogue, join_branches
from tessella.graph import check, interpret
from tests.support.quantized import graph_of


class Branches(nn.Module):
    """A block of RepVGG's kind; ``end``: what happens to the small branch before the sum."""

    def __init__(self, end: str, small: dict[str, Any], large: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.end = end
        self.small = nn.Conv2d(8, 12, **{"kernel_size": 1, **small})
        self.large = nn.Conv2d(8, 12, **{"kernel_size": 3, "padding": 1, **large})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.small(x + 1 if self.end == "another input" else x)
        y = y.relu() if self.end == "relu" else y
        z = nn.functional.silu(self.large(x) + y)
        return (z * y if self.end == "read twice" else z).mean((2, 3))


@pytest.mark.parametrize(("end", "small", "large", "joins"), [
    ("", {}, {}, True),
    ("", {"bias": False}, {"bias": False}, True),
    ("", {"bias": False}, {}, True),
    ("", {}, {"kernel_size": (5, 3), "padding": (4, 1), "dilation": (2, 1)}, True),
    ("", {"stride": 2, "groups": 4}, {"stride": 2, "groups": 4}, True),
    ("", {"groups": 4}, {}, False),
    ("", {"kernel_size": 3, "padding": 1}, {}, False),
    ("", {"padding": 1}, {"kernel_size": 3, "padding": 2}, False),
    ("relu", {}, {}, False),
    ("read twice", {}, {}, False),
    ("another input", {}, {}, False),
], ids=repr)  # fmt: skip
def test_what_is_one_filter(
    end: str, small: dict[str, Any], large: dict[str, Any], joins: bool
) -> None:
    module = Branches(end, small, large).double().eval()
    graph = graph_of(Branches(end, small, large), 8, 9, 7)
    fuse_epilogue.apply(graph)
    assert join_branches.apply(graph) == joins
    check(graph)
    assert [n.op for n in graph.nodes].count("conv2d") == 2 - joins
    x = torch.randn(2, 8, 9, 7)
    made = interpret(graph, {"x": x})["scores"]
    torch.testing.assert_close(made.double(), module(x.double()), rtol=1e-5, atol=1e-5)
