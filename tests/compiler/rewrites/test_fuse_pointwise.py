"""Element-wise operations fused into programs: the same network, in fewer passes over memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401  registers quantized_decomposed
from torchvision import models

from tessella import runtime
from tessella.artifacts.plan import Plan
from tessella.compiler.explanation import explain
from tessella.compiler.pipeline import optimized
from tessella.compiler.rewrites import dead_code, fuse_pointwise, lower_precision
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture, check, interpret
from tessella.graph.graph import Dim, Graph, Node, Value
from tessella.kernels.pointwise.walk import MAX_OPERANDS
from tests.support.networks import plan

quantized = torch.ops.quantized_decomposed

BATCH = DimRange(min=1, opt=2, max=3)
IMAGE = TensorSpec(name="image", dtype="float32", shape=(BATCH, 6, 5, 5))
TOKENS = TensorSpec(name="tokens", dtype="float32", shape=(BATCH, 5, 8))

Forward = Callable[["Net", torch.Tensor], object]


class Net(nn.Module):
    """Layers for the tests, and a forward that a test gives."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)
        self.linear, self.rows = nn.Linear(8, 8), nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.rand(6, 1, 1))
        self.places = nn.Parameter(torch.rand(1, 5, 8))
        self.register_buffer("third", torch.tensor(1 / 3))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> object:
        return self._forward(self, x)


def by_hand(m: Net, x: torch.Tensor) -> torch.Tensor:
    """A norm that is no layer norm: its ε is behind the root."""
    x = x - x.mean(-1, keepdim=True)
    return x / ((x**2).mean(-1, keepdim=True).sqrt() + 1e-5) * m.rows.weight + m.rows.bias


def gate(m: Net, x: torch.Tensor) -> torch.Tensor:
    g = torch.sigmoid(F.adaptive_avg_pool2d(x, 1)) * 2
    return F.hardswish(x * g)


# what runs, on what, operations → operations
CASES: dict[str, tuple[Forward, TensorSpec, int, int]] = {
    "a chain": (lambda m, x: (x.exp() + 1).log().tanh(), IMAGE, 4, 1),
    "norm and activation": (lambda m, x: F.relu(m.norm(x)), IMAGE, 2, 1),
    "a diamond": (lambda m, x: F.relu(x) * torch.sigmoid(F.relu(x)), IMAGE, 4, 1),
    "a scale": (lambda m, x: x + m.scale * F.silu(m.conv(x)).permute(0, 1, 3, 2), IMAGE, 4, 3),
    "a number in a buffer": (lambda m, x: torch.sqrt(x.abs() * m.third), IMAGE, 3, 1),
    "a gate": (gate, IMAGE, 5, 2),
    "positions and norm": (lambda m, x: m.rows(x + m.places), TOKENS, 2, 1),
    "norm and activation of rows": (lambda m, x: F.silu(m.rows(x)), TOKENS, 2, 1),
    "scaled softmax": (lambda m, x: torch.softmax(x * 0.25, -1).sqrt(), TOKENS, 3, 1),
    "a norm by hand": (by_hand, TOKENS, 9, 1),
    "norm and activation before a pool": (
        lambda m, x: F.avg_pool2d(F.relu(m.norm(x)), 2),
        IMAGE,
        3,
        1,
    ),
    "norm and activation after a pool": (
        lambda m, x: F.relu(m.norm(F.max_pool2d(x, 3, 2, 1))),
        IMAGE,
        3,
        1,
    ),
    "around the last pool": (
        lambda m, x: F.adaptive_avg_pool2d(F.silu(x), 1) * 2 + 1,
        IMAGE,
        4,
        1,
    ),
    "two norms": (lambda m, x: m.rows(m.rows(x).exp()), TOKENS, 3, 1),
    # with two results
    "an output in the middle": (lambda m, x: (y := x.exp(), y.neg().tanh()), IMAGE, 3, 1),
    "two readers": (lambda m, x: torch.cat([(y := x.exp()).neg(), y.tanh()], 1), IMAGE, 4, 3),
    "a sum, its norm and more": (
        lambda m, x: m.linear(m.rows(y := x + m.places)).exp() * y,
        TOKENS,
        5,
        3,
    ),
    # these stay apart
    "softmax of channels": (lambda m, x: torch.softmax(x.exp(), 1).log(), IMAGE, 3, 3),
    "one operation": (lambda m, x: m.linear(x).transpose(1, 2).exp(), TOKENS, 3, 3),
    "activation before windows that overlap": (
        lambda m, x: F.max_pool2d(F.silu(x), 3, 1, 1),
        IMAGE,
        2,
        2,
    ),
    "a pool between pools": (lambda m, x: F.max_pool2d(F.avg_pool2d(x, 2), 2), IMAGE, 2, 2),
    "an odd power": (lambda m, x: (x.exp() ** 2.5).neg(), IMAGE, 3, 3),
}


