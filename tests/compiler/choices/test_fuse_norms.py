"""A linear and the norm of its rows as one step: blocks that norm last or first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tessella import runtime
from tessella.compiler.choices import choose_kernels, fuse_chains, plan_memory, race
from tessella.compiler.choices.choose_kernels import Choice
from tessella.compiler.passes import request_for, run
from tessella.compiler.pipeline import optimized
from tessella.compiler.precision import assign
from tessella.core.events import silent
from tessella.graph import Graph
from tessella.graph.check import check
from tessella.graph.interpret import interpret
from tessella.kernels import catalog
from tessella.kernels.catalog import Call, Kernel
from tessella.operations.problem import Problem
from tessella.search.inputs import sample_inputs
from tessella.search.inspection import exact_answers
from tessella.search.tuning import Trial
from tests.support.choices import choices_of, tuner_of
from tests.support.normed import ROWS, WIDTH, Layers, PreNorm, planned
from tests.support.quantized import calibrated
from tests.support.quantized import graph_of as quantized_graph

CPU = torch.device("cpu")
ROW = Kernel(
    id="linear_norm.scratch",
    op="linear_norm",
    module=__name__,
    targets=("cpu",),
    source="aten",
    writes_out=False,
)

# ------------------------------------------------------------------ a kernel that never runs


def fits(problem: Problem) -> str | None:
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    raise NotImplementedError


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel that wins wherever it is asked, alone of its kind."""
    won = Trial(kernel=ROW.id, time_us=0.0)
    monkeypatch.setattr(fuse_chains, "kernels", lambda op, _: [ROW] if op == ROW.op else [])
    monkeypatch.setattr(fuse_chains, "trials", lambda *_, **__: (won,))
    monkeypatch.setattr(race, "times_us", lambda programs, *_, **__: [2.0, 1.0][: len(programs)])
    catalog.register(ROW)
    yield
    catalog.unregister(ROW.id)


# ------------------------------------------------------------------ networks


