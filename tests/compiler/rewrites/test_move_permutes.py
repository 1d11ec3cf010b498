"""Permutes that meet and cancel: the same numbers, and fewer copies of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tessella import runtime
from tessella.compiler.pipeline import optimized
from tessella.compiler.rewrites import dead_code, drop_no_ops, move_permutes
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture, check, interpret
from tessella.graph.graph import Dim, Graph, Node, Value
from tests.support.networks import captured, plan

BATCH = DimRange(min=1, opt=2, max=3)
VIEWS = ("permute", "select", "slice", "split", "expand")


def copies(graph: Graph) -> int:
    """Reshapes of what is not dense: each moves all of its elements."""
    strided = {v for n in graph.nodes if n.op in VIEWS for v in n.outputs}
    return sum(n.op == "reshape" and n.inputs[0] in strided for n in graph.nodes)


def moved(graph: Graph) -> int:
    """Elements that reshapes and layers by row must first put side by side."""
    strided = {v for n in graph.nodes if n.op in VIEWS for v in n.outputs}
    readers = [n.inputs[0] for n in graph.nodes if n.op in ("reshape", "linear", "layer_norm")]
    sizes = [
        [d.at(1) if isinstance(d, Dim) else d for d in v.shape] for v in readers if v in strided
    ]
    return sum(math.prod(size) for size in sizes)


def assert_same(one: Graph, other: Graph) -> None:
    (image,) = one.inputs
    for batch in (1, 3) if isinstance(image.shape[0], Dim) else (image.shape[0],):
        x = torch.randn(batch, *(int(d) for d in image.shape[1:]))
        right = interpret(one, {image.name: x}, upcast=torch.float64)
        made = interpret(other, {image.name: x}, upcast=torch.float64)
        assert list(made) == list(right)
        for name, tensor in right.items():
            torch.testing.assert_close(made[name], tensor, rtol=1e-12, atol=1e-12)


def tokens(module: nn.Module, *shape: int, batch: int | DimRange = BATCH) -> Graph:
    torch.manual_seed(0)
    spec = TensorSpec(name="tokens", dtype="float32", shape=(batch, *shape))
    graph = capture(module.eval(), (spec,))
    drop_no_ops.apply(graph)
    dead_code.apply(graph)
    return graph


class Attention(nn.Module):
    """torch's layer as it is captured: rows turned to [S, N, E] and back around every product."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(32, 4, batch_first=batch_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("batch", [BATCH, 1, 3])
def test_attention_copies_only_what_merges_its_heads(batch: int | DimRange) -> None:
    before = tokens(Attention(batch_first=True), 6, 32, batch=batch)
    after = before.copy()
    assert move_permutes.apply(after)
    check(after)
    assert_same(before, after)
    assert (copies(before), copies(after)) == (8, 1)
    (attention,) = (n for n in after.nodes if n.op == "scaled_dot_product_attention")
    assert {n.op for n in after.users(attention.output)} == {"permute"}  # a reshape would copy
    addition = next(n for n in after.nodes if n.op == "add")
    maker = after.producer(addition.inputs[1])
    assert maker.op == "linear"  # so that the sum is its residual


def test_a_network_with_attention() -> None:
    graph = captured("vit")  # of two blocks
    plain = graph.copy()
    drop_no_ops.apply(plain)
    dead_code.apply(plain)
    made = optimized(graph)
    assert (copies(plain), copies(made)) == (16, 2)
    assert sum(n.op == "linear" and n.inputs[3] is not None for n in made.nodes) == 4
    assert_same(graph, made)


def test_a_plan_with_moved_permutes_agrees() -> None:
    graph = tokens(Attention(batch_first=True), 6, 32)
    with runtime.load(plan(graph, (1, 2, 3))) as engine:
        x = torch.randn(3, 6, 32)
        (answer,) = engine(x).values()
        (right,) = interpret(graph, {"tokens": x}, upcast=torch.float64).values()
        torch.testing.assert_close(answer.double(), right, rtol=1e-4, atol=1e-4)


def turned(*nodes: Node, last: Value) -> Graph:
    image = Value("image", "float32", (Dim(), 4, 6))
    first = nodes[0]
    first.inputs = (image, *first.inputs[1:])
    return Graph("turned", [image], [last], list(nodes), {})


