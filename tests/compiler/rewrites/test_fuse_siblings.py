"""Siblings fused into one layer: the same answers, and only where a whole program gets faster."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella import runtime
from tessella.artifacts.plan import Plan, to_bytes
from tessella.compiler import calibrate, explain
from tessella.compiler.calibration import Calibration
from tessella.compiler.choices import choose_kernels, race, variants
from tessella.compiler.passes import request_for, run
from tessella.compiler.pipeline import optimized
from tessella.compiler.precision import assign
from tessella.compiler.rewrites import assign_layout, dead_code, fuse_siblings
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture, check, interpret
from tessella.graph.graph import Graph
from tessella.kernels import catalog
from tessella.kernels.transform import views
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tests.support.choices import problem_of
from tests.support.networks import plan

BATCH = DimRange(min=1, opt=2, max=3)
IMAGE = TensorSpec(name="image", dtype="float32", shape=(BATCH, 3, 6, 6))
WINDOWS = TensorSpec(name="windows", dtype="float32", shape=(BATCH, 2, 5, 8))
TOKENS = TensorSpec(name="tokens", dtype="float32", shape=(BATCH, 5, 8))

Forward = Callable[["Net", torch.Tensor], object]


class Net(nn.Module):
    """Layers for the tests, and a forward that a test gives."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 2, 1, bias=False)
        self.c, self.wide = nn.Conv2d(3, 5, 1), nn.Conv2d(3, 4, 3, padding=1)
        self.fast, self.grouped = nn.Conv2d(3, 4, 1, stride=2), nn.Conv2d(3, 3, 1, groups=3)
        self.after = nn.Conv2d(2, 3, 3, padding=1)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> object:
        return self._forward(self, x)


def branches(m: Net, x: torch.Tensor) -> torch.Tensor:
    """An inception block: a branch goes into the sum of all, one through a layer, one a pool."""
    a, b, c = F.relu(m.a(x)), m.after(F.relu(m.b(x))), F.max_pool2d(F.relu(m.c(x)), 3, 1, 1)
    return torch.cat([a, b, c], 1)


def attention(m: Net, x: torch.Tensor) -> torch.Tensor:
    def heads(y: torch.Tensor) -> torch.Tensor:
        return y.reshape(x.shape[0], 5, 2, 4).permute(0, 2, 1, 3)

    return F.scaled_dot_product_attention(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)))


def joined(m: Net, x: torch.Tensor) -> torch.Tensor:
    """RF-DETR's: attention over the tokens of all windows of a picture."""

    def heads(y: torch.Tensor) -> torch.Tensor:
        return y.reshape(x.shape[0], 10, 2, 4).permute(0, 2, 1, 3)

    return F.scaled_dot_product_attention(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)))


CASES: dict[str, tuple[Forward, TensorSpec, int]] = {  # what runs, on what, layers that go
    "two": (lambda m, x: torch.cat([m.a(x), m.c(x)], 1), IMAGE, 1),
    "three, one without a bias": (lambda m, x: torch.cat([m.a(x), m.b(x), m.c(x)], 1), IMAGE, 2),
    "inception": (branches, IMAGE, 2),
    "linear": (lambda m, x: m.q(x) * torch.exp(m.k(x)), TOKENS, 1),
    "attention": (attention, TOKENS, 2),
    "attention of all windows": (joined, WINDOWS, 2),
    "an output of the graph": (lambda m, x: (m.a(x), m.c(x).exp()), IMAGE, 1),
    "all outputs": (lambda m, x: (m.a(x), m.c(x)), IMAGE, 1),
    "the same layer twice": (lambda m, x: m.a(x) * torch.exp(m.a(x)), IMAGE, 1),
    # these stay apart
    "another activation": (lambda m, x: torch.cat([F.relu(m.a(x)), m.c(x).tanh()], 1), IMAGE, 0),
    "another kernel": (lambda m, x: m.a(x).exp() + m.wide(x).exp(), IMAGE, 0),
    "another stride": (lambda m, x: m.a(x).mean((2, 3)) * m.fast(x).mean((2, 3)), IMAGE, 0),
    "another input": (lambda m, x: torch.cat([m.a(x), m.c(x.exp())], 1), IMAGE, 0),
    "groups": (lambda m, x: torch.cat([m.grouped(x), m.grouped(x).exp()], 1), IMAGE, 0),
    "a residual": (
        lambda m, x: torch.cat([m.a(x) + torch.cat([x, x[:, :1]], 1), m.c(x)], 1), IMAGE, 0,
    ),
    "a weight that another reads": (
        lambda m, x: torch.cat([m.a(x), m.c(x), m.a(x.exp()), m.c(x.exp())], 1), IMAGE, 0,
    ),
}  # fmt: skip


