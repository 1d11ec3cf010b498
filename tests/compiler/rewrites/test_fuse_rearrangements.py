"""Chains that end in a copy as one step: what is found, what stays, and the same numbers."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchvision import models

from tessella import runtime
from tessella.artifacts.plan import Plan, from_bytes, to_bytes
from tessella.artifacts.program import same_computation
from tessella.compiler.passes import of_stage, request_for, run
from tessella.compiler.pipeline import optimized
from tessella.compiler.precision import assign
from tessella.compiler.rewrites import assign_layout, dead_code, drop_no_ops, fuse_rearrangements
from tessella.core.errors import ArtifactError
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import Graph, capture, check, interpret
from tessella.graph.graph import Dim, Node, Value, attrs_at, shape_at
from tests.support.networks import graph_of, plan

BATCH = DimRange(min=1, opt=2, max=3)
Function = Callable[[torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]


class Net(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.function(x)


def of(function: Function, *shape: int, batch: int | DimRange = BATCH) -> Graph:
    spec = TensorSpec(name="x", dtype="float32", shape=(batch, *shape))
    graph = capture(Net(function), (spec,))
    drop_no_ops.apply(graph)
    dead_code.apply(graph)
    return graph


def fused(graph: Graph) -> Graph:
    """After the pass: the same numbers, and nothing more to find."""
    made = graph.copy()
    fuse_rearrangements.apply(made)
    check(made)
    same(graph, made)
    assert fuse_rearrangements.apply(made) == 0
    return made


def same(one: Graph, other: Graph) -> None:
    (x,) = one.inputs
    for batch in (1, 3) if isinstance(x.shape[0], Dim) else (1,):
        given = {x.name: torch.randn(shape_at(x.shape, batch))}
        right, made = (interpret(g, given, upcast=torch.float64) for g in (one, other))
        assert list(made) == list(right)
        assert all(torch.equal(made[name], right[name]) for name in right)


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


# --- what is found --------------------------------------------------------------------------------


def cut(x: torch.Tensor, window: int = 4) -> torch.Tensor:
    n, h, w, c = x.shape
    parts = x.view(n, h // window, window, w // window, window, c).permute(0, 1, 3, 2, 4, 5)
    return parts.reshape(-1, window * window, c)


def merged(x: torch.Tensor, size: int = 8, window: int = 4) -> torch.Tensor:
    parts = x.view(-1, size // window, size // window, window, window, x.shape[2])
    return parts.permute(0, 1, 3, 2, 4, 5).reshape(-1, size, size, x.shape[2])


def shuffled(x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def folded(x: torch.Tensor) -> torch.Tensor:
    parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
    return torch.cat(parts, -1)


FOUND: dict[str, tuple[Function, tuple[int, ...]]] = {
    "windows": (cut, (8, 8, 6)),
    "windows of a rolled image": (lambda x: cut(x.roll((-1, -3), (1, 2))), (8, 8, 6)),
    "an image of windows": (lambda x: merged(cut(x).exp()).roll((1, 3), (1, 2)), (8, 8, 6)),
    "one axis rolled": (lambda x: x.roll(3, 2), (8, 8, 6)),
    "an axis rolled twice": (lambda x: cut(x.roll(3, 1).roll(2, 1)), (8, 8, 6)),
    "channels rolled": (lambda x: x.roll(-1, 3), (8, 8, 6)),
    "rolled in windows, and as a whole": (
        lambda x: x.view(-1, 64, 6).roll(5, 1).view(-1, 8, 8, 6).permute(0, 2, 1, 3).flatten(1),
        (8, 8, 6),
    ),
    "shuffled channels": (shuffled, (6, 4, 4)),
    "pixels to channels": (folded, (8, 8, 6)),
    "pixels to channels, three of them": (
        lambda x: torch.cat([x[:, :, i::3] for i in range(3)], 1), (4, 9, 2),
    ),
    "pixels of an axis to its front": (
        lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1), (4, 9, 2),
    ),
    "slices that two parts begin with": (
        lambda x: torch.cat([r[:, :, j::2] for r in (x[:, ::2], x[:, 1::2]) for j in (0, 1)], 3),
        (4, 8, 2),
    ),
    "tokens in the batch": (lambda x: x.transpose(1, 2).reshape(-1, 5), (5, 7)),
    "of a crop": (lambda x: (x[:, 1:7] + 1).roll(2, 1), (8, 8, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("batch", [BATCH, 1])
def test_one_step(name: str, batch: int | DimRange) -> None:
    function, shape = FOUND[name]
    graph = of(function, *shape, batch=batch)
    made = fused(graph)
    moves = {"reshape", "permute", "cat", "slice"}
    crop = {"slice"} if name == "of a crop" else set()
    if name == "an image of windows":
        assert [op for op in ops(made) if op != "exp"] == ["rearrange"] * 2
    else:
        assert Counter(ops(made))["rearrange"] == 1
        assert moves & set(ops(made)) == crop


def test_the_attributes() -> None:
    """Windows of a rolled image, and back: one place for the roll covers both."""
    both = of(lambda x: merged(cut(x.roll(-1, 1)).exp()).roll(1, 1), 8, 8, 6)
    there, back = (n.attrs for n in fused(both).nodes if n.op == "rearrange")
    assert there == {
        "sizes": (Dim(), 2, 4, 2, 4, 6),
        "rolls": (((1, 2), 7),),
        "dims": (0, 1, 3, 2, 4, 5),
        "shape": (Dim(4), 16, 6),
    }
    assert back == {
        "sizes": (Dim(), 2, 2, 4, 4, 6),
        "rolls": (((1, 3), 1),),
        "dims": (0, 1, 3, 2, 4, 5),
        "shape": (Dim(), 8, 8, 6),
    }
    assert attrs_at(back, 3)["sizes"] == (3, 2, 2, 4, 4, 6)


# --- what stays -----------------------------------------------------------------------------------


def heads(x: torch.Tensor) -> torch.Tensor:
    """Attention reads its operands where they lie, and writes as the layer behind it reads."""
    q, k, v = x.view(-1, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 6, 8)


KEPT: dict[str, tuple[Function, tuple[int, ...]]] = {
    "attention": (heads, (6, 24)),
    "a view": (lambda x: x.reshape(-1, 6, 2, 4).permute(0, 2, 1, 3), (6, 8)),
    "only a reshape": (lambda x: x.reshape(-1, 3, 16), (6, 8)),
    "a permute that is undone": (lambda x: x.mT.exp().mT, (6, 8)),
    "what a product reads": (lambda x: x.transpose(1, 2) @ x, (6, 8)),
    "two ends that swap, and a hole": (lambda x: torch.cat([x[:, 3:], x[:, :2]], 1), (6, 8)),
    "an axis twice": (lambda x: torch.cat([x[:, 3:], x[:, :4]], 1), (6, 8)),
    "two halves in their order": (lambda x: torch.cat([x[:, :3].exp(), x[:, 3:]], 1), (6, 8)),
    "every third of two": (lambda x: torch.cat([x[:, ::3], x[:, 1::3]], 1), (6, 8)),
    "slices of two values": (lambda x: torch.cat([x[:, 3:], x.exp()[:, :3]], 1), (6, 8)),
    "parts that no axis is made of": (lambda x: x.transpose(1, 2).reshape(-1, 12, 4), (6, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_is_no_such_chain(name: str) -> None:
    function, shape = KEPT[name]
    graph = of(function, *shape)
    assert ops(fused(graph)) == ops(graph)


def test_the_channels_last_view_stays_one() -> None:
    """Rows of pixels of a convolution: a view, where convolutions are channels_last."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x).permute(0, 2, 3, 1).reshape(-1, 16, 8)

    spec = TensorSpec(name="x", dtype="float32", shape=(BATCH, 3, 4, 4))
    graph = capture(Rows(), (spec,))
    assert ops(fused(graph)) == ["conv2d", "permute", "reshape"]


