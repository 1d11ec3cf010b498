"""Two convolutions of one tap whose results are added are one, of both inputs side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tessella.compiler import explain
from tessella.compiler.choices import variants
from tessella.compiler.rewrites import fuse_epilogue, join_sums
from tessella.graph import check, interpret
from tests.support.quantized import graph_of


class Ends(nn.Module):
    """How a ResNet's block that changes its channels ends; ``end``: what else becomes of a part."""

    def __init__(self, end: str, skip: dict[str, Any], wide: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.end = end
        stride = skip.get("stride", 1)
        self.deep = nn.Conv2d(8, 4, 3, stride, 1)
        self.skip = nn.Conv2d(8, 12, **{"kernel_size": 1, **skip})
        self.wide = nn.Conv2d(4, 12, **{"kernel_size": 1, **wide})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(self.deep(x).relu()) if self.end == "wide first" else None
        y = self.skip(x)
        y = y.relu() if self.end == "relu" else y
        z = torch.relu(y + (self.wide(self.deep(x).relu()) if wide is None else wide))
        return (z * y if self.end == "read twice" else z).mean((2, 3))


@pytest.mark.parametrize(("end", "skip", "wide", "pools"), [
    ("", {}, {}, 0),
    ("", {"bias": False}, {"bias": False}, 0),
    ("", {"bias": False}, {}, 0),
    ("", {"stride": 2}, {}, 1),
    ("", {"stride": (1, 3)}, {"bias": False}, 1),
    ("wide first", {"stride": 2}, {}, 1),
    ("", {"groups": 4}, {}, None),
    ("", {}, {"groups": 4}, None),
    ("", {"kernel_size": 3, "padding": 1}, {}, None),
    ("", {}, {"kernel_size": 3, "padding": 1}, None),
    ("relu", {}, {}, None),
    ("read twice", {}, {}, None),
], ids=repr)  # fmt: skip
def test_what_is_one_product(
    end: str, skip: dict[str, Any], wide: dict[str, Any], pools: int | None
) -> None:
    module = Ends(end, skip, wide).double().eval()
    graph = graph_of(Ends(end, skip, wide), 8, 9, 7)
    fuse_epilogue.apply(graph)
    apart = graph.copy()
    assert join_sums.apply(apart, strided=False) == (pools == 0)
    assert join_sums.apply(graph) == (pools is not None)
    check(graph)
    ops = [n.op for n in graph.nodes]
    assert ops.count("conv2d") == 3 - (pools is not None)
    assert ops.count("max_pool2d") == (pools or 0)
    x = torch.randn(2, 8, 9, 7)
    made = interpret(graph, {"x": x})["scores"]
    torch.testing.assert_close(made.double(), module(x.double()), rtol=1e-5, atol=1e-5)


def test_they_are_raced_where_no_chain_has_them() -> None:
    graph = graph_of(Ends("", {"stride": 2}, {}), 8, 9, 7)
    names = {t: [r.name for r in explain(graph, target=t)] for t in ("cpu", "sm_80", "sm_90")}
    assert [names[t].count("join_sums") for t in names] == [0, 1, 0]
    fuse_epilogue.apply(graph)
    ((joined, count),) = variants.with_sums(graph, "sm_80")
    assert count == 1
    assert len(joined.nodes) == len(graph.nodes) + 1
