"""Scores in float32, straight from the sums: the cast behind the last layer goes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella.compiler import pipeline
from tessella.compiler.passes import of_stage, request_for, run
from tessella.compiler.precision import assign
from tessella.compiler.rewrites import assign_layout, widen_results
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture, check, interpret
from tessella.graph.graph import Graph, Node, Value
from tessella.kernels import catalog
from tests.support.choices import problem_of
from tests.support.networks import NETWORKS, captured

SIXTEEN_BIT = {"fp16": torch.float16, "bf16": torch.bfloat16}


def stages(graph: Graph, precision: str = "fp16", target: str = "sm_90") -> tuple[Graph, Graph]:
    """The graph before the pass, and after it."""
    exact = pipeline.optimized(graph)
    request = request_for(exact, assign(exact, precision, {}, target, None))
    before = run(exact, request, after="lower", until="narrow")
    for step in of_stage("fuse"):
        if step.name != "widen_results":
            step.apply(before, **step.given(request))
    after = before.copy()
    assert widen_results.apply(after, target) == len(before.nodes) - len(after.nodes)
    check(after)
    return before, after


def graph_of(module: nn.Module, *shape: int) -> Graph:
    torch.manual_seed(0)
    spec = TensorSpec(name="x", dtype="float32", shape=(DimRange(min=1, opt=2, max=8), *shape))
    return capture(module.eval(), (spec,))


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


@pytest.mark.parametrize("precision", SIXTEEN_BIT)
@pytest.mark.parametrize("name", ["lenet", "resnet18", "vit"])
def test_a_network_ends_with_its_last_layer(name: str, precision: str) -> None:
    before, after = stages(captured(name), precision)
    assert ops(before)[-2:] == ["linear", "to"]
    assert ops(after) == ops(before)[:-1]
    last = after.nodes[-1]
    assert (last.attrs["dtype"], last.output.dtype) == ("float32", "float32")
    assert [v.name for v in after.outputs] == [v.name for v in before.outputs]
    _, channels, size = NETWORKS[name]
    x = {"image": torch.randn(3, channels, size, size, generator=torch.Generator().manual_seed(1))}
    exactly = [interpret(g, x, upcast=torch.float64)["scores"] for g in (before, after)]
    assert torch.equal(*exactly)
    rounded = [interpret(g, x)["scores"] for g in (before, after)]
    assert rounded[1].dtype == torch.float32
    torch.testing.assert_close(*rounded)


def test_the_pipeline_does_it() -> None:
    exact = pipeline.optimized(captured("lenet"))
    request = request_for(exact, assign(exact, "fp16", {}, "sm_90", None))
    assert ops(run(exact, request, after="optimize", until="fuse")) == ops(
        stages(captured("lenet"))[1]
    )


@pytest.mark.parametrize("classes", [2, 10, 37, 1000])
@pytest.mark.parametrize("batch", [1, 64, 128])
def test_the_kernels_of_a_gpu_take_it(classes: int, batch: int) -> None:
    """Whatever the number of classes, at each batch size of a plan."""
    _, after = stages(graph_of(nn.Linear(64, classes), 64))
    assert ops(after) == ["to", "linear"]
    concrete = after.at_batch(batch)
    formats = assign_layout.apply(concrete, "contiguous")
    problem = problem_of(concrete, concrete.nodes[-1], formats)
    rows = [row for row in catalog.candidates("linear", "sm_90") if not row.last_resort]
    taken = {row.id for row in rows if row.refusal(problem) is None}
    assert "linear.tiled" in taken
    assert ("linear.skinny.sm90" in taken) == (batch <= 64)
    assert ("linear.wgmma.sm90" in taken) == (classes % 4 == 0)


class Image(nn.Module):
    """A convolution as the last layer, with channels that fill tiles, or not."""

    def __init__(self, channels: int, out: int, **settings: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels, out, 3, padding=1, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize(("channels", "out", "settings", "widened"), [
    (32, 24, {}, True),
    (3, 20, {}, True),  # few channels: the direct convolution
    (32, 21, {}, False),  # no tiles of 16 bytes: libraries and portable kernels are left
    (32, 32, {"groups": 32}, True),  # filters of one channel: the portable kernel wins
], ids=str)  # fmt: skip
def test_a_convolution_keeps_its_fast_kernels(
    channels: int, out: int, settings: dict[str, int], widened: bool
) -> None:
    before, after = stages(graph_of(Image(channels, out, **settings), channels, 6, 6))
    assert len(after.nodes) == len(before.nodes) - widened
    x = {"x": torch.randn(2, channels, 6, 6)}
    made, right = (next(iter(interpret(g, x).values())) for g in (after, before))
    torch.testing.assert_close(made, right)


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("precision", SIXTEEN_BIT)
def test_elsewhere_the_cast_stays(target: str, precision: str) -> None:
    """There only the last resort would take it: libraries write what they read."""
    before, after = stages(captured("lenet"), precision, target)
    assert ops(after) == ops(before)
    assert ops(after)[-1] == "to"


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> object:
        made = self.a(x)
        return made, F.softmax(made, -1), self.b(x).exp(), self.b(x) + x


def test_what_is_read_twice_stays_and_so_does_a_longer_step() -> None:
    """``a`` is an output and goes on; exp takes the cast behind ``b``; a sum has a residual."""
    before, after = stages(graph_of(Heads(), 32))
    assert ops(before) == ops(after)
    assert sum(n.op == "linear" and n.inputs[3] is not None for n in after.nodes) == 1


def by_hand(cast: str = "float32", dtype: str | None = None, also: bool = False) -> Graph:
    graph = graph_of(nn.Linear(32, 32), 32)
    (layer,) = graph.nodes
    for value in (*graph.inputs, *graph.constants, layer.output):
        value.dtype = "float16"
    graph.constants = {v: t.half() for v, t in graph.constants.items()}
    if dtype:
        layer.attrs["dtype"] = dtype
    made = Value("made", cast, layer.output.shape)
    graph.nodes.append(Node("to", (layer.output,), (made,), {"dtype": cast}))
    graph.outputs = [made, layer.output] if also else [made]
    check(graph)
    return graph


@pytest.mark.parametrize(("changes", "widened"), [
    ({}, 1),
    ({"cast": "bfloat16"}, 0),
    ({"dtype": "float16"}, 0),  # who says what is stored has a reason
    ({"also": True}, 0),
], ids=str)  # fmt: skip
def test_what_stays_a_step(changes: dict[str, object], widened: int) -> None:
    graph = by_hand(**changes)
    assert widen_results.apply(graph, "sm_90") == widened
    check(graph)
    assert ("to" in ops(graph)) == (not widened)