def test_what_somebody_else_reads_is_made_once() -> None:
    """Both chains begin with the copy that both need."""

    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.roll(1, 1)
        return cut(y).exp(), y.roll(1, 2).sum(1)

    made = fused(of(two, 8, 8, 6))
    shared = Counter(n.inputs[0].name for n in made.nodes if n.op == "rearrange")
    assert sorted(shared.values()) == [1, 2]
    assert ops(fused(of(lambda x: (y := x.roll(1, 1), cut(y)), 8, 8, 6))) == ["rearrange"] * 2


def test_what_is_moved_back_is_not_moved() -> None:
    def nothing(x: torch.Tensor) -> torch.Tensor:
        return merged(cut(x.roll(3, 2))).roll(-3, 2).flatten(1)

    assert set(ops(fused(of(nothing, 8, 8, 6)))) == {"reshape"}


# --- random chains --------------------------------------------------------------------------------


@st.composite
def chains(draw: st.DrawFn) -> Graph:
    """Reshapes, permutes, rolls, every second place, and now and then another reader."""
    value = Value("x", "float32", (draw(st.sampled_from((Dim(), 2))), 4, 6, 2))
    x, nodes, outputs = value, list[Node](), list[Value]()

    def add(op: str, inputs: list[Value], sizes: list[int | Dim], **attrs: object) -> Value:
        made = Value(f"v{len(nodes)}", "float32", tuple(sizes))
        nodes.append(Node(op=op, inputs=tuple(inputs), outputs=(made,), attrs=attrs))
        return made

    def joined(parts: list[list[int | Dim]], dim: int, steps: list[tuple[int, int, int]]) -> None:
        nonlocal value
        ways = [
            add("slice", [value], p, dim=dim, start=a, end=b, step=s)
            for p, (a, b, s) in zip(parts, steps, strict=True)
        ]
        value = add("cat", ways, list(value.shape), dim=dim)

    for _ in range(draw(st.integers(1, 7))):
        shape = list(value.shape)
        kind = draw(st.sampled_from(("permute", "permute", "reshape", "reshape", "roll", "fold")))
        long = [i for i, d in enumerate(shape) if isinstance(d, int) and d > 1]
        if kind == "permute":
            dims = tuple(draw(st.permutations(range(len(shape)))))
            value = add("permute", [value], [shape[d] for d in dims], dims=dims)
        elif kind == "reshape" and long:
            at = draw(st.sampled_from(long))
            size = int(shape[at])
            inner = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
            shape[at : at + 1] = [size // inner, inner]
            if len(shape) > 2 and draw(st.booleans()):
                at = draw(st.integers(0, len(shape) - 2))
                both = shape[at : at + 2]
                if not all(isinstance(d, Dim) for d in both):
                    shape[at : at + 2] = [both[0] * both[1]]
            value = add("reshape", [value], shape, shape=tuple(shape))
        elif kind == "roll" and long:
            dim = draw(st.sampled_from(long))
            size = int(shape[dim])
            place = draw(st.integers(1, size - 1))
            parts = [[*shape[:dim], n, *shape[dim + 1 :]] for n in (size - place, place)]
            joined(parts, dim, [(place, size, 1), (0, place, 1)])
        elif kind == "fold" and any(shape[i] % 2 == 0 for i in long):
            dim = draw(st.sampled_from([i for i in long if shape[i] % 2 == 0]))
            half = [*shape[:dim], int(shape[dim]) // 2, *shape[dim + 1 :]]
            joined([half, half], dim, [(0, int(shape[dim]), 2), (1, int(shape[dim]), 2)])
        if nodes and draw(st.integers(0, 5)) == 0:
            outputs.append(add("neg", [value], list(value.shape)))
    final = add("tanh", [value], list(value.shape))
    return Graph("drawn", [x], [*outputs, final], nodes, {})


def moved(graph: Graph) -> int:
    """Elements of a sample that are copied from one order to another."""
    formats = assign_layout.apply(graph.copy(), "contiguous")
    sizes = [
        math.prod(shape_at(n.output.shape, 1))
        for n in graph.nodes
        if n.op in ("cat", "rearrange")
        or (n.op == "reshape" and formats.get(n.inputs[0].name, "contiguous") != "contiguous")
    ]
    return sum(sizes)


@settings(max_examples=150, deadline=None)
@given(chains())
def test_random_chains(graph: Graph) -> None:
    check(graph)
    made = fused(graph)
    assert moved(made) <= moved(graph)
    assert "cat" not in ops(made)


# --- layouts --------------------------------------------------------------------------------------


class Shuffle(nn.Module):
    """A block of ShuffleNet: half of the channels pass, all are shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = shuffled(self.first(x).relu())
        a, b = x.chunk(2, 1)
        return shuffled(torch.cat([a, self.second(b)], 1)).mean((2, 3))


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
def test_channels_stay_where_they_lie(layout: assign_layout.Layout) -> None:
    spec = TensorSpec(name="image", dtype="float32", shape=(1, 8, 4, 4))
    graph = optimized(graph_of(Shuffle().eval(), spec, BATCH))
    made = fused(graph)
    formats = assign_layout.apply(made, layout)
    assert {formats[n.output.name] for n in made.nodes if n.op == "rearrange"} == {layout}
    assert sum(n.op == "to" for n in made.nodes) == (layout == "channels_last")  # of the image


def test_rows_become_pixels_and_pixels_rows() -> None:
    """What a convolution reads is written as it wants it, and what a layer by row reads too."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.conv = nn.Linear(6, 6), nn.Conv2d(6, 6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            image = self.fc(x).view(-1, 2, 2, 4, 4, 6).permute(0, 5, 1, 3, 2, 4)
            image = self.conv(image.reshape(-1, 6, 8, 8) * 2)
            parts = image.view(-1, 6, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1)
            return self.fc(parts.reshape(-1, 4, 16, 6))

    spec = TensorSpec(name="x", dtype="float32", shape=(BATCH, 4, 16, 6))
    made = fused(capture(Both().eval(), (spec,)))
    formats = assign_layout.apply(made, "channels_last")
    pixels, rows = (formats[n.output.name] for n in made.nodes if n.op == "rearrange")
    assert (pixels, rows) == ("channels_last", "contiguous")
    assert "to" not in ops(made)


# --- plans ----------------------------------------------------------------------------------------


class Windows(nn.Module):
    """Layers over windows of an image, one of them rolled, and the image again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(3, 6, 1), nn.Linear(6, 6), nn.Linear(6, 6)
        self.place = nn.Parameter(torch.randn(8, 8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).permute(0, 2, 3, 1)
        x = x + merged(self.first(cut(x).softmax(1)))
        windows = cut(x.roll((-1, -2), (1, 2))).softmax(1)
        x = x + merged(self.second(windows)).roll((1, 2), (1, 2))
        return (x * self.place).mean((1, 2))


def windows(precision: str = "fp32") -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    module = Windows().eval()
    spec = TensorSpec(name="image", dtype="float32", shape=(1, 3, 8, 8))
    graph = graph_of(module, spec, DimRange(min=1, opt=2, max=4))
    return module, plan(graph, (1, 2, 4), precision=precision)


@pytest.mark.parametrize(("precision", "off"), [("fp32", 1e-5), ("bf16", 3e-2)])
def test_a_plan_answers_like_the_network(precision: str, off: float) -> None:
    module, made = windows(precision)
    for bucket in made.program.buckets:
        assert Counter(s.op for s in bucket.steps)["rearrange"] == 4
    engine = runtime.load(from_bytes(to_bytes(made)))
    x = torch.randn(7, 3, 8, 8)
    torch.testing.assert_close(engine(image=x)["scores"], module(x), rtol=off, atol=off)


def test_one_self_test_speaks_for_all_batch_sizes() -> None:
    first, *others = windows()[1].program.buckets
    assert all(same_computation(first, other) for other in others)


@pytest.mark.parametrize("changes", [
    {"rolls": [[[1, 2], 6], [[3, 4], 6]]}, {"rolls": [[[3, 4], 7], [[1, 2], 6]]}, {"rolls": []},
    {"dims": [0, 3, 1, 2, 4, 5]}, {"dims": [0, 1, 3, 4, 2, 5]}, {"sizes": [2, 4, 2, 2, 4, 6]},
    {"sizes": [2, 2, 4, 4, 2, 6]}, {"sizes": "2"}, {"sizes": [2, 2, 4, 8, 6]},
    {"shape": [4, 32, 6]}, {"shape": None},
], ids=str)  # fmt: skip
def test_another_rearrangement_at_another_batch_size_is_refused(changes: dict[str, object]) -> None:
    made = windows()[1]
    buckets = list(made.program.buckets)
    bucket = buckets[1]
    assert bucket.batch == 2
    place = next(i for i, s in enumerate(bucket.steps) if s.op == "rearrange" and s.attrs["rolls"])
    steps = list(bucket.steps)
    steps[place] = replace(steps[place], attrs={**steps[place].attrs, **changes})
    buckets[1] = replace(bucket, steps=tuple(steps))
    other = replace(made, program=replace(made.program, buckets=tuple(buckets)))
    with pytest.raises(ArtifactError):
        runtime.load(from_bytes(to_bytes(other)), every_size=True)


# --- networks -------------------------------------------------------------------------------------


def count(module: nn.Module, size: int = 224) -> tuple[Graph, Graph]:
    """The graph of a plan in fp16 for a GPU, without the pass and with it."""
    return without_and_with(captured(module, size))


def captured(module: nn.Module, size: int = 224) -> Graph:
    spec = TensorSpec(name="image", dtype="float32", shape=(1, 3, size, size))
    return graph_of(module.eval(), spec, DimRange(min=1, opt=8, max=128))


def without_and_with(graph: Graph) -> tuple[Graph, Graph]:
    graph = optimized(graph)
    request = request_for(graph, assign(graph, "fp16", {}, "sm_90", None))
    made = run(graph, request, after="lower", until="fuse")
    without = run(graph, request, after="lower", until="narrow")
    for step in of_stage("fuse"):
        if step.name != "fuse_rearrangements":
            step.apply(without, **step.given(request))
    check(made)
    return without, made


@pytest.fixture(scope="module")
def swin() -> tuple[nn.Module, Graph]:
    """Swin-T with two layers a stage, of a quarter of the channels; capturing it takes longest."""
    torch.manual_seed(0)
    module = models.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=24,
        depths=[2, 2, 2, 2],
        num_heads=[3, 6, 12, 24],
        window_size=[7, 7],
    ).eval()
    return module, captured(module)


def test_swin(swin: tuple[nn.Module, Graph]) -> None:
    without, made = without_and_with(swin[1])
    assert (len(without.nodes), len(made.nodes)) == (237, 153)
    found = Counter(ops(made))
    assert found["rearrange"] == 15  # 6 layers have several windows; 3 times pixels are merged
    assert not {"cat", "slice"} & set(found)


def test_shufflenet_and_vit() -> None:
    without, made = count(models.shufflenet_v2_x0_5(weights=None), 64)
    assert (len(without.nodes), len(made.nodes)) == (137, 105)
    assert Counter(ops(made))["rearrange"] == 16
    vit = models.VisionTransformer(
        image_size=224, patch_size=16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128
    )
    without, made = count(vit)
    assert ops(without) == ops(made)  # attention's rows are views on both sides


def test_swin_on_a_cpu_agrees_with_eager(swin: tuple[nn.Module, Graph]) -> None:
    module, graph = swin
    made = plan(graph.copy(), (1, 1, 1))
    assert Counter(s.op for s in made.program.buckets[0].steps)["rearrange"] == 15
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        right = copy.deepcopy(module).double()(x.double())
    answer = runtime.load(made)(image=x)["scores"]
    assert (answer.double() - right).abs().max() <= 1e-5 * right.abs().max()
