"""Layers whose products do not gain what it takes to round for them stay in 16 bits on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tessella.compiler import pipeline, slow_roundings
from tessella.compiler.passes import Request
from tests.support.quantized import calibrated, graph_of

BATCH = 4096  # nothing is computed at it


class Padded(nn.Module):
    """A layer of few products for what it reads, and one of many; something pads for both, so that
    no layer writes rounded what they read.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.wide = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 256, 3, padding=1)
        self.thin, self.deep = nn.Conv2d(16, 8, 2), nn.Conv2d(256, 256, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thin = self.thin(F.pad(self.first(x).relu(), (0, 1, 0, 1)))
        deep = self.deep(F.pad(self.wide(x).relu(), (0, 1, 0, 1)))
        return torch.cat([thin, deep], 1).mean((2, 3))


def test_a_thin_layer_is_left_where_rounding_for_it_costs_more_than_it_gains() -> None:
    graph = graph_of(Padded(), 3, 24, 24)
    exact, found = pipeline.optimized(graph), calibrated(graph, 3, 24, 24)
    thin, deep = (
        n.output.name
        for k in (8, 256)
        for n in exact.nodes
        if n.op == "conv2d" and n["weight"].shape[:2] in ((k, 2 * k), (k, k))
    )

    def left(target: str, batch: int, **precisions: str) -> list[str]:
        request = Request(
            target=target, precision="int8", calibration=found, precisions=precisions
        ).assigned(exact)
        assert {thin, deep} <= set(request.decided.kinds)
        return slow_roundings.layers(exact, request, batch)

    assert left("sm_90", BATCH) == [thin]
    assert left("sm_90", 1) == []  # what rounds takes no time
    assert left("sm_90", BATCH, **{thin: "int8"}) == []  # as the user wants it
    assert left("cpu", BATCH) == []
