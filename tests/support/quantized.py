"""Graphs of networks that read features, and their calibrations; a block of a transformer."""

from __future__ import annotations

import torch
from torch import nn

from tessella import compiler
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture
from tessella.graph.graph import Graph


def graph_of(module: nn.Module, *shape: int, name: str = "x") -> Graph:
    spec = TensorSpec(name=name, dtype="float32", shape=(DimRange(min=1, opt=2, max=8), *shape))
    return capture(module.eval(), (spec,), outputs=("scores",))


def calibrated(graph: Graph, *shape: int, kinds: tuple[str, ...] = ("int8",), **settings):
    torch.manual_seed(1)
    batches = [{graph.inputs[0].name: torch.randn(4, *shape)} for _ in range(2)]
    return compiler.calibrate(graph, batches, kinds=kinds, **settings)


class Block(nn.Module):
    """Half a block of a transformer: norm, attention by two heads, and what it is added to.

    ``width`` of a head; ``kind``: "rows" with a head's numbers beside each other, "torch" for
    torch's own layer, "padded" for one with a mask, "read" where something else reads the heads.
    """

    def __init__(self, kind: str = "rows", width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.width = kind, width
        self.norm = nn.LayerNorm(2 * width)
        self.layer = nn.MultiheadAttention(2 * width, 2, batch_first=True)
        self.q, self.k, self.v, self.out = (nn.Linear(2 * width, 2 * width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.kind == "torch":
            return x + self.layer(y, y, y, need_weights=False)[0]

        def heads(layer: nn.Module) -> torch.Tensor:
            return layer(y).view(x.shape[0], x.shape[1], 2, self.width).transpose(1, 2)

        seen = x[:, None, None, :, 0] > -1 if self.kind == "padded" else None
        made = nn.functional.scaled_dot_product_attention(
            heads(self.q), heads(self.k), heads(self.v), seen
        )
        made = made.transpose(1, 2).reshape(x.shape)
        return x + self.out(made) + (made if self.kind == "read" else 0)
