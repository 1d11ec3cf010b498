"""Two steps in a row as one: the same answers, and only where the program gets faster."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tessella import compiler, runtime
from tessella.artifacts.plan import Plan, from_bytes, to_bytes
from tessella.artifacts.program import PAIRS
from tessella.compiler.choices import choose_kernels, fuse_chains, plan_memory, race
from tessella.compiler.choices.choose_kernels import Choice, Tuner
from tessella.compiler.choices.variants import layouts_to_try, with_layout
from tessella.compiler.passes import request_for, run
from tessella.compiler.pipeline import optimized
from tessella.compiler.precision import assign
from tessella.compiler.rewrites import assign_layout
from tessella.core.errors import ArtifactError, CompileError
from tessella.core.events import silent
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import Graph, capture
from tessella.graph.check import check
from tessella.graph.graph import Node
from tessella.graph.interpret import interpret
from tessella.kernels import catalog
from tessella.kernels.catalog import Call, Kernel
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.search.inputs import sample_inputs
from tessella.search.inspection import exact_answers
from tessella.search.tuning import Trial
from tests.support.choices import choices_of, tuner_of
from tests.support.networks import ABOUT
from tests.support.quantized import calibrated
from tests.support.quantized import graph_of as quantized_graph

CPU = torch.device("cpu")
BATCH = DimRange(min=1, opt=2, max=2)
IMAGE = TensorSpec(name="image", dtype="float32", shape=(BATCH, 8, 6, 6))
ROW, POOL_ROW = (
    Kernel(
        id=f"{op}.scratch",
        op=op,
        module=__name__,
        targets=("cpu",),
        source="aten",
        writes_out=False,
    )
    for op in ("conv2d_chain", "conv2d_pool")
)

# ------------------------------------------------------------------ a kernel for the CPU


def fits(problem: Problem) -> str | None:
    return None if problem.inputs[0].dtype == "float32" else "float32 only"


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    def run(*inputs: torch.Tensor) -> Any:
        made = operation(problem.op).call(problem.operands(constants, inputs), problem.attrs)
        formats = [torch.channels_last if m.format == "channels_last" else torch.contiguous_format
                   for m in problem.outputs]  # fmt: skip
        dense = [t.contiguous(memory_format=f) for t, f in zip(made, formats, strict=True)]
        return tuple(dense) if len(dense) > 1 else dense[0]

    return run


# ------------------------------------------------------------------ networks


class Bottleneck(nn.Module):
    def __init__(self, channels: int, wide: int) -> None:
        super().__init__()
        self.reduce, self.norm = nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.middle = nn.Conv2d(channels, channels, 3, padding=1)
        self.expand = nn.Conv2d(channels, wide, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.middle(torch.relu(self.norm(self.reduce(x)))))
        return torch.relu(self.expand(y) + x)


class Net(nn.Module):
    """Layers for the tests, and a forward that a test gives."""

    def __init__(self, forward: Callable[[Net, torch.Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Bottleneck(4, 8) for _ in range(3)))
        self.wide, self.narrow = nn.Conv2d(8, 12, 1), nn.Conv2d(12, 6, 1, bias=False)
        self.strided, self.square = nn.Conv2d(12, 6, 1, stride=2), nn.Conv2d(12, 6, 3, padding=1)
        self.back = nn.Conv2d(12, 8, 1)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> object:
        return self._forward(self, x)


Forward = Callable[[Net, torch.Tensor], object]
CASES: dict[str, tuple[Forward, int, str]] = {  # what runs, chains, whether what is between is kept
    "bottlenecks": (lambda m, x: m.blocks(x), 2, "kept"),
    "nobody else reads": (lambda m, x: m.narrow(torch.relu(m.wide(x))), 1, "dropped"),
    "an output of the graph": (lambda m, x: ((y := m.wide(x)), m.narrow(y)), 1, "kept"),
    "read twice": (
        lambda m, x: ((y := m.wide(x)), m.narrow(y) * m.strided(y).amax())[1],
        1,
        "kept",
    ),
    "two chains of three": (lambda m, x: m.narrow(m.wide(m.back(m.wide(x)))), 2, "dropped"),
    # these stay apart
    "a stride": (lambda m, x: m.strided(torch.relu(m.wide(x))), 0, ""),
    "3×3": (lambda m, x: m.square(torch.relu(m.wide(x))), 0, ""),
    "a residual of the second": (lambda m, x: m.back(m.wide(x)) + x, 0, ""),
    "something between": (lambda m, x: m.narrow(torch.exp(m.wide(x))), 0, ""),
}
POOLED: dict[str, tuple[Forward, int]] = {  # what runs, poolings that go into their convolutions
    "pooled": (lambda m, x: m.pool(torch.relu(m.wide(x))), 1),
    "pooled twice": (lambda m, x: m.pool(m.square(m.pool(torch.relu(m.wide(x))))), 2),
    "a residual before": (lambda m, x: m.pool(torch.relu(m.back(m.wide(x)) + x)), 1),
    "a chain beside": (lambda m, x: m.narrow(m.wide(m.back(m.pool(m.wide(x))))), 1),
    # these stay apart
    "others read it too": (lambda m, x: ((y := m.wide(x)), m.pool(y).sum() + m.narrow(y))[1], 0),
    "an output too": (lambda m, x: ((y := m.wide(x)), m.pool(y)), 0),
    "a pooling of the input": (lambda m, x: m.wide(m.pool(x)), 0),
    "steps between": (lambda m, x: m.pool(torch.exp(m.wide(x))), 0),
}


@functools.cache
def graph_of(name: str) -> Graph:
    """A case's network; the compiler does not change its graph."""
    return capture(Net({**CASES, **POOLED}[name][0]).eval(), (IMAGE,))