def graph_of(case: str) -> Graph:
    forward, spec, _, _ = CASES[case]
    return optimized(capture(Net(forward).eval(), (spec,)))


def answers(graph: Graph, batch: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = {
        v.name: torch.randn([int(d) for d in v.shape], generator=generator)
        for v in graph.at_batch(batch).inputs
    }
    made = interpret(graph, inputs, upcast=torch.float64)
    return [made[v.name] for v in graph.outputs]


def fused(graph: Graph) -> Graph:
    """A fused copy, which is checked to be a graph with the same answers under the same names."""
    made = graph.copy()
    count = fuse_pointwise.apply(made)
    check(made)
    assert count == len(graph.nodes) - len(made.nodes)
    assert [v.name for v in made.outputs] == [v.name for v in graph.outputs]
    for batch in (1, 3):
        for one, other in zip(answers(graph, batch), answers(made, batch), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    return made


@pytest.mark.parametrize("case", CASES)
def test_what_is_fused(case: str) -> None:
    *_, before, after = CASES[case]
    graph = graph_of(case)
    assert len(graph.nodes) == before
    assert len(fused(graph).nodes) == after


@pytest.mark.parametrize("case", [c for c in CASES if CASES[c][1] is TOKENS])
def test_in_sixteen_bits(case: str) -> None:
    """The casts at the edges are part of the programs."""
    graph = graph_of(case)
    lower_precision.apply(graph, "float16")
    dead_code.apply(graph)
    assert len(fused(graph).nodes) <= CASES[case][3] + 1


# how to make it, operations that go: batch norms and activations, biased softmaxes
SMALL: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "densenet": (
        lambda: models.DenseNet(8, (2, 2), num_init_features=8, num_classes=5), 8,
    ),
    "swin": (
        lambda: models.SwinTransformer([4, 4], 16, [2, 1], [2, 2], [4, 4], num_classes=5), 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_networks_stay_what_they_are(name: str) -> None:
    make, gone = SMALL[name]
    torch.manual_seed(0)
    spec = TensorSpec(name="image", dtype="float32", shape=(BATCH, 3, 32, 32))
    graph = optimized(capture(make().eval(), (spec,)))
    assert len(graph.nodes) - len(fused(graph).nodes) == gone


def test_quantized_values_between_layers_are_fused() -> None:
    """Where a file rounds, steps between its layers read and write quantized values."""

    def near(x: torch.Tensor, scale: float) -> torch.Tensor:
        code = scale, 0, -128, 127, torch.int8
        return quantized.dequantize_per_tensor(quantized.quantize_per_tensor(x, *code), *code)

    def rounded(m: Net, x: torch.Tensor) -> torch.Tensor:
        return near(F.avg_pool2d(near(F.max_pool2d(F.silu(x), 2), 0.1), 2), 0.2).exp()

    graph = optimized(capture(Net(rounded).eval(), (IMAGE,)))
    assert [n.op for n in graph.nodes].count("quantize") == 2
    made = graph.copy()
    assert fuse_pointwise.apply(made, "cpu") == 0
    assert [[i[0] for i in n.attrs["program"]] for n in fused(graph).nodes] == [
        ["silu", "max_pool2d", "quantize"],
        ["dequantize", "avg_pool2d", "quantize", "dequantize", "exp"],
    ]


def test_on_a_cpu_norms_stay_apart_and_steps_have_one_result() -> None:
    """torch's norms make their own memory; softmax does not."""
    graph = graph_of("positions and norm")
    assert fuse_pointwise.apply(graph, "cpu") == 0
    assert fuse_pointwise.apply(graph_of("scaled softmax"), "cpu") == 2
    assert fuse_pointwise.apply(graph_of("two readers"), "cpu") == 0


UNARY = ("relu", "exp", "neg", "sigmoid", "tanh", "abs")
BINARY = ("add", "mul", "maximum")
SHAPES = ((Dim(), 3, 4), (Dim(), 1, 4), (3, 4), (4,), (Dim(), 3, 1), (1, 1))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Operations on earlier values, of shapes that broadcast; some rows, some views between."""
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))
    full = Value("x", "float32", (Dim(), 3, 4))
    graph = Graph(name="random", inputs=[full])
    values = [full]
    for i, shape in enumerate(shapes):
        if Dim() not in shape:
            constant = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)  # type: ignore[arg-type]
            values.append(graph.add_constant(f"c{i}", constant))
        else:
            values.append(Value(f"i{i}", "float32", shape))
            graph.inputs.append(values[-1])
    for number in range(draw(st.integers(2, 12))):
        x = draw(st.sampled_from(values))
        kind = draw(st.sampled_from(("unary", "binary", "binary", "row", "permute")))
        _append(graph, values, number, kind, x, draw)
    made = [v for v in values if graph.producer(v) is not None]
    assume(made)
    ends = [v for v in made if not graph.users(v)]
    graph.outputs = draw(st.lists(st.sampled_from(made), max_size=1)) + ends
    graph.outputs = list(dict.fromkeys(graph.outputs))
    return graph


def _append(
    graph: Graph, values: list[Value], number: int, kind: str, x: Value, draw: st.DrawFn
) -> None:
    inputs: tuple[Value | None, ...] = (x,)
    shape, attrs = x.shape, {}
    if kind == "unary":
        op = draw(st.sampled_from(UNARY))
    elif kind == "binary":
        op, other = draw(st.sampled_from(BINARY)), draw(st.sampled_from(values))
        if x in graph.constants and other in graph.constants:
            return
        inputs, attrs = (x, other), {"scalar": None} | ({"alpha": 1} if op == "add" else {})
        shape = _broadcast(x.shape, other.shape)
    elif kind == "row" and x not in graph.constants:
        op = draw(st.sampled_from(("softmax", "mean")))
        attrs = {"dim": len(shape) - 1, "dtype": None}
        if op == "mean":
            attrs, shape = {"dim": (-1,), "keepdim": True, "dtype": None}, (*shape[:-1], 1)
    else:
        op = "permute"
        attrs = {"dims": tuple(range(len(shape)))}
    if all(v in graph.constants for v in inputs):
        return
    values.append(Value(f"v{number}", "float32", shape))
    graph.nodes.append(Node(op=op, inputs=inputs, outputs=(values[-1],), attrs=attrs))


def _broadcast(x: tuple[int | Dim, ...], y: tuple[int | Dim, ...]) -> tuple[int | Dim, ...]:
    axes = max(len(x), len(y))
    pairs = zip((1,) * (axes - len(x)) + x, (1,) * (axes - len(y)) + y, strict=True)
    return tuple(b if a == 1 else a for a, b in pairs)


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_random_graphs_stay_what_they_are(graph: Graph) -> None:
    check(graph)
    fused(graph)


def test_a_step_reads_no_more_tensors_than_the_kernel_takes() -> None:
    x = Value("x", "float32", (Dim(), 4))
    graph = Graph(name="sums", inputs=[x])
    for i in range(3 * MAX_OPERANDS):
        graph.inputs.append(Value(f"i{i}", "float32", (Dim(), 4)))
        x = Value(f"v{i}", "float32", (Dim(), 4))
        before = graph.nodes[-1].output if graph.nodes else graph.inputs[0]
        sum_of = {"scalar": None, "alpha": 1}
        graph.nodes.append(
            Node(op="add", inputs=(before, graph.inputs[-1]), outputs=(x,), attrs=sum_of)
        )
    graph.outputs = [x]
    made = fused(graph)
    assert all(len(n.inputs) <= MAX_OPERANDS for n in made.nodes)
    assert len(made.nodes) == -(-3 * MAX_OPERANDS // (MAX_OPERANDS - 1))


def test_it_is_shown() -> None:
    (record,) = (
        r for r in explain(captured_case("norm and activation")) if r.name == "fuse_pointwise"
    )
    assert record.rewrites == 1
    assert "pointwise: relu(batch_norm(%image, norm.running_mean[6]" in record.after


def captured_case(case: str) -> Graph:
    forward, spec, _, _ = CASES[case]
    return capture(Net(forward).eval(), (spec,), outputs=("scores",))


def dense(m: Net, x: torch.Tensor) -> torch.Tensor:
    """A dense block: what is concatenated is normalized before each convolution."""
    y = torch.cat([x, m.conv(F.relu(m.norm(x)))], 1)[:, 3:9]
    y = F.relu(m.norm(y)) * torch.sigmoid(y)
    return torch.softmax(y.mean((2, 3)) * 0.5, -1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plan_runs_programs(precision: str) -> None:
    """In convolutions' format, on views and in both buckets; every step is checked by a run."""
    module = Net(dense).eval()
    graph = capture(module, (IMAGE,), outputs=("scores",))
    made: Plan = plan(graph, (1, 2, 3), precision=precision)
    steps = [s for s in made.program.buckets[0].steps if s.op == "pointwise"]
    assert len(steps) >= 2
    x = torch.randn(3, 6, 5, 5)
    with torch.no_grad():
        right = module(x)
    scores = runtime.Engine(made)(image=x)["scores"]
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    torch.testing.assert_close(scores, right, rtol=0, atol=tolerance)
