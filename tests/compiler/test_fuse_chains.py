"""Two 1×1 convolutions as one step: the same answers, and only where the program gets faster."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tessella import compiler, runtime
from tessella.artifacts.plan import Plan
from tessella.compiler import race
from tessella.compiler.passes import assign_layout, choose_kernels, fuse_chains
from tessella.compiler.passes.choose_kernels import Choice, Tuner
from tessella.compiler.pipeline import optimized
from tessella.core.errors import CompileError
from tessella.core.events import silent
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import Graph, capture
from tessella.graph.check import check
from tessella.graph.interpret import interpret
from tessella.kernels import catalog, reference
from tessella.kernels.catalog import Call, Kernel
from tessella.kernels.problem import Problem
from tessella.kernels.tuning import TimingCache, Trial
from tests.compiler.networks import ABOUT

BATCH = DimRange(min=1, opt=2, max=2)
IMAGE = TensorSpec(name="image", dtype="float32", shape=(BATCH, 8, 6, 6))
ROW = Kernel(
    id="conv2d_chain.scratch", op="conv2d_chain", module=__name__, targets=("cpu",), source="aten"
)

# ------------------------------------------------------------------ a kernel for the CPU

WRITES_OUT = False


def fits(problem: Problem) -> str | None:
    return None if problem.inputs[0].dtype == "float32" else "float32 only"


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    def run(*inputs: torch.Tensor) -> Any:
        made = reference.call(problem.op, problem.operands(constants, inputs), problem.attrs)
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


@functools.cache
def graph_of(name: str) -> Graph:
    """A case's network; the compiler does not change its graph."""
    return capture(Net(CASES[name][0]).eval(), (IMAGE,))


def tuner_of(graph: Graph, **changes: Any) -> Tuner:
    constants = {v.name: t for v, t in graph.constants.items()}
    return Tuner(
        target="cpu", math="ieee", constants=constants, cache=TimingCache(), budget_s=0.0, **changes
    )


def chosen(name: str) -> tuple[Graph, list[Choice], Tuner]:
    """A case at batch 2, without kernels: only its problems."""
    graph = optimized(graph_of(name))
    formats = assign_layout.apply(graph, "channels_last")
    tuner, concrete = tuner_of(graph), graph.at_batch(2)
    choices = [
        Choice(
            node=node,
            problem=choose_kernels.problem_of(concrete, node, formats, "ieee", {}),
            trials=(Trial(kernel="reference", time_us=1.0),),
        )
        for node in concrete.nodes
    ]
    return concrete, choices, tuner


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel for chains on the CPU, which wins wherever it is asked."""
    catalog.register(ROW)
    trial = Trial(kernel=ROW.id, time_us=0.0)
    monkeypatch.setattr(fuse_chains, "trials", lambda *_, **__: (trial,))
    yield
    catalog.unregister(ROW.id)


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


def test_a_step_goes_into_one_chain(scratch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four convolutions in a row the pairs that save most: not the one between two pairs."""
    monkeypatch.setattr(race, "times_us", lambda programs, tuner: [2.0, 1.0])
    graph, choices, tuner = chosen("two chains of three")
    assert len(list(fuse_chains.pairs(graph, choices))) == 3
    slow = (Trial(kernel="reference", time_us=9.0),)
    names = [c.node.output.name for c in choices if c.node.op == "conv2d"][1:3]
    choices = [replace(c, trials=slow) if c.node.output.name in names else c for c in choices]
    fused = fuse_chains.apply(graph, choices, tuner, silent)
    assert [c.node.op for c in fused][-3:] == ["conv2d", "conv2d_chain", "conv2d"]


def test_says_why_two_steps_are_no_chain() -> None:
    _, choices, _ = chosen("nobody else reads")
    first, second = (c for c in choices if c.node.op == "conv2d")
    assert fuse_chains.refusal(first, second, set()) is None
    assert "no convolution of" in str(fuse_chains.refusal(second, first, set()))
    held = {second.node.output.name}
    assert "holds one" in str(fuse_chains.refusal(first, second, held))
    computed = replace(second, problem=replace(second.problem, constant=()))
    assert "computed" in str(fuse_chains.refusal(first, computed, set()))


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
    assert fuse_chains.kernels(gpu) == [row]
    waiting = replace(row, unproven=True)
    monkeypatch.setattr(catalog, "candidates", lambda op, target: (waiting,))
    assert fuse_chains.kernels(gpu) == []


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


def planned(name: str) -> Plan:
    return compiler.compile_graph(
        graph_of(name), target="cpu", batch=BATCH, about=ABOUT,
        measuring=compiler.Measuring(budget_s=0.0),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["bottlenecks", "nobody else reads"])
def test_a_plan_with_chains_agrees_with_float64(
    name: str, scratch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "times_us", lambda programs, *_, **__: [2.0, 1.0][: len(programs)])
    made = planned(name)
    steps = made.program.buckets[-1].steps
    assert sum(s.op == "conv2d_chain" for s in steps) == CASES[name][1]
    engine = runtime.load(made)
    module = Net(CASES[name][0]).eval()
    for count in (1, 2, 3):
        x = torch.randn(count, 8, 6, 6)
        found = list(engine(x).values())
        right = module.double()(x.double())
        right = [right] if isinstance(right, torch.Tensor) else list(right)
        for tensor, wanted in zip(found, right, strict=True):
            torch.testing.assert_close(tensor.double(), wanted.detach(), rtol=1e-4, atol=1e-5)
