"""Values that a precision cannot hold: found when the plan is built, and the layer is named."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tessella import compiler, runtime
from tessella.compiler.pipeline import optimized
from tessella.core.errors import CompileError
from tessella.core.spec import DimRange, TensorSpec
from tests.compiler.networks import build, graph_of, plan

IMAGE = TensorSpec(name="image", dtype="float32", shape=(1, 16, 4, 4))


class Loud(nn.Module):
    """Values around ``level`` between two layers; outside of them around 1."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self.quiet, self.loud = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
        self.back = nn.Conv2d(16, 16, 1)
        with torch.no_grad():
            self.loud.weight *= level
            self.back.weight /= level

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.loud(self.quiet(x).tanh()).relu()).flatten(1)


def loud(level: float) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Loud(level).eval()


def test_a_layer_that_overflows_is_named() -> None:
    """Its weights fit, its sums do not; what is left at the end might even look like an answer."""
    with pytest.raises(CompileError) as caught:
        build(loud(2e5), IMAGE, precision="fp16")
    said = str(caught.value)
    assert "NaN or infinity: fp16 cannot hold its values" in said
    assert "(loud)" in said
    assert "precisions=" in said


def test_what_float16_cannot_hold_bfloat16_can() -> None:
    module, x = loud(2e5), torch.randn(2, 16, 4, 4)
    made = runtime.load(build(module, IMAGE, precision="bf16"))(x)["scores"]
    torch.testing.assert_close(made, module(x), rtol=5e-2, atol=5e-2)


def test_another_precision_for_that_layer_helps() -> None:
    module = loud(2e5)
    graph = graph_of(module, IMAGE, DimRange(min=1, opt=2, max=2))
    nodes = {n.layer: n.outputs[0].name for n in optimized(graph).nodes}
    exact = {nodes["loud"]: "fp32", nodes["back"]: "fp32"}
    engine = runtime.load(plan(graph, precision="fp16", precisions=exact))
    x = torch.randn(2, 16, 4, 4)
    torch.testing.assert_close(engine(x)["scores"], module(x), rtol=1e-2, atol=1e-2)


def test_weights_that_do_not_fit_are_named() -> None:
    with pytest.raises(CompileError, match=r"weights do not fit into float16.*loud\.weight"):
        build(loud(1e6), IMAGE, precision="fp16")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_layer_whose_values_do_not_fit_its_scale_is_named(kind: str) -> None:
    """Calibrated with images a thousand times smaller: its codes are cut, and the answers wrong."""
    module = loud(1.0)
    graph = graph_of(module, IMAGE, DimRange(min=1, opt=2, max=2))
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(16, 16, 4, 4, generator=generator)
    calibration = compiler.calibrate(graph, [{"image": 1e-3 * images}], kinds=(kind,))
    with pytest.raises(CompileError) as caught:
        plan(graph, precision=kind, calibration=calibration, samples={"image": images[:3]})
    said = str(caught.value)
    assert "changes what the network says" in said
    assert "the worst layers: " in said
    assert any(f"{name} " in said for name in ("quiet", "loud", "back"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_cannot_be_calibrated_with(value: float) -> None:
    graph = graph_of(loud(1.0), IMAGE, DimRange(min=1, opt=2, max=2))
    with pytest.raises(CompileError, match="not finite"):
        compiler.calibrate(graph, [{"image": torch.full((1, 16, 4, 4), value)}])
