"""Attention written out is one step with the same answers; what only looks like it stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tessella import compiler, runtime
from tessella.compiler.pipeline import optimized
from tessella.compiler.rewrites import fold_constants, fuse_attention
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture, check, interpret
from tessella.graph.graph import Graph

HEADS, TOKENS, WIDTH, WINDOWS = 2, 6, 4, 3
BATCH = DimRange(min=1, opt=2, max=4)
INPUTS = (
    TensorSpec(name="rows", dtype="float32", shape=(BATCH, WINDOWS, TOKENS, HEADS * WIDTH)),
    TensorSpec(name="padding", dtype="float32", shape=(BATCH, TOKENS)),
)

Tensor = torch.Tensor
Weigh = Callable[["Net", Tensor, Tensor, Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]


class Net(nn.Module):
    """Attention inside of windows; ``weigh`` makes the result of queries, keys and values."""

    def __init__(self, weigh: Weigh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.weigh = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH), weigh
        self.bias = nn.Parameter(torch.randn(1, HEADS, TOKENS, TOKENS))
        self.shift = nn.Parameter(torch.randn(WINDOWS, TOKENS, TOKENS) * 3)
        self.by_head = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        self.number = nn.Parameter(torch.tensor([0.3]))

    def forward(self, rows: Tensor, padding: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        qkv = self.project(rows).view(-1, TOKENS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        hidden = (padding[:, None, None, None] * -4.0).expand(-1, WINDOWS, -1, -1, -1)
        return self.weigh(self, *qkv, hidden.reshape(-1, 1, 1, TOKENS))


def by_window(m: Net, scores: Tensor) -> Tensor:
    cut = scores.view(-1, WINDOWS, HEADS, TOKENS, TOKENS) + m.shift[:, None][None]
    return cut.view(-1, HEADS, TOKENS, TOKENS)


def t(x: Tensor) -> Tensor:
    return x.transpose(-2, -1)


CASES: dict[str, Weigh] = {
    "plain": lambda m, q, k, v, p: (q @ t(k)).softmax(-1) @ v,
    "divided": lambda m, q, k, v, p: (q @ t(k) / 2.5).softmax(-1) @ v,
    "scaled before, both": lambda m, q, k, v, p: ((q * 0.7) @ (t(k) * 0.7)).softmax(-1) @ v,
    "scaled by a tensor": lambda m, q, k, v, p: (m.number * q @ t(k)).softmax(-1) @ v,
    "a bias": lambda m, q, k, v, p: (q * 0.5 @ t(k) + m.bias).softmax(-1) @ v,
    "a bias on the left": lambda m, q, k, v, p: (m.bias[0] + q @ t(k) * 0.5).softmax(3) @ v,
    "padding": lambda m, q, k, v, p: (q @ t(k) * 0.5 + p).softmax(-1) @ v,
    "windows": lambda m, q, k, v, p: by_window(m, q * 0.5 @ t(k)).softmax(-1) @ v,
    "a bias and windows": lambda m, q, k, v, p: by_window(
        m, q * 0.5 @ t(k) + m.bias
    ).softmax(-1) @ v,
    "a bias a key": lambda m, q, k, v, p: (q @ t(k) + m.bias[0, 0, 0].detach()).softmax(-1) @ v,
    "queries were whole numbers": lambda m, q, k, v, p: (
        ((q * 9).long() * 0.1) @ t(k)
    ).softmax(-1) @ v,
    "a factor a head": lambda m, q, k, v, p: (q @ t(k) * m.by_head + m.bias).softmax(-1) @ v,
    "no NaN": lambda m, q, k, v, p: torch.where(
        (w := (q @ t(k) + p).softmax(-1)).isnan(), torch.tensor(0.0), w
    ) @ v,
    "three axes": lambda m, q, k, v, p: (q[:, 0] @ t(k[:, 0]) / 2).softmax(-1) @ v[:, 0],
    "values of another width": lambda m, q, k, v, p: (q @ t(k)).softmax(-1) @ v[..., :3],
    "keys that are no permute": lambda m, q, k, v, p: (q @ v.reshape(-1, HEADS, WIDTH, TOKENS))
    .softmax(-1) @ k,
}  # fmt: skip
OTHERS: dict[str, Weigh] = {
    "weights are told too": lambda m, q, k, v, p: (
        (w := (q @ t(k)).softmax(-1)) @ v, w
    ),
    "products are read twice": lambda m, q, k, v, p: ((s := q @ t(k)).softmax(-1) @ v) + s.sum(),
    "a factor behind the mask": lambda m, q, k, v, p: ((q @ t(k) + m.bias) * 2).softmax(-1) @ v,
    "NaN is one": lambda m, q, k, v, p: torch.where(
        (w := (q @ t(k) + p).softmax(-1)).isnan(), torch.tensor(1.0), w
    ) @ v,
    "a mask of bools is added as numbers": lambda m, q, k, v, p: (
        (q @ t(k) + (p < -1)).softmax(-1) @ v
    ),
    "of whole numbers": lambda m, q, k, v, p: (q @ t(k) + p.long()).softmax(-1) @ v,
    "a mask of one axis": lambda m, q, k, v, p: (q @ t(k) + p[0, 0, 0]).softmax(-1) @ v,
    "one number more": lambda m, q, k, v, p: (q @ t(k) + m.number[0].detach()).softmax(-1) @ v,
    "other types": lambda m, q, k, v, p: (
        (q.double() @ t(k).double() + m.bias).softmax(-1) @ v.double()
    ),
    "a query that sees nothing": lambda m, q, k, v, p: (
        (q @ t(k) + torch.full((TOKENS, TOKENS), -torch.inf).triu()).softmax(-1) @ v
    ),
    "a negative factor": lambda m, q, k, v, p: (q @ t(k) * -1.0).softmax(-1) @ v,
    "over the queries": lambda m, q, k, v, p: (q @ t(k)).softmax(-2) @ v,
    "padding and a bias": lambda m, q, k, v, p: (q @ t(k) + p + m.bias).softmax(-1) @ v,
    "a difference": lambda m, q, k, v, p: (m.bias - q @ t(k)).softmax(-1) @ v,
    "divides": lambda m, q, k, v, p: (m.bias / (q @ t(k) + 9)).softmax(-1) @ v,
    "a factor a key": lambda m, q, k, v, p: (q @ t(k) * m.bias).softmax(-1) @ v,
    "values of all heads": lambda m, q, k, v, p: (q @ t(k)).softmax(-1) @ v[:1, :1],
}  # fmt: skip


def feeds(batch: int) -> dict[str, Tensor]:
    torch.manual_seed(batch)
    rows = torch.randn(batch, WINDOWS, TOKENS, HEADS * WIDTH)
    return {"rows": rows, "padding": (torch.rand(batch, TOKENS) > 0.5).float()}


def captured(weigh: Weigh) -> Graph:
    graph = capture(Net(weigh), INPUTS)
    fold_constants.apply(graph)
    return graph


def attentions(graph: Graph) -> int:
    return sum(node.op == fuse_attention.OP for node in graph.nodes)


@pytest.mark.parametrize("name", CASES)
def test_it_is_one_step(name: str) -> None:
    graph = captured(CASES[name])
    before = interpret(graph, feeds(3))
    assert fuse_attention.apply(graph) == 1
    check(graph)
    assert attentions(graph) == 1
    assert not any(node.op in ("softmax", "matmul") for node in graph.nodes)
    after = interpret(graph, feeds(3))
    torch.testing.assert_close(after["output"], before["output"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_it_stays(name: str) -> None:
    graph = captured(OTHERS[name])
    before = [(node.op, node.inputs) for node in graph.nodes]
    assert fuse_attention.apply(graph) == 0
    assert [(node.op, node.inputs) for node in graph.nodes] == before


def test_a_bias_a_sample_is_none_of_windows() -> None:
    """A batch of six by chance: its bias and that of three windows are of other samples."""
    six = TensorSpec(name="rows", dtype="float32", shape=(6, TOKENS, HEADS * WIDTH))

    class Fixed(Net):
        def forward(self, rows: Tensor) -> Tensor:  # type: ignore[override]
            qkv = self.project(rows).view(6, TOKENS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
            return self.weigh(self, *qkv, torch.linspace(0, 1, 6).view(6, 1, 1, 1))

    module = Fixed(lambda m, q, k, v, p: by_window(m, q @ t(k) + p).softmax(-1) @ v)
    graph = capture(module, (six,))
    fold_constants.apply(graph)
    assert fuse_attention.apply(graph) == 0
    rows = torch.randn(6, TOKENS, HEADS * WIDTH)
    torch.testing.assert_close(interpret(graph, {"rows": rows})["output"], module(rows))


@pytest.mark.parametrize("name", ["padding", "a bias and windows", "a factor a head"])
def test_a_plan_of_it_runs(name: str) -> None:
    weigh = CASES[name]
    module = Net(lambda m, *qkv: weigh(m, *qkv).reshape(-1, WINDOWS, HEADS, TOKENS, WIDTH))
    plan = compiler.compile_graph(
        capture(module, INPUTS),
        target="cpu",
        batch=BATCH,
        samples=feeds(2),
        about=compiler.About(built_from="attention", rebuild="python -m pytest"),
        measuring=compiler.Measuring(budget_s=0.0),
    )
    for batch in (1, 3):
        given = feeds(batch)
        with runtime.load(plan) as engine, torch.inference_mode():
            made = engine(**given)["output"]
            torch.testing.assert_close(made, module(**given), rtol=1e-5, atol=1e-5)


def test_factors_and_turns_are_gone() -> None:
    """Of Swin's attention a product, a view of each operand, attention and its reshape are left."""
    graph = optimized(capture(Net(CASES["a bias and windows"]), INPUTS))
    assert attentions(graph) == 1
    work = [n.op for n in graph.nodes if n.op not in ("reshape", "permute", "select")]
    assert work == ["linear", fuse_attention.OP]
