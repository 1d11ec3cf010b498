"""Concatenations in slices: the same answers, nothing overwritten, and only where it is faster."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tessella import runtime
from tessella.artifacts.plan import Plan, from_bytes, to_bytes
from tessella.artifacts.program import Bucket, Slice
from tessella.compiler.choices import choose_kernels, join_in_place
from tessella.compiler.choices.choose_kernels import Choice
from tessella.core.errors import CompileError
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import interpret
from tessella.graph.graph import Graph, Node, Value
from tessella.operations.problem import Problem
from tessella.search.tuning import Trial
from tests.support.arena import check_memory
from tests.support.choices import for_nothing, trials
from tests.support.networks import graph_of, plan

Forward = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice costs nothing, wherever some kernel can write it."""
    monkeypatch.setattr(join_in_place, "trials", for_nothing)


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(x)


def compiled(forward: Forward, *shape: int) -> tuple[Graph, Plan]:
    spec = TensorSpec(name="image", dtype="float32", shape=(1, *shape))
    graph = graph_of(Net(forward), spec, DimRange(min=1, opt=2, max=3))
    return graph, plan(graph, (1, 2, 3))


def joins(bucket: Bucket) -> list[str]:
    return [s.kernel for s in bucket.steps if s.op == "cat"]


def slices(bucket: Bucket) -> dict[str, Slice]:
    return {b.name: b.slice for b in bucket.buffers if b.slice is not None}


def assert_agrees(graph: Graph, made: Plan, tolerance: float = 1e-5) -> None:
    """The plan, written and read again, answers like the network in float64, for every batch."""
    for bucket in made.program.buckets:
        check_memory(made.program, bucket)
    with runtime.load(from_bytes(to_bytes(made))) as engine:
        for count in (1, 2, 3, 5):
            x = torch.randn(count, *(int(d) for d in graph.inputs[0].shape[1:]))
            right = interpret(graph, {"image": x}, upcast=torch.float64)
            for name, tensor in engine(x).items():
                torch.testing.assert_close(
                    tensor.double(), right[name], rtol=tolerance, atol=tolerance
                )


def dense_block(x: torch.Tensor) -> torch.Tensor:
    """DenseNet's pattern: every layer reads all parts that there are so far."""
    parts = [x.exp()]
    for _ in range(3):
        parts.append((torch.cat(parts, 1)[:, :4] * 0.5).tanh())
    return torch.cat(parts, 1).sigmoid()