def chosen(name: str) -> tuple[Graph, list[Choice], Tuner]:
    """A case at batch 2, without kernels: only its problems."""
    graph = optimized(graph_of(name))
    formats = assign_layout.apply(graph, "channels_last")
    tuner, concrete = tuner_of(graph), graph.at_batch(2)
    return concrete, choices_of(concrete, formats), tuner


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels for chains on the CPU, which win wherever they are asked."""

    def trials(node: Node, *_: object, **__: object) -> tuple[Trial, ...]:
        return (Trial(kernel=f"{node.op}.scratch", time_us=0.0),)

    monkeypatch.setattr(fuse_chains, "trials", trials)
    for row in (ROW, POOL_ROW):
        catalog.register(row)
    yield
    for row in (ROW, POOL_ROW):
        catalog.unregister(row.id)


# ------------------------------------------------------------------ which, and what they mean


@pytest.mark.parametrize("name", CASES)
def test_the_program_means_the_same(
    name: str, scratch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "times_us", lambda programs, tuner: [2.0, 1.0])
    graph, choices, tuner = chosen(name)
    x = {"image": torch.randn(2, 8, 6, 6)}
    right = interpret(graph, x, upcast=torch.float64)
    fused = fuse_chains.apply(graph, choices, tuner, silent)
    chains = [c.node for c in fused if c.node.op == "conv2d_chain"]
    _, count, kept = CASES[name]
    assert len(chains) == count
    assert all(len(n.outputs) == 1 + (kept == "kept") for n in chains)
    graph.nodes = [c.node for c in fused]
    check(graph)
    made = interpret(graph, x, upcast=torch.float64)
    for output, tensor in right.items():
        torch.testing.assert_close(made[output], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", POOLED)
def test_poolings_go_into_their_convolutions(
    name: str, scratch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "times_us", lambda programs, tuner: [2.0, 1.0])
    graph, choices, tuner = chosen(name)
    x = {"image": torch.randn(2, 8, 6, 6)}
    right = interpret(graph, x, upcast=torch.float64)
    fused = fuse_chains.apply(graph, choices, tuner, silent)
    ops = [c.node.op for c in fused]
    assert ops.count("conv2d_pool") == POOLED[name][1]
    assert len(choices) - len(fused) == ops.count("conv2d_pool") + ops.count("conv2d_chain")
    assert all(c.node.layer for c in fused if c.node.op == "conv2d_pool")
    graph.nodes = [c.node for c in fused]
    check(graph)
    made = interpret(graph, x, upcast=torch.float64)
    for output, tensor in right.items():
        torch.testing.assert_close(made[output], tensor, rtol=1e-12, atol=1e-12)


def test_each_kind_of_chain_is_raced_by_itself(
    scratch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raced = iter([[2.0, 1.0], [1.0, 2.0]])  # of the first kind, then of the second
    monkeypatch.setattr(race, "times_us", lambda programs, tuner: next(raced))
    graph, choices, tuner = chosen("a chain beside")
    ops = [c.node.op for c in fuse_chains.apply(graph, choices, tuner, silent)]
    assert ("conv2d_chain" in ops, "conv2d_pool" in ops) == (True, False)


def test_a_step_goes_into_one_chain(scratch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four convolutions in a row the pairs that save most: not the one between two pairs."""
    monkeypatch.setattr(race, "times_us", lambda programs, tuner: [2.0, 1.0])
    graph, choices, tuner = chosen("two chains of three")
    assert len(list(fuse_chains.pairs(graph, choices, "conv2d_chain"))) == 3
    assert not list(fuse_chains.pairs(graph, choices, "conv2d_pool"))
    slow = (Trial(kernel="reference", time_us=9.0),)
    names = [c.node.output.name for c in choices if c.node.op == "conv2d"][1:3]
    choices = [replace(c, trials=slow) if c.node.output.name in names else c for c in choices]
    fused = fuse_chains.apply(graph, choices, tuner, silent)
    assert [c.node.op for c in fused][-3:] == ["conv2d", "conv2d_chain", "conv2d"]