def test_a_pair_that_cancels_goes() -> None:
    a, b = Value("a", "float32", (Dim(), 6, 4)), Value("b", "float32", (Dim(), 6, 4))
    c, d = Value("c", "float32", (Dim(), 4, 6)), Value("d", "float32", (Dim(), 4, 6))
    graph = turned(
        Node(op="permute", inputs=(), outputs=(a,), attrs={"dims": (0, 2, 1)}),
        Node(op="exp", inputs=(a,), outputs=(b,)),
        Node(op="permute", inputs=(b,), outputs=(c,), attrs={"dims": (0, 2, 1)}),
        Node(op="tanh", inputs=(c,), outputs=(d,)),
        last=d,
    )
    made = graph.copy()
    assert move_permutes.apply(made) == 0  # of a row's elements, and not of rows
    assert_same(graph, made)


def test_what_others_read_is_left() -> None:
    """A value between that is an output keeps its node, its name and its numbers."""

    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            turned = x.permute(0, 2, 1)
            return turned, turned.permute(0, 2, 1).reshape(-1, 24)

    graph = tokens(Two(), 4, 6)
    made = graph.copy()
    move_permutes.apply(made)
    check(made)
    assert [v.name for v in made.outputs] == [v.name for v in graph.outputs]
    assert_same(graph, made)


# --- random chains --------------------------------------------------------------------------------


def shapes_of(draw: st.DrawFn, shape: list[int]) -> list[int]:
    """Other axes for the same elements of a sample; the batch's axis stays or takes the next in."""
    flat = [p for size in shape for p in _primes(size)]
    cuts = sorted(draw(st.sets(st.integers(0, len(flat)), max_size=4)))
    axes, start = [], 0
    for cut in [*cuts, len(flat)]:
        size = 1
        for prime in flat[start:cut]:
            size *= prime
        axes.append(size)
        start = cut
    return axes


def _primes(number: int) -> list[int]:
    found, prime = [], 2
    while number > 1:
        while number % prime == 0:
            found.append(prime)
            number //= prime
        prime += 1
    return found


@st.composite
def chains(draw: st.DrawFn) -> Graph:
    """Permutes, reshapes, selects, layers by row and unary operations, one after another."""
    value = Value("image", "float32", (Dim(), 4, 6, 2))
    image, nodes, constants = value, [], {}
    for at in range(draw(st.integers(2, 8))):
        shape = list(value.shape)
        kind = draw(st.sampled_from(("permute", "permute", "reshape", "select", "linear", "tanh")))
        attrs: dict[str, object] = {}
        inputs: tuple[Value | None, ...] = (value,)
        if kind == "permute":
            dims = tuple(draw(st.permutations(range(len(shape)))))
            attrs, shape = {"dims": dims}, [shape[d] for d in dims]
        elif kind == "reshape":
            place = next(i for i, d in enumerate(shape) if isinstance(d, Dim))
            before = shapes_of(draw, [int(d) for d in shape[:place]])
            after = shapes_of(draw, [int(d) for d in shape[place + 1 :]])
            shape = [*before, shape[place], *after]
            if draw(st.booleans()):  # the batch and the next axis as one
                place = len(before)
                shape[place : place + 2] = [shape[place] * shape[place + 1]]
            attrs = {"shape": tuple(shape)}
        elif kind == "select":
            plain = [i for i, d in enumerate(shape) if isinstance(d, int)]
            if len(shape) < 3 or not plain:
                continue
            dim = draw(st.sampled_from(plain))
            attrs = {"dim": dim, "index": draw(st.integers(0, int(shape[dim]) - 1))}
            shape.pop(dim)
        elif kind == "linear":
            if isinstance(shape[-1], Dim):
                continue
            weight = Value(f"weight{at}", "float32", (6, shape[-1]))
            constants[weight] = torch.randn(6, int(shape[-1])) / int(shape[-1]) ** 0.5
            inputs, attrs = (value, weight, None, None), {"activation": None}
            shape[-1] = 6
        value = Value(f"v{at}", "float32", tuple(shape))
        nodes.append(Node(op=kind, inputs=inputs, outputs=(value,), attrs=attrs))
    return Graph("drawn", [image], [value], nodes, constants)


@settings(max_examples=150, deadline=None)
@given(chains())
def test_random_chains_mean_the_same_and_copy_no_more(graph: Graph) -> None:
    if not graph.nodes:
        return
    check(graph)
    made = graph.copy()
    move_permutes.apply(made)
    check(made)
    assert_same(graph, made)
    assert moved(made) <= moved(graph)