class PostNorm(Layers):
    """BERT's: a sum is read by its norm alone, which is a layer's input and the next residual."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.n(x + self.a(x))
        y = self.m(h + self.mlp(h))
        return y + self.d(y)


class Apart(Layers):
    """Norms that are no layer's: of the input, of part of a row, and of what is activated after."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.n(x)
        h = self.a(h).unflatten(-1, (2, WIDTH // 2))
        h = nn.functional.layer_norm(h, (WIDTH // 2,)).flatten(-2)
        h = nn.functional.layer_norm(self.c(h), (WIDTH,))  # without weight and bias
        return self.d(torch.exp(self.m(self.c(h).exp())))


def lowered(module: nn.Module, precision: str) -> Graph:
    """A network as kernels for a GPU get it, at batch 2."""
    exact = optimized(quantized_graph(module.eval(), ROWS, WIDTH))
    found = calibrated(exact, ROWS, WIDTH, kinds=(precision,)) if precision == "fp8" else None
    assignment = assign(exact, precision, {}, "sm_90", found)
    request = request_for(exact, assignment, found)
    return run(exact, request, after="optimize", until="fuse").at_batch(2)


def fused_of(graph: Graph) -> tuple[list[Choice], list[Choice]]:
    """The choices before, and after."""
    choices = choices_of(graph, {})
    return choices, fuse_chains.apply(graph, choices, tuner_of(graph), silent)


CASES: dict[tuple[type[nn.Module], str], list[set[str]]] = {  # results of each step
    (PostNorm, "fp16"): [{"norm"}, {"norm"}],
    (PostNorm, "bf16"): [{"norm"}, {"norm"}],
    (PostNorm, "fp8"): [{"codes", "norm"}, {"codes", "norm"}],
    (PreNorm, "fp16"): [{"norm", "sum"}, {"norm", "sum"}],
    (PreNorm, "fp8"): [{"codes", "sum"}, {"codes", "sum"}],
    (Apart, "fp16"): [],
    (Apart, "fp8"): [],
}


@pytest.mark.parametrize(("network", "precision"), CASES, ids=str)
def test_the_program_means_the_same(
    network: type[nn.Module], precision: str, scratch: None
) -> None:
    graph = lowered(network(), precision)
    x = {"x": torch.randn(2, ROWS, WIDTH)}
    right = interpret(graph, x, upcast=torch.float64)
    as_stored = interpret(graph, x)
    choices, fused = fused_of(graph)
    steps = [c for c in fused if c.node.op == "linear_norm"]
    assert [set(c.node.attrs["results"]) for c in steps] == CASES[network, precision]
    assert len(fused) == len(choices) - len(steps)
    for step in steps:
        assert step.kernel == ROW.id
        assert step.node.layer
        named = zip(step.node.outputs, step.node.attrs["results"], strict=True)
        assert all((v.dtype == "float8_e4m3fn") == (name == "codes") for v, name in named)
        assert tuple(v.dtype for v in step.node.outputs) == tuple(
            m.dtype for m in step.problem.outputs
        )
    bucket = plan_memory.apply(graph, fused, 2)
    assert [s.kernel for s in bucket.steps].count(ROW.id) == len(steps)
    graph.nodes = [c.node for c in fused]
    check(graph)
    made = interpret(graph, x, upcast=torch.float64)
    assert all(made[name].unique().numel() > 20 for name in right)
    for name, wanted in right.items():
        torch.testing.assert_close(made[name], wanted, rtol=1e-12, atol=1e-12)
    for name, tensor in interpret(graph, x).items():  # in their own types: near, as roundings go
        assert (tensor - as_stored[name]).abs().max() <= 0.05 * as_stored[name].abs().max()


def test_a_sum_that_the_network_gives_out_is_kept(scratch: None) -> None:
    graph = lowered(PostNorm(), "fp16")
    total = next(n.output for n in graph.nodes if n.op == "linear")
    graph.outputs.append(total)
    _, fused = fused_of(graph)
    first, second = (c for c in fused if c.node.op == "linear_norm")
    assert first.node.attrs["results"] == ("norm", "sum")
    assert first.node.outputs[1] is total
    assert second.node.attrs["results"] == ("norm",)


def test_what_the_search_is_asked_has_answers(scratch: None) -> None:
    graph = lowered(PostNorm(), "fp8")
    _, fused = fused_of(graph)
    step = next(c for c in fused if c.node.op == "linear_norm")
    constants = {v.name: t for v, t in graph.constants.items()}
    known = choose_kernels.constants_of(step.node, step.problem, constants)
    assert set(known) == {1, 2, 4, 5, 6, 7}
    answers = exact_answers(step.problem, known, sample_inputs(step.problem, CPU))
    for answer, meta in zip(answers, step.problem.outputs, strict=True):
        assert (answer.dtype, tuple(answer.shape)) == (torch.float64, meta.shape)
        assert answer.unique().numel() > 20


def test_says_why_two_steps_are_no_layer_and_norm() -> None:
    choices = choices_of(lowered(PostNorm(), "fp16"), {})
    at = next(i for i, c in enumerate(choices) if c.node.op == "layer_norm")
    first, norm = choices[at - 1 : at + 1]
    assert fuse_chains.refusal(first, norm, set(), True) is None
    assert "no such chain" in str(fuse_chains.refusal(norm, first, set(), False))
    other = next(c for c in choices if c.node.op == "linear" and c is not first)
    assert "does not read" in str(fuse_chains.refusal(other, norm, set(), False))
    held = {norm.node.output.name}
    assert "holds one" in str(fuse_chains.refusal(first, norm, held, False))
    for known in ((1,), (2,), ()):
        computed = replace(norm, problem=replace(norm.problem, constant=known))
        assert "computed" in str(fuse_chains.refusal(first, computed, set(), False))


def test_nothing_is_asked_where_no_kernel_fits(
    scratch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse_chains, "kernels", lambda op, _: [])
    monkeypatch.setattr(fuse_chains, "trials", None)
    monkeypatch.setattr(race, "times_us", None)
    choices, fused = fused_of(lowered(PostNorm(), "fp16"))
    assert fused == choices


def test_linears_and_programs_of_other_kinds_are_not_asked(scratch: None) -> None:
    """A linear before a program is usual; only those that normalize its rows are pairs."""
    graph = lowered(PreNorm(), "fp8")
    choices = choices_of(graph, {})
    found = list(fuse_chains.pairs(graph, choices, "linear_norm"))
    assert [choices[p.second].node.op for p in found] == ["pointwise", "pointwise"]
    assert [p.step.node.outputs[-1] for p in found] == [choices[p.first].node.output for p in found]
    assert not list(fuse_chains.pairs(graph, choices, "conv2d_chain"))


# ------------------------------------------------------------------ a plan


@pytest.mark.parametrize("network", [PostNorm, PreNorm])
def test_a_plan_with_norms_agrees_with_float64(
    network: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = network()
    plan = planned(module, monkeypatch)
    for bucket in plan.program.buckets:
        assert [s.op for s in bucket.steps].count("linear_norm") == 2
    engine = runtime.load(plan)
    exact: Any = module.double()
    for count in (1, 2, 3):
        x = torch.randn(count, ROWS, WIDTH)
        (found,) = engine(x).values()
        wanted = exact(x.double()).detach()
        assert (found - wanted).abs().max() <= 0.02 * wanted.abs().max()