def test_says_why_two_steps_are_no_chain() -> None:
    _, choices, _ = chosen("nobody else reads")
    first, second = (c for c in choices if c.node.op == "conv2d")
    assert fuse_chains.refusal(first, second, set(), False) is None
    assert "does not read" in str(fuse_chains.refusal(second, first, set(), False))
    was = second.node
    other = replace(second, node=Node("conv3d", was.inputs, was.outputs, was.attrs))
    assert "no such chain" in str(fuse_chains.refusal(first, other, set(), False))
    held = {second.node.output.name}
    assert "holds one" in str(fuse_chains.refusal(first, second, held, False))
    computed = replace(second, problem=replace(second.problem, constant=()))
    assert "computed" in str(fuse_chains.refusal(first, computed, set(), False))


def test_says_why_a_pooling_stays_a_step() -> None:
    _, choices, _ = chosen("pooled")
    first, second = (c for c in choices if c.node.op in ("conv2d", "max_pool2d"))
    assert fuse_chains.refusal(first, second, set(), False) is None
    assert "others read it" in str(fuse_chains.refusal(first, second, set(), True))
    held = {first.node.output.name}
    assert "holds one" in str(fuse_chains.refusal(first, second, held, False))


# ------------------------------------------------------------------ when


def test_nothing_is_asked_where_no_kernel_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_chains, "trials", None)
    monkeypatch.setattr(race, "times_us", None)
    graph, choices, tuner = chosen("bottlenecks")
    assert fuse_chains.apply(graph, choices, tuner, silent) == choices


def test_an_unproven_kernel_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, tuner = chosen("bottlenecks")
    gpu = replace(tuner, target="sm_90")
    row = catalog.kernel("conv2d_chain.back_to_back.sm90")
    assert fuse_chains.kernels("conv2d_chain", gpu) == [row]
    waiting = replace(row, unproven=True)
    monkeypatch.setattr(catalog, "candidates", lambda op, target: (waiting,))
    assert fuse_chains.kernels("conv2d_chain", gpu) == []


@pytest.mark.parametrize(("chained_us", "wins"), [(50.0, True), (99.9, False), (120.0, False)])
def test_the_faster_program_is_the_plan(
    chained_us: float, wins: bool, scratch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "times_us", lambda programs, tuner: [100.0, chained_us])
    graph, choices, tuner = chosen("bottlenecks")
    fused = fuse_chains.apply(graph, choices, tuner, silent)
    assert ("conv2d_chain" in [c.node.op for c in fused]) is wins