# what runs, on what, and for each concatenation how many of its parts are slices
CASES: dict[str, tuple[Forward, tuple[int, ...], int]] = {
    "two": (lambda x: torch.cat([x.exp(), x.tanh()], 1).relu(), (4, 3, 3), 2),
    "a part that is read too": (
        lambda x: torch.cat([y := x.exp(), y.tanh()], 1).relu() + torch.cat([y, y], 1), (4, 2, 2), 2
    ),
    "the input itself": (lambda x: torch.cat([x, x.tanh()], 1).relu(), (4, 3, 3), 1),
    "twice the same": (lambda x: torch.cat([y := x.exp(), y, x.tanh()], 1), (4, 3, 3), 1),
    "one in another": (
        lambda x: torch.cat([torch.cat([x.exp(), x.tanh()], 1), x.neg()], 1).relu(), (4, 3, 3), 4
    ),
    "rows": (lambda x: torch.cat([x.exp(), x.tanh()], 2).relu(), (3, 4, 8), 2),
    "by no vector": (lambda x: torch.cat([x[:, :3].exp(), x.tanh()], 1), (5, 1, 3), 2),
    "DenseNet": (dense_block, (4, 3, 4), 6),
    "a split of it": (
        lambda x: torch.cat([p.exp() for p in torch.cat([x.tanh(), x], 1).split(4, 1)], 1),
        (6, 3, 4), 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parts_lie_in_the_whole(always: None, name: str) -> None:
    forward, shape, wanted = CASES[name]
    graph, made = compiled(forward, *shape)
    assert_agrees(graph, made)
    written = [
        place
        for bucket in made.program.buckets[-1:]
        for name, place in slices(bucket).items()
        if not any(name in s.outputs and s.op == "split" for s in bucket.steps)
    ]
    assert len(written) == wanted
    assert set(joins(made.program.buckets[-1])) <= {"cat.in_place", "cat.aten"}
    assert "cat.in_place" in joins(made.program.buckets[-1])


def test_concatenations_are_measured_as_they_are_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the way, their times are computed from the bytes that are still copied."""
    asked: collections.Counter[str] = collections.Counter()

    def counted(node: Node, problem: Problem, *more: Any) -> tuple[Trial, ...]:
        if node.op == "cat":
            asked[f"{problem.outputs[0].shape} {node.output.name}"] += 1
        found = trials(node, problem, *more)
        return tuple(t if t.refused else replace(t, time_us=0.0) for t in found)

    monkeypatch.setattr(join_in_place, "trials", counted)
    _, made = compiled(dense_block, 4, 3, 4)
    assert asked
    assert set(asked.values()) == {1}
    for bucket in made.program.buckets:
        chosen = {c.step: c for c in made.tuning if c.chosen and c.batch == bucket.batch}
        for step in bucket.steps:
            assert chosen[step.outputs[0]].kernel == step.kernel


@pytest.mark.parametrize("possible", [True, False])
def test_other_sizes_have_the_slices_of_the_usual_one(
    always: None, monkeypatch: pytest.MonkeyPatch, possible: bool
) -> None:
    """They are asked at one size; and at another where no kernel could write them there."""
    asked: set[int] = set()
    join, choose = join_in_place._Program.join, choose_kernels.apply

    def counted(program: Any, index: int) -> None:
        asked.add(program.choices[index].problem.output.shape[0])
        join(program, index)

    def refused(*arguments: Any) -> list[Choice]:
        if len(arguments) > 5:
            raise CompileError("nobody can")
        return choose(*arguments)

    monkeypatch.setattr(join_in_place._Program, "join", counted)
    if not possible:
        monkeypatch.setattr(choose_kernels, "apply", refused)
    graph, made = compiled(dense_block, 4, 3, 4)
    assert_agrees(graph, made)
    assert asked == ({2} if possible else {1, 2, 3})
    first, *others = (slices(bucket) for bucket in made.program.buckets)
    assert first
    assert all(other == first for other in others)


def test_a_cat_of_one_size_of_the_batch_is_dense_slices(always: None) -> None:
    """One image: the parts of its channels are contiguous, and any kernel may write them."""
    _, made = compiled(CASES["two"][0], *CASES["two"][1])
    formats = [{b.format for b in u.buffers if b.slice} for u in made.program.buckets]
    assert formats == [{"contiguous"}, {"strided"}, {"strided"}]


def test_who_writes_no_slices_is_copied_as_before(always: None) -> None:
    """A library's convolution makes its own tensor: only the other part goes without a copy.

    Along one axis: there is one format, and no timing chooses another for one part only.
    """
    conv = nn.Conv1d(4, 4, 1)
    graph, made = compiled(lambda x: torch.cat([conv(x), x.tanh()], 1).relu(), 4, 9)
    assert_agrees(graph, made, 1e-4)
    assert [s.start for s in slices(made.program.buckets[-1]).values()] == [4]


def test_the_slower_way_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*asked: Any) -> tuple[Trial, ...]:
        return tuple(t if t.refused else replace(t, time_us=1e9) for t in trials(*asked))

    monkeypatch.setattr(join_in_place, "trials", slow)
    graph, made = compiled(CASES["two"][0], *CASES["two"][1])
    assert_agrees(graph, made)
    assert not slices(made.program.buckets[-1])


# --- random networks ------------------------------------------------------------------------------

UNARY = ("abs", "tanh", "sigmoid", "relu", "neg")


@st.composite
def programs(draw: st.DrawFn) -> tuple[Graph, bool]:
    """A straight line of element-wise steps, concatenations and splits of what there is so far."""
    channels_last = draw(st.booleans())
    image = Value("image", "float32", (2, 4, 3, 2))
    nodes, values = [], [image]

    def add(op: str, inputs: list[Value], widths: list[int], **attrs: Any) -> None:
        outputs = [
            Value(f"v{len(values) + i}", "float32", (2, width, 3, 2))
            for i, width in enumerate(widths)
        ]
        nodes.append(Node(op=op, inputs=tuple(inputs), outputs=tuple(outputs), attrs=attrs))
        values.extend(outputs)

    for _ in range(draw(st.integers(2, 12))):
        kind = draw(st.sampled_from(("unary", "unary", "binary", "cat", "cat", "split")))
        one = draw(st.sampled_from(values))
        width = int(one.shape[1])
        if kind == "unary":
            add(draw(st.sampled_from(UNARY)), [one], [width])
        elif kind == "binary":
            alike = [v for v in values if v.shape == one.shape]
            add("add", [one, draw(st.sampled_from(alike))], [width], scalar=None, alpha=1)
        elif kind == "cat":
            parts = draw(st.lists(st.sampled_from(values), min_size=1, max_size=4))
            add("cat", parts, [sum(int(p.shape[1]) for p in parts)], dim=1)
        elif width > 1:
            first = draw(st.integers(1, width - 1))
            add("split", [one], [first, width - first], sizes=(first, width - first), dim=1)
    read = {v for node in nodes for v in node.inputs}
    outputs = [v for node in nodes for v in node.outputs if v not in read][-3:]
    return Graph("drawn", [image], outputs, nodes, {}), channels_last


@settings(max_examples=25, deadline=None)
@given(programs())
def test_random_networks(drawn: tuple[Graph, bool]) -> None:
    graph, channels_last = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(join_in_place, "trials", for_nothing)
        if channels_last:
            patch.setattr(
                "tessella.compiler.choices.variants.layouts_to_try", lambda *_: ("channels_last",)
            )
            patch.setattr(
                "tessella.compiler.rewrites.assign_layout._format", _channels_last_from_the_start
            )
        made = plan(graph.copy(), (2, 2, 2))
    check_memory(made.program, made.program.buckets[0])
    x = torch.randn(2, 4, 3, 2)
    right = interpret(graph, {"image": x}, upcast=torch.float64)
    with runtime.load(from_bytes(to_bytes(made))) as engine:
        for name, tensor in engine(x).items():
            scale = right[name].abs().max().clamp_min(1)
            torch.testing.assert_close(
                tensor.double() / scale, right[name] / scale, rtol=1e-5, atol=1e-5
            )


def _channels_last_from_the_start(node: Node, *_: object) -> str:
    return "strided" if node.op == "split" else "channels_last"
