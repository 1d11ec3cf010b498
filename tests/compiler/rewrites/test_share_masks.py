"""Attention masks that repeat themselves: shortened, with the same answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella import compiler, runtime
from tessella.compiler.pipeline import optimized
from tessella.compiler.rewrites import dead_code, fold_constants, share_masks
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import Graph, capture, interpret

TOKENS = 7
BATCH = DimRange(min=1, opt=2, max=4)
INPUTS = (
    TensorSpec(name="rows", dtype="float32", shape=(BATCH, TOKENS, 8)),
    TensorSpec(name="mask", dtype="int64", shape=(BATCH, TOKENS)),
)


class Attention(nn.Module):
    """Two heads; ``kind`` says how the padding mask [N, L] becomes the attention's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.kind = nn.Linear(8, 24), kind

    def forward(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(rows).view(-1, TOKENS, 3, 2, 4).permute(2, 0, 3, 1, 4)
        keys = (mask != 0)[:, None, None, :]
        seen = torch.ones(1, 1, TOKENS, 1, dtype=torch.bool)
        if self.kind == "expand":
            keys = keys.expand(-1, -1, TOKENS, -1)
        elif self.kind == "and":
            keys = seen & keys
        elif self.kind == "and, expanded":
            keys = (keys & seen).expand(-1, 2, -1, -1)
        elif self.kind == "causal":
            keys = keys & torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, keys)


def feeds(batch: int, dtype: str = "int64") -> dict[str, torch.Tensor]:
    torch.manual_seed(batch)
    mask = torch.arange(TOKENS) < torch.randint(1, TOKENS + 1, (batch, 1))
    return {"rows": torch.randn(batch, TOKENS, 8), "mask": mask.to(getattr(torch, dtype))}


def mask_of(graph: Graph) -> tuple[object, ...]:
    (node,) = (n for n in graph.nodes if n.op == share_masks.OP)
    return tuple(node["attn_mask"].shape)


@pytest.mark.parametrize("kind", ["expand", "and", "and, expanded"])
def test_what_repeats_is_read_once(kind: str) -> None:
    graph = capture(Attention(kind), INPUTS)
    fold_constants.apply(graph)
    assert mask_of(graph)[2] == TOKENS
    before = interpret(graph, feeds(3))
    assert share_masks.apply(graph) == 1
    dead_code.apply(graph)
    assert mask_of(graph)[1:] == (1, 1, TOKENS)
    assert not any(n.attrs.get("target") == "aten::bitwise_and.Tensor" for n in graph.nodes)
    after = interpret(graph, feeds(3))
    torch.testing.assert_close(after["output"], before["output"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "causal"])
def test_what_does_not_repeat_stays(kind: str) -> None:
    graph = optimized(capture(Attention(kind), INPUTS))
    assert share_masks.apply(graph) == 0
    assert mask_of(graph)[2] == (TOKENS if kind == "causal" else 1)


@pytest.mark.parametrize("dtype", ["int64", "bool"])
@pytest.mark.parametrize("kind", ["and, expanded", "causal"])
def test_a_plan_hides_the_same_keys(kind: str, dtype: str) -> None:
    module, (rows, mask) = Attention(kind), INPUTS
    plan = compiler.compile_graph(
        capture(module, (rows, replace(mask, dtype=dtype))),
        target="cpu",
        batch=BATCH,
        samples=feeds(2, dtype),
        about=compiler.About(built_from="attention", rebuild="python -m pytest"),
        measuring=compiler.Measuring(budget_s=0.0),
    )
    given = feeds(3, dtype)
    with runtime.load(plan) as engine, torch.inference_mode():
        made = engine(**given)["output"]
        torch.testing.assert_close(made, module(**given), rtol=1e-5, atol=1e-6)