def test_a_chain_that_is_slower_than_its_steps_is_not_raced(
    scratch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Trial(kernel=ROW.id, time_us=2.5)
    monkeypatch.setattr(fuse_chains, "trials", lambda *_, **__: (slow,))
    monkeypatch.setattr(race, "times_us", None)
    graph, choices, tuner = chosen("bottlenecks")
    assert fuse_chains.apply(graph, choices, tuner, silent) == choices


def test_a_kernel_that_fails_leaves_two_steps(
    scratch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise CompileError("none runs")

    monkeypatch.setattr(fuse_chains, "trials", fails)
    graph, choices, tuner = chosen("bottlenecks")
    assert fuse_chains.apply(graph, choices, tuner, silent) == choices


# ------------------------------------------------------------------ a first layer on Hopper


class Stem(nn.Module):
    """A network's beginning: 64 channels from three, pooled, and a layer that may be quantized."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.BatchNorm2d(64)
        self.pool, self.then = pool, nn.Conv2d(64, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.pool(torch.relu(self.norm(self.first(x))))).mean((2, 3))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 2, ceil_mode=True)], ids=repr
)
def test_a_first_layer_and_its_pooling_are_one_step_on_hopper(
    pool: nn.Module, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = catalog.kernel("conv2d_pool.direct.sm90")
    won = Trial(kernel=row.id, time_us=0.0, config={"rows": 4})
    monkeypatch.setattr(fuse_chains, "kernels", lambda op, _: [row] if row.op == op else [])
    monkeypatch.setattr(fuse_chains, "trials", lambda *_, **__: (won,))
    monkeypatch.setattr(race, "times_us", lambda programs, tuner: [2.0, 1.0])
    exact = optimized(quantized_graph(Stem(pool).eval(), 3, 32, 32))
    found = calibrated(exact, 3, 32, 32) if precision == "int8" else None
    assignment = assign(exact, precision, {}, "sm_90", found)
    lowered = run(exact, request_for(exact, assignment, found), after="optimize", until="fuse")
    (layout,) = layouts_to_try(lowered, precision, "sm_90")
    lowered, formats = with_layout(lowered, layout)
    concrete, tuner = lowered.at_batch(2), tuner_of(lowered)
    choices = choices_of(concrete, formats)
    fused = fuse_chains.apply(concrete, choices, tuner, silent)
    (step,) = (c for c in fused if c.node.op == "conv2d_pool")
    assert len(fused) == len(choices) - 1
    assert step.kernel == row.id
    dtypes = {"fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
    assert step.problem.output.dtype == dtypes[precision]
    bucket = plan_memory.apply(concrete, fused, 2)
    (planned,) = (s for s in bucket.steps if s.op == "conv2d_pool")
    assert (planned.kernel, planned.config) == (row.id, {"rows": 4})
    x = {"x": torch.randn(2, 3, 32, 32)}
    right = interpret(concrete, x, upcast=torch.float64)
    concrete.nodes = [c.node for c in fused]
    check(concrete)
    made = interpret(concrete, x, upcast=torch.float64)
    assert all(torch.equal(made[name], right[name]) for name in right)
    constants = choose_kernels.constants_of(step.node, step.problem, tuner.constants)
    (answer,) = exact_answers(step.problem, constants, sample_inputs(step.problem, CPU))
    assert (answer.dtype, tuple(answer.shape)) == (torch.float64, step.problem.output.shape)
    assert answer.unique().numel() > 20


def planned(name: str) -> Plan:
    return compiler.compile_graph(
        graph_of(name), target="cpu", batch=BATCH, about=ABOUT,
        measuring=compiler.Measuring(budget_s=0.0),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["bottlenecks", "nobody else reads", "pooled", "a chain beside"])
def test_a_plan_with_chains_agrees_with_float64(
    name: str, scratch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "times_us", lambda programs, *_, **__: [2.0, 1.0][: len(programs)])
    made = planned(name)
    steps = made.program.buckets[-1].steps
    chains = sum(s.op in ("conv2d_chain", "conv2d_pool") for s in steps)
    assert chains == (CASES[name][1] if name in CASES else {"pooled": 1, "a chain beside": 2}[name])
    engine = runtime.load(made)
    module = Net({**CASES, **POOLED}[name][0]).eval()
    for count in (1, 2, 3):
        x = torch.randn(count, 8, 6, 6)
        found = list(engine(x).values())
        right = module.double()(x.double())
        right = [right] if isinstance(right, torch.Tensor) else list(right)
        for tensor, wanted in zip(found, right, strict=True):
            torch.testing.assert_close(tensor.double(), wanted.detach(), rtol=1e-4, atol=1e-5)


def _faster_at(batch: int) -> Callable[..., list[float]]:
    """Races in which chains win at one batch size."""

    def times_us(programs: race.Programs, *_: object, **__: object) -> list[float]:
        here = programs[0][0].inputs[0].shape[0]
        return [2.0, 1.0 if here == batch else 3.0][: len(programs)]

    return times_us


@pytest.mark.parametrize("name", ["bottlenecks", "two chains of three", "a chain beside"])
@pytest.mark.parametrize("chained_at", [1, 2])
def test_chains_at_one_batch_size_only(
    name: str, chained_at: int, scratch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan's sizes need not have the same steps: the file loads, and every size is tested."""

    monkeypatch.setattr(race, "times_us", _faster_at(chained_at))
    plan = from_bytes(to_bytes(planned(name)))
    chained = {b.batch: any(s.op in PAIRS for s in b.steps) for b in plan.program.buckets}
    assert chained == {1: chained_at == 1, 2: chained_at == 2}
    engine = runtime.load(plan)
    module = Net({**CASES, **POOLED}[name][0]).eval().double()
    for count in (1, 2, 3):
        x = torch.randn(count, 8, 6, 6)
        (made,) = engine(x).values()
        torch.testing.assert_close(made.double(), module(x.double()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chained_at", [1, 2])
def test_a_pair_that_computes_something_else_is_refused(
    chained_at: int, scratch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "times_us", _faster_at(chained_at))
    plan = planned("nobody else reads")
    index = chained_at - 1
    bucket = plan.program.buckets[index]
    steps = tuple(
        replace(s, attrs={**s.attrs, "activation": None}) if s.op in PAIRS else s
        for s in bucket.steps
    )
    assert steps != bucket.steps
    buckets = list(plan.program.buckets)
    buckets[index] = replace(bucket, steps=steps)
    other = replace(plan, program=replace(plan.program, buckets=tuple(buckets)))
    with pytest.raises(ArtifactError, match="fails its self-test"):
        runtime.load(from_bytes(to_bytes(other)))


def test_what_a_plan_may_have_in_pairs() -> None:
    assert set(fuse_chains.OPS) == PAIRS
