"""Layers with a GELU or the like write int8 and fp8 codes, where a kernel of the target can."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessella.compiler import pipeline
from tessella.compiler.calibration import Calibration
from tessella.compiler.passes import fuse_requantization
from tessella.compiler.precision import assign
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture, check, interpret
from tessella.graph.graph import Graph, Node, Value
from tests.compiler.test_quantization import calibrated, graph_of

ACTIVATIONS = {
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "hardswish": nn.Hardswish(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
}


class Mlp(nn.Module):
    """Half a block of a ViT: norm, two layers and what they are added to; ``width`` between."""

    def __init__(self, act: nn.Module, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.act = nn.LayerNorm(32), act
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(16, 48, 3, padding=1), nn.Conv2d(48, 16, 1)
        self.wide = nn.Conv2d(48, 48, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        silu = nn.functional.silu
        return self.b(silu(self.wide(silu(self.a(x))))).mean((2, 3))


def stages(graph: Graph, kind: str, found: Calibration, target: str) -> tuple[Graph, Graph]:
    """The graph that says what is rounded, and the one whose kernels are chosen."""
    exact = pipeline.optimized(graph)
    assignment = assign(exact, kind, {}, target, found)
    rounded = pipeline._changed(exact, pipeline.rounding(exact, assignment, found))
    return rounded, pipeline._changed(rounded, pipeline.narrowing(assignment))


def rescaled(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if "gamma" in n.attrs]


def assert_alike(rounded: Graph, made: Graph, *shape: int) -> None:
    x = {"x": torch.randn(3, *shape, generator=torch.Generator().manual_seed(2))}
    right, fused = (interpret(graph, x)["scores"] for graph in (rounded, made))
    assert (fused - right).abs().max() <= 0.02 * right.abs().max()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_block_has_one_step_fewer(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(Mlp(ACTIVATIONS[name]), 5, 32)
    found = calibrated(graph, 5, 32, kinds=(kind,))
    rounded, made = stages(graph, kind, found, "sm_90")
    (layer,) = rescaled(made)
    assert layer.attrs["activation"] == name
    assert layer.output.dtype == layer.attrs["dtype"] == layer.inputs[0].dtype
    assert "quantize" not in {n.op for n in made.nodes}  # the other one is the norm's
    with monkeypatch.context() as without:
        without.setattr(fuse_requantization, "apply", lambda graph, target: 0)
        _, before = stages(graph, kind, found, "sm_90")
    assert not rescaled(before)
    assert len(made.nodes) == len(before.nodes) - 1
    assert_alike(rounded, made, 5, 32)


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_where_only_the_last_resort_could_nothing_changes(target: str) -> None:
    graph = graph_of(Mlp(nn.GELU()), 5, 32)
    rounded, made = stages(graph, "int8", calibrated(graph, 5, 32), "cpu")
    assert not rescaled(made)
    assert fuse_requantization.apply(rounded.copy(), target) == 0


def test_convolutions_in_a_row_stay_on_codes() -> None:
    graph = graph_of(Convolutions(), 16, 6, 6)
    rounded, made = stages(graph, "int8", calibrated(graph, 16, 6, 6), "sm_90")
    assert len(rescaled(made)) == 2
    assert_alike(rounded, made, 16, 6, 6)


def test_channels_are_padded_for_tiles_of_16_bytes() -> None:
    graph = graph_of(Mlp(nn.Sigmoid(), width=40), 5, 32)
    rounded, made = stages(graph, "int8", calibrated(graph, 5, 32), "sm_90")
    (layer,) = rescaled(made)
    assert layer.output.shape[-1] == 48
    assert_alike(rounded, made, 5, 32)


def by_hand(
    zero: int = 0, scale: tuple[float, ...] = (0.02,), dtype: str = "int8", also: str = ""
) -> Graph:
    """gelu of a layer on int8, rounded; ``also``: read twice, a result, or a sum with something."""
    spec = TensorSpec(name="x", dtype="float32", shape=(DimRange(min=1, opt=2, max=4), 32))
    graph = capture(nn.Linear(32, 32).eval(), (spec,), outputs=("y",))
    (node,) = graph.nodes
    (x,) = graph.inputs
    x.dtype = "int8"
    codes = torch.randint(-9, 9, (32, 32), dtype=torch.int8)
    factor = graph.add_constant("factor", torch.rand(32))
    residual = Value("before", "float32", x.shape) if also == "sum" else None
    node.inputs = (x, graph.add_constant("codes", codes), node.inputs[2], residual, factor)
    node.attrs |= {"activation": "gelu", "dtype": "float32"}
    numbers = graph.add_constant("scale", torch.tensor(scale))
    zeros = graph.add_constant("zero", torch.tensor(zero, dtype=torch.int8)) if zero else None
    made = Value("z", dtype, node.output.shape)
    attrs = {"axis": 1, "dtype": dtype}
    graph.nodes.append(Node("quantize", (node.output, numbers, zeros), (made,), attrs))
    if residual is not None:
        back = Node("to", (x,), (residual,), {"dtype": "float32"})
        graph.nodes.insert(0, back)
    if also == "reader":
        seen = Value("seen", "float32", node.output.shape)
        graph.nodes.append(Node("relu", (node.output,), (seen,), {}))
        graph.outputs = [made, seen]
    else:
        graph.outputs = [made, node.output] if also == "result" else [made]
    graph.constants = {v: t for v, t in graph.constants.items() if v in _read(graph)}
    check(graph)
    return graph


def _read(graph: Graph) -> set[Value | None]:
    return {v for n in graph.nodes for v in n.inputs}


@pytest.mark.parametrize(("changes", "fused"), [
    ({}, 1),
    ({"zero": 4}, 0),
    ({"scale": tuple(0.01 + i / 100 for i in range(32))}, 0),
    ({"scale": (1e-39,)}, 0),  # no factor that float32 holds
    ({"dtype": "float8_e4m3fn"}, 0),
    ({"also": "reader"}, 0),
    ({"also": "result"}, 0),
    ({"also": "sum"}, 0),
], ids=repr)  # fmt: skip
def test_what_stays_a_step(changes: dict[str, object], fused: int) -> None:
    graph = by_hand(**changes)
    assert fuse_requantization.apply(graph, "sm_90") == fused
    check(graph)
    assert ("quantize" in {n.op for n in graph.nodes}) == (not fused)
