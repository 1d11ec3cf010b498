"""The compiler races and checks what the runtime will run: the same steps in the same arena."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessella.compiler import execution, verify
from tessella.compiler.choices import choose_kernels, overwrite_residuals, plan_memory, race
from tessella.compiler.choices.choose_kernels import Choice, Tuner
from tessella.compiler.choices.variants import with_layout
from tessella.core.errors import CompileError
from tessella.core.events import silent
from tessella.core.spec import TensorSpec
from tessella.execution.arena import Arena
from tessella.execution.bucket import BoundBucket
from tessella.graph.build import Builder
from tessella.graph.graph import Graph
from tessella.graph.interpret import interpret
from tessella.search.tuning import TimingCache
from tests.support.networks import captured


def chosen(graph: Graph) -> tuple[Graph, list[Choice], Tuner]:
    graph, formats = with_layout(graph, "channels_last")
    tuner = Tuner(
        target="cpu",
        math="ieee",
        constants={v.name: t for v, t in graph.constants.items()},
        cache=TimingCache(),
        budget_s=0.0,
    )
    choices = choose_kernels.apply(graph, formats, tuner, silent, "")
    return graph, overwrite_residuals.apply(graph, choices, tuner), tuner


def test_a_race_runs_in_the_arena_of_the_plan() -> None:
    graph, choices, tuner = chosen(captured("vit").at_batch(2))
    bucket = plan_memory.apply(graph, choices, 2)
    run = race._run(graph, bucket, tuner, Arena(bucket.arena_bytes, torch.device("cpu")))
    (answer,) = run()
    x = race.sample(graph.inputs[0], torch.device("cpu"))
    (right,) = interpret(graph, {graph.inputs[0].name: x}, upcast=torch.float64).values()
    torch.testing.assert_close(answer.double(), right, rtol=1e-4, atol=1e-4)
    bound = run.func
    assert isinstance(bound, BoundBucket)
    arenas = {s.out.untyped_storage().data_ptr() for s in bound.steps if s.out is not None}
    sizes = {s.out.untyped_storage().nbytes() for s in bound.steps if s.out is not None}
    assert (len(arenas), sizes) == (1, {bucket.arena_bytes})


def sums_in_place() -> tuple[Graph, list[Choice], Tuner]:
    """A convolution that adds to its residual where that lies."""
    build = Builder("sums")
    x = build.input(TensorSpec(name="x", dtype="float32", shape=(1, 8, 6, 6)), dynamic=False)
    weight = build.constant("weight", torch.randn(8, 8, 1, 1) / 8)
    window = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    residual = build.one("exp", [x])
    graph = build.finish([build.one("conv2d", [x, weight, None, residual], **window)], ["y"])
    graph, choices, tuner = chosen(graph)
    (index,) = (i for i, c in enumerate(choices) if c.node.op == "conv2d")
    trials = choices[index].trials
    first = next(t for t in trials if t.kernel == "conv2d.onednn_sum" and t.refused is None)
    choices[index] = replace(choices[index], trials=(first, *(t for t in trials if t is not first)))
    return graph, choices, tuner


@pytest.mark.instructions
def test_a_kernel_that_overwrites_its_residual_is_not_blamed_for_it() -> None:
    graph, choices, tuner = sums_in_place()
    bucket = plan_memory.apply(graph, choices, 1)
    wanted = verify.expected(graph, 1, 1, target="cpu")
    verify.check(choices, bucket, graph, graph, wanted, tuner, "fp32")
    wrong = replace(wanted, outputs={"y": wanted.outputs["y"] + 1})
    with pytest.raises(CompileError, match="does not compute what the network computes") as told:
        verify.check(choices, bucket, graph, graph, wrong, tuner, "fp32")
    assert not isinstance(told.value, verify.WrongKernel)


@pytest.mark.instructions
def test_views_of_the_arena_are_made_once_and_see_each_run() -> None:
    """Slices of a layer's result, which lies at one place: no run makes them, and each sees new
    numbers; machine code that always finds the same tensors is given their addresses once."""
    build = Builder("views")
    x = build.input(TensorSpec(name="x", dtype="float32", shape=(1, 8, 6, 6)), dynamic=False)
    weight = build.constant("weight", torch.randn(16, 8, 3, 3) / 8)
    again = build.constant("again", torch.randn(16, 16, 1, 1) / 4)
    window = {"stride": (1, 1), "dilation": (1, 1), "groups": 1}
    made = build.one("conv2d", [x, weight, None, None], padding=(1, 1), **window)
    made = build.one("conv2d", [made, again, None, None], padding=(0, 0), **window)
    half = build.one("slice", [made], dim=1, start=0, end=8, step=1)
    row = build.one("select", [half], dim=2, index=3)
    graph = build.finish([build.one("exp", [row])], ["y"])
    graph, choices, tuner = chosen(graph)
    bound = execution.bound(graph, plan_memory.apply(graph, choices, 1), tuner)
    views = [s for s in bound.steps if s.step.op in ("slice", "select")]
    assert len(views) == 2
    for seed in range(3):
        image = torch.randn(1, 8, 6, 6, generator=torch.Generator().manual_seed(seed))
        (right,) = interpret(graph, {graph.inputs[0].name: image}, upcast=torch.float64).values()
        (answer,) = bound([image])
        torch.testing.assert_close(answer.double(), right, rtol=1e-5, atol=1e-5)
    lying = all(step.lying for step in views)
    assert lying == any(s.out is not None for s in bound.steps if s.step.op == "conv2d")
    assert len(bound._moving) == len(bound.steps) - (2 if lying else 0)


@pytest.mark.instructions
def test_kernels_that_round_more_than_a_network_bears_are_taken_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Winograd's error is some ten times that of plain sums, which others then make."""
    build = Builder("rough")
    spec = TensorSpec(name="x", dtype="float32", shape=(1, 64, 24, 24))
    weight = build.constant("weight", torch.randn(64, 64, 3, 3) / 24)
    window = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    x = build.input(spec, dynamic=False)
    made = build.one("conv2d", [x, weight, None, None], **window)
    graph, formats = with_layout(build.finish([made], ["y"]), "channels_last")
    tuner = Tuner(target="cpu", math="ieee", constants={v.name: t for v, t in
                  graph.constants.items()}, cache=TimingCache(), budget_s=0.0)  # fmt: skip
    choices = choose_kernels.apply(graph, formats, tuner, silent, "")
    (at,) = (i for i, c in enumerate(choices) if c.node.op == "conv2d")
    trials = choices[at].trials
    winograd = [t for t in trials if t.kernel.endswith("_winograd") and t.refused is None]
    if not winograd:
        pytest.skip("no machine code here")
    others = (t for t in trials if t is not winograd[0])
    choices[at] = replace(choices[at], trials=(winograd[0], *others))
    wanted = replace(verify.expected(graph, 1, 1, target="cpu"), noise=0.0)
    (answer,) = execution.bound(graph, plan_memory.apply(graph, choices, 1), tuner)(
        [wanted.inputs["x"]]
    )
    right = wanted.outputs["y"]
    error = float((answer.double() - right).abs().max() / right.abs().max())

    def check(choices: list[Choice], allowed: float) -> None:
        monkeypatch.setitem(verify.TOLERANCES, "fp32", (allowed * error, 0.999))
        bucket = plan_memory.apply(graph, choices, 1)
        verify.check(choices, bucket, graph, graph, wanted, tuner, "fp32")

    check(choices, 3.0)
    for allowed in (1.5, 0.7):
        with pytest.raises(verify.RoughKernels, match="round more than this network bears") as told:
            check(choices, allowed)
        assert [*told.value.kernels] == [winograd[0].kernel]
        assert told.value.bearable == (allowed > 1)
    tuner.too_rough.update(dict.fromkeys(told.value.kernels, choose_kernels.TOO_ROUGH))
    again = choose_kernels.apply(graph, formats, tuner, silent, "")
    (trial,) = (t for t in again[at].trials if t.kernel == winograd[0].kernel)
    assert (trial.refused, trial.time_us) == (choose_kernels.TOO_ROUGH, None)
    check(again, 0.7)
