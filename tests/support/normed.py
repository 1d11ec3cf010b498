"""A network of linears and norms that lie before them, and a plan of one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessella import compiler
from tessella.artifacts.plan import Plan
from tessella.compiler.choices import fuse_chains, race
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture
from tessella.kernels import catalog
from tessella.search.tuning import Trial
from tests.support.networks import ABOUT

ROWS, WIDTH = 6, 32
BATCH = DimRange(min=1, opt=2, max=2)


class Layers(nn.Module):
    """What a transformer's block has but its attention; numbers of a usual size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.b, self.back = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.n, self.m = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        for norm in (self.n, self.m):
            nn.init.normal_(norm.weight, 1.0, 0.1)
            nn.init.normal_(norm.bias, 0.0, 0.1)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(nn.functional.gelu(self.b(x)))


class PreNorm(Layers):
    """ViT's: a sum is the next residual, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.a(x)
        h = h + self.mlp(self.n(h))
        return h + self.d(self.m(h))


def planned(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan for the CPU whose pairs are steps that the reference carries out."""
    row = catalog.kernel("reference")
    won = Trial(kernel=row.id, time_us=0.0)
    monkeypatch.setattr(fuse_chains, "kernels", lambda op, _: [row] if op == "linear_norm" else [])
    monkeypatch.setattr(fuse_chains, "trials", lambda *_, **__: (won,))
    monkeypatch.setattr(race, "times_us", lambda programs, *_, **__: [2.0, 1.0][: len(programs)])
    spec = TensorSpec(name="x", dtype="float32", shape=(BATCH, ROWS, WIDTH))
    return compiler.compile_graph(
        capture(module.eval(), (spec,)), target="cpu", batch=BATCH, precision="bf16", about=ABOUT,
        measuring=compiler.Measuring(budget_s=0.0),
    )  # fmt: skip