@functools.cache
def captured(name: str) -> tuple[Net, Graph]:
    """A case's network; the compiler does not change its graph."""
    forward, spec, _ = CASES[name]
    module = Net(forward).eval()
    return module, capture(module, (spec,))


def answers(graph: Graph, count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    shape = [int(d) for d in graph.inputs[0].shape[1:]]
    x = torch.randn(count, *shape, generator=generator)
    return interpret(graph, {graph.inputs[0].name: x}, upcast=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_the_graph_means_the_same(name: str) -> None:
    gone = CASES[name][2]
    graph = optimized(captured(name)[1])
    layers = sum(n.op in ("conv2d", "linear") for n in graph.nodes)
    before = [answers(graph, count) for count in (1, 3)]
    assert fuse_siblings.apply(graph) == gone
    dead_code.apply(graph)
    check(graph)
    ops = [n.op for n in graph.nodes]
    assert sum(op in ("conv2d", "linear") for op in ops) == layers - gone
    assert ops.count("split") == (gone > 0)
    for right, count in zip(before, (1, 3), strict=True):
        made = answers(graph, count)
        assert list(made) == list(right)
        for output, tensor in right.items():
            torch.testing.assert_close(made[output], tensor, rtol=1e-12, atol=1e-12)


def test_programs_that_are_raced_give_one_name_to_one_weight() -> None:
    """Their constants lie side by side: the first of all siblings may be first of some, too."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        last = m.after(F.relu(m.b(x)))
        return torch.cat([last, F.relu(m.a(x)), F.max_pool2d(F.relu(m.c(x)), 3, 1, 1)], 1)

    graph = optimized(capture(Net(forward).eval(), (IMAGE,)))
    both = variants.with_siblings(graph, "cpu")
    assert [gone for _, gone in both] == [2, 1]
    all_of_them, some = ({v.name: t for v, t in g.constants.items()} for g, _ in both)
    for name in all_of_them.keys() & some.keys():
        torch.testing.assert_close(all_of_them[name], some[name])


def compiled(
    name: str, monkeypatch: pytest.MonkeyPatch, apart: float, fused: float, **settings: object
) -> tuple[Net, Plan]:
    """A case's plan where the programs' times are as given."""
    monkeypatch.setattr(
        race, "times_us", lambda programs, tuner: [apart, fused, *[apart] * (len(programs) - 2)]
    )
    module, graph = captured(name)
    return module, plan(graph, (1, 2, 3), **settings)


def split_steps(made: Plan) -> list[str]:
    return [s.kernel for b in made.program.buckets for s in b.steps if s.op == "split"]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name, (_, spec, gone) in CASES.items()
        for layout in ("contiguous", "channels_last")
        if gone and (spec is IMAGE or layout == "contiguous")
    ],
)
def test_a_fused_plan_agrees_with_float64(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = assign_layout.apply
    monkeypatch.setattr(assign_layout, "apply", lambda graph, _: apply(graph, layout))
    module, made = compiled(name, monkeypatch, apart=2.0, fused=1.0)
    assert split_steps(made) == ["split.view"] * len(made.program.buckets)
    engine = runtime.load(made)
    for count in (1, 2, 3, 5):
        (spec,) = made.manifest.inputs
        x = torch.randn(count, *spec.shape[1:], generator=torch.Generator().manual_seed(count))
        found = list(engine(x).values())
        with torch.no_grad():
            right = module.double()(x.double())
        module.float()
        right = [right] if isinstance(right, torch.Tensor) else list(right)
        for tensor, wanted in zip(found, right, strict=True):
            torch.testing.assert_close(tensor.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("fused", "wins"), [(50.0, True), (99.5, False), (200.0, False)])
def test_the_faster_program_is_the_plan(
    fused: float, wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = compiled("two", monkeypatch, apart=100.0, fused=fused)
    assert bool(split_steps(made)) is wins
    # only the weights of the program that was taken are in the plan
    assert sum(t.numel() for t in made.weights.values()) == 4 * 3 + 4 + 5 * 3 + 5


@pytest.mark.parametrize("name", ["attention", "attention of all windows"])
def test_attention_reads_parts_of_rows_where_they_lie(name: str) -> None:
    graph = optimized(captured(name)[1])
    fuse_siblings.apply(graph)
    formats = assign_layout.apply(graph, "contiguous")
    (attend,) = (n for n in graph.nodes if n.op == "scaled_dot_product_attention")
    makers = [graph.producer(v) for v in attend.inputs if v is not None]
    assert [n.op for n in makers if n is not None] == ["permute"] * 3
    assert {formats[n["input"].name] for n in makers if n is not None} == {"strided"}


def test_bf16_is_fused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made = compiled("inception", monkeypatch, apart=2.0, fused=1.0, precision="bf16")
    assert split_steps(made)


def test_the_race_is_run_and_its_times_are_kept(tmp_path: Path) -> None:
    graph = captured("inception")[1]
    cache = tmp_path / "timings.jsonl"
    first = to_bytes(plan(graph, cache=cache))
    lines = cache.read_text()
    assert lines.count('"program.0"') == lines.count('"program.1"') == 1
    assert to_bytes(plan(graph, cache=cache)) == first
    assert cache.read_text() == lines


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_explain_shows_what_is_raced(target: str) -> None:
    graph = captured("inception")[1]
    shown = [r for r in explain(graph, target=target) if r.name == "fuse_siblings"]
    assert [(r.rewrites, r.nodes_before - r.nodes_after) for r in shown] == [(2, 1), (1, 0)]
    assert all("split" in r.diff for r in shown)
    names = [r.name for r in explain(captured("another stride")[1], target=target)]
    assert "fuse_siblings" not in names
    assert "fuse_siblings" not in [r.name for r in explain(graph, target="reference")]


def test_readers_of_channels_get_no_copy_of_their_part() -> None:
    graph = optimized(captured("inception")[1])
    fuse_siblings.apply(graph)
    dead_code.apply(graph)
    nodes = len(graph.nodes)
    formats = assign_layout.apply(graph, "channels_last")
    assert len(graph.nodes) == nodes + 1  # the image itself
    split = next(n for n in graph.nodes if n.op == "split")
    concrete = graph.at_batch(2)
    places = choose_kernels.views(concrete, formats, "sm_90")
    # 4, 2 and 5 channels of float32: the third begins at 24 bytes, which no GPU reads as a tile
    assert [places[v.name].start if v.name in places else None for v in split.outputs] == [
        0, 4, None
    ]  # fmt: skip


class Heads(nn.Module):
    """Attention whose queries, keys and values are quantized layers, one of them without a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 64)
        self.k.weight.data *= 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.reshape(x.shape[0], 5, 4, -1).permute(0, 2, 1, 3)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        return F.scaled_dot_product_attention(q, k, v)


class Branches(nn.Module):
    """A quantized inception block, each of whose branches has a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Conv2d(32, width, 1) for width in (16, 32, 16))
        self.b.weight.data *= 5
        self.after = nn.ModuleList(nn.Conv2d(width, 16, 3, padding=1) for width in (16, 32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = [layer(x).relu() for layer in (self.a, self.b, self.c)]
        made = [after(y) for after, y in zip(self.after, branches, strict=True)]
        return torch.cat(made, 1)


ON_CODES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "attention": (Heads, (5, 32)), "inception": (Branches, (32, 6, 6)),
}  # fmt: skip


@functools.cache
def calibrated(name: str) -> tuple[Graph, Calibration]:
    make, shape = ON_CODES[name]
    spec = TensorSpec(name="x", dtype="float32", shape=(BATCH, *shape))
    graph = capture(make().eval(), (spec,), outputs=("scores",))
    data = torch.randn(16, *shape, generator=torch.Generator().manual_seed(1))
    return graph, calibrate(graph, [{"x": data}], kinds=("int8", "fp8"))


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("name", ON_CODES)
def test_layers_on_codes_are_siblings_too(name: str, kind: str, target: str) -> None:
    graph, calibration = calibrated(name)
    exact = optimized(graph)
    assignment = assign(exact, kind, {}, target, calibration)
    request = request_for(exact, assignment, calibration)
    apart = run(exact, request, after="optimize", until="fuse")
    (fused, gone), *_ = variants.with_siblings(apart, target)
    layers = [n for n in fused.nodes if n.op in ("conv2d", "linear")]
    assert gone == 2
    assert all(len(n.inputs) == 5 and n.inputs[4].shape == n.inputs[1].shape[:1] for n in layers)
    x = torch.randn(3, *ON_CODES[name][1], generator=torch.Generator().manual_seed(4))
    right, got = (interpret(g, {"x": x}, upcast=torch.float64)["scores"] for g in (apart, fused))
    torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
    laid_out, formats = variants.with_layout(fused, "channels_last")
    concrete = laid_out.at_batch(3)
    places = choose_kernels.views(concrete, formats, "sm_90")
    hopper = {
        "conv2d": "conv2d.implicit_gemm.sm90", "linear": "linear.wgmma.sm90",
        "scaled_dot_product_attention": "scaled_dot_product_attention.flash.sm90",
    }  # fmt: skip
    for node in concrete.nodes if target == "sm_90" else ():
        if node.op in hopper:  # slices among what they read
            problem = problem_of(concrete, node, formats, places)
            assert catalog.kernel(hopper[node.op]).refusal(problem) is None, node


@pytest.mark.parametrize("name", ON_CODES)
def test_a_fused_plan_of_codes_gives_the_same_answers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, calibration = calibrated(name)
    x = torch.randn(3, *ON_CODES[name][1], generator=torch.Generator().manual_seed(4))
    found = []
    for fused in (1.0, 3.0):
        monkeypatch.setattr(
            race, "times_us",
            lambda programs, tuner, fused=fused: [2.0, *[fused] * (len(programs) - 1)],
        )  # fmt: skip
        made = plan(graph, (1, 2, 3), precision="int8", calibration=calibration)
        assert bool(split_steps(made)) == (fused < 2.0)
        found.append(runtime.load(made)(x=x)["scores"])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_the_reference_keeps_the_network_as_it_is() -> None:
    assert not split_steps(plan(captured("inception")[1], target="reference"))


def test_a_view_is_not_called_dense() -> None:
    meta = TensorMeta(shape=(2, 4, 6, 6), dtype="float32")
    part = TensorMeta(shape=(2, 2, 6, 6), dtype="float32")
    attrs = {"sizes": (2, 2), "dim": 1}
    asked = Problem(op="split", inputs=(meta,), outputs=(part, part), attrs=attrs)
    assert views.fits(asked) == "makes a view, cannot make contiguous"
