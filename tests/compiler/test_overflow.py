"""Values that a precision cannot hold: found when the plan is built, and the layer is named.

What rounding alone makes of a network that amplifies it is no fault of the plan.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tessella import compiler, runtime
from tessella.compiler.pipeline import optimized
from tessella.compiler.verify import MOST_NARROW, NARROW_MARGIN, TOLERANCES
from tessella.core.errors import CompileError
from tessella.core.spec import DimRange, TensorSpec
from tests.support.networks import build, graph_of, plan

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


@pytest.mark.parametrize(
    ("precision", "hidden"), [("fp16", -1e9), ("bf16", torch.finfo(torch.float32).min)]
)
def test_a_mask_of_a_number_that_the_type_cannot_hold(precision: str, hidden: float) -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.flatten(1)
            return flat.masked_fill(flat > 0.5, hidden).softmax(-1)

    x = torch.randn(2, 16, 4, 4).to(torch.bfloat16).float()  # in all three types the same side
    made = runtime.load(build(Masked().eval(), IMAGE, precision=precision))(x)["scores"]
    torch.testing.assert_close(made, Masked()(x), rtol=2e-2, atol=2e-3)


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


def test_the_largest_number_stands_for_no_place_in_any_type() -> None:
    """Detectors keep places out by float32's largest number, and masks by its negative."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            most = torch.finfo(torch.float32).max
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mask", torch.tensor([0.0, most, -most, 1.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) + self.mask).sigmoid()

    module, x = Masked().eval(), torch.randn(2, 4)
    spec = TensorSpec(name="x", dtype="float32", shape=(1, 4))
    made = runtime.load(build(module, spec, precision="fp16"))(x)["scores"]
    torch.testing.assert_close(made, module(x), rtol=5e-3, atol=5e-3)
    assert made[:, 1:3].tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_layer_whose_values_do_not_fit_its_scale_is_named(kind: str) -> None:
    """Calibrated with images a thousand times smaller: values saturate, answers are wrong."""
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


class Amplifier(nn.Module):
    """Layers whose sums are ``gain`` times as large as a tanh takes without loss."""

    def __init__(self, depth: int, gain: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 1, bias=False) for _ in range(depth))
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.normal_(0, gain / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.flatten(1)


def amplifier(depth: int, gain: float = 1.6) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Amplifier(depth, gain).eval()


def test_a_plan_may_be_as_far_off_as_its_precision_is() -> None:
    """Torch in bfloat16 is off by more than the tolerance, so that the plan may be, too."""
    module = amplifier(10)
    x = torch.randn(8, 16, 4, 4, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        right = module.double()(x.double())
        of_torch = (module.bfloat16()(x.bfloat16()).double() - right).abs().max()
    assert of_torch > TOLERANCES["bf16"][0]
    made = build(module.float(), IMAGE, precision="bf16")
    assert TOLERANCES["bf16"][0] < made.manifest.tolerance <= MOST_NARROW * TOLERANCES["bf16"][0]
    error = (runtime.load(made)(x)["scores"].double() - right).abs().max()
    assert error <= NARROW_MARGIN * of_torch
    exact = build(amplifier(10), IMAGE, precision="fp32")
    assert exact.manifest.tolerance == TOLERANCES["fp32"][0]


def test_a_precision_that_says_nothing_any_more_is_refused() -> None:
    with pytest.raises(CompileError, match="does not compute what the network computes"):
        build(amplifier(40), IMAGE, precision="bf16")
