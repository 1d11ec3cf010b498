"""Poolings and int8 layers behind a ReLU say that nothing is below zero, on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessella import compiler, runtime
from tessella.compiler import explain
from tessella.compiler.rewrites import mark_non_negative
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture
from tessella.graph.graph import Graph


class Net(nn.Module):
    """A pooling of two layers beside each other, a pooling of that, and one of the input."""

    def __init__(self, *, second: nn.Module) -> None:
        super().__init__()
        self.first, self.other = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.second = second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pool = nn.functional.max_pool2d
        both = torch.cat([self.first(x).relu(), self.second(self.other(x))], 1)
        return pool(pool(both, 2), 2).mean((2, 3)) + pool(x, 3).amax((2, 3)).mean(1, keepdim=True)


def graph_of(second: nn.Module) -> Graph:
    torch.manual_seed(0)
    spec = TensorSpec(name="image", dtype="float32", shape=(2, 8, 12, 12))
    return capture(Net(second=second).eval(), (spec,))


@pytest.mark.parametrize(
    ("second", "marked"), [(nn.ReLU6(), 2), (nn.Sigmoid(), 2), (nn.Tanh(), 0), (nn.SiLU(), 0)]
)
def test_a_concatenation_is_from_zero_on_if_all_its_parts_are(
    second: nn.Module, marked: int
) -> None:
    found = explain(graph_of(second), target="cpu", precision="bf16")
    (mark,) = (record for record in found if record.name == "mark_non_negative")
    assert mark.rewrites == marked
    assert mark.after.count("non_negative=True") == marked


class Negated(nn.Module):
    """A mean by a divisor below zero, and what it is pooled to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = nn.functional.avg_pool2d(x.relu(), 2, divisor_override=-4)
        return nn.functional.max_pool2d(mean, 2)


def test_a_mean_may_divide_by_a_negative_number() -> None:
    spec = TensorSpec(name="image", dtype="float32", shape=(2, 8, 12, 12))
    found = explain(capture(Negated().eval(), (spec,)), target="cpu", precision="bf16")
    (mark,) = (record for record in found if record.name == "mark_non_negative")
    assert mark.rewrites == 0


def test_32_bits_are_left() -> None:
    assert mark_non_negative.apply(graph_of(nn.ReLU())) == 0


def test_a_plan_of_such_answers_as_torch() -> None:
    graph = graph_of(nn.ReLU())
    plan = compiler.compile_graph(
        graph,
        target="cpu",
        batch=DimRange(min=2, opt=2, max=2),
        precision="bf16",
        about=compiler.About(built_from="net", rebuild="tessella compile net"),
        measuring=compiler.Measuring(budget_s=0.0),
    )
    engine = runtime.load(plan)
    steps = [s for s in engine.bound(2).steps if s.problem.attr("non_negative")]
    assert len(steps) == 2
    x = torch.randn(2, 8, 12, 12)
    (made,) = engine(image=x).values()
    torch.manual_seed(0)
    right = Net(second=nn.ReLU()).eval()(x)
    assert (made - right).abs().max() <= 0.02 * right.abs().max()


class Layers(nn.Module):
    """Layers behind a ReLU, behind none, and behind a sum that is cut off at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth, last = self.layers
        y = first(x).relu()
        z = third(second(y)) + y
        made: torch.Tensor = last(fourth(z.relu())).mean((2, 3))
        return made


def test_layers_of_int8_behind_a_relu() -> None:
    torch.manual_seed(0)
    module = Layers().eval()
    spec = TensorSpec(name="image", dtype="float32", shape=(2, 16, 12, 12))
    graph = capture(module, (spec,))
    x = torch.randn(2, 16, 12, 12)
    plan = compiler.compile_graph(
        graph,
        target="cpu",
        batch=DimRange(min=2, opt=2, max=2),
        precision="int8",
        precisions={"relu": "int8"},
        calibration=compiler.calibrate(graph, [{"image": x}]),
        about=compiler.About(built_from="net", rebuild="tessella compile net"),
        measuring=compiler.Measuring(budget_s=0.0),
    )
    engine = runtime.load(plan)
    layers = [s.problem for s in engine.bound(2).steps if s.step.op == "conv2d"]
    assert [p["input"].dtype for p in layers] == ["int8"] * 5
    assert [bool(p.attr("non_negative")) for p in layers] == [False, True, False, True, False]
    (made,) = engine(image=x).values()
    right = module(x)
    assert (made - right).abs().max() <= 0.05 * right.abs().max()
