"""Maps become rows of pixels, and rows maps: turned first, flattened then."""

from __future__ import annotations

import torch
from torch import nn

from tessella.compiler.pipeline import optimized
from tessella.compiler.rewrites import keep_pixels
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture
from tessella.graph.check import check
from tessella.graph.interpret import interpret

IMAGE = TensorSpec(name="image", dtype="float32", shape=(DimRange(min=1, opt=2, max=4), 3, 6, 4))


class Rows(nn.Module):
    """A norm of pixels' channels between two convolutions, as transformers of pictures have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 5, 1), nn.LayerNorm(5)
        self.last = nn.Conv2d(5, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(self.first(x).flatten(2).transpose(1, 2))
        return self.last(rows.transpose(1, 2).reshape(-1, 5, 6, 4))


def test_both_pairs_change_places_and_nothing_else_changes() -> None:
    graph = capture(Rows().eval(), [IMAGE])
    x = torch.randn(3, 3, 6, 4)
    right = interpret(graph, {"image": x})["output"]
    assert keep_pixels.apply(graph) == 2
    check(graph)
    assert keep_pixels.apply(graph) == 0
    assert [n.op for n in graph.nodes] == [
        "conv2d", "permute", "reshape", "layer_norm", "reshape", "permute", "conv2d",
    ]  # fmt: skip
    assert torch.equal(interpret(graph, {"image": x})["output"], right)


def test_rows_that_are_cut_into_heads_at_once() -> None:
    """The second step of one pair is the first of another: it changes place once."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x).flatten(2).transpose(1, 2).reshape(-1, 24, 4, 2).relu()

    graph = optimized(capture(Heads().eval(), [IMAGE]))
    x = torch.randn(3, 3, 6, 4)
    (right,) = interpret(graph, {"image": x}).values()
    assert keep_pixels.apply(graph) == 1
    check(graph)
    assert torch.equal(*interpret(graph, {"image": x}).values(), right)


def test_what_is_between_and_read_by_others_stays() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            flat = x.flatten(2)
            return flat.transpose(1, 2).relu(), flat.sum(2)

    graph = capture(Both().eval(), [IMAGE])
    assert keep_pixels.apply(graph) == 0


def test_rows_that_are_cut_otherwise_stay() -> None:
    class Heads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(-1, 18, 4).transpose(1, 2).relu()

    graph = capture(Heads().eval(), [IMAGE])
    assert keep_pixels.apply(graph) == 0
