"""The passes that round: against torch's fake quantization, integers by hand, and ONNX Runtime."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_static,
)
from torch import nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401  registers quantized_decomposed

from tessella import compiler, runtime
from tessella.artifacts.plan import from_bytes, to_bytes
from tessella.compiler import fall_back, pipeline, verify
from tessella.compiler.choices import variants
from tessella.compiler.passes import request_for, run
from tessella.compiler.precision import assign
from tessella.compiler.rewrites import lower_quantization, pad_channels
from tessella.core.errors import CompileError, UsageError
from tessella.core.spec import DimRange, TensorSpec
from tessella.device.x86 import code
from tessella.graph import capture, check, interpret
from tessella.graph.graph import Graph, Node
from tessella.graph.onnx import read
from tessella.kernels import catalog
from tessella.kernels.shared import onednn
from tests.support.choices import problem_of
from tests.support.networks import NETWORKS, captured, plan
from tests.support.quantized import calibrated, graph_of

pytestmark = pytest.mark.instructions

torch_codes = torch.ops.quantized_decomposed


def rounded(graph: Graph, kind: str = "fp32", target: str = "cpu", **given) -> Graph:
    """The graph after the passes that round, checked after each."""
    exact = pipeline.optimized(graph)
    calibration = given.pop("calibration", None)
    assignment = assign(exact, kind, given, target, calibration)
    request = request_for(exact, assignment, calibration)
    return run(exact, request, after="optimize", until="lower")


def layers_of(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op in ("conv2d", "linear")]


def on_codes(graph: Graph) -> list[Node]:
    return [n for n in layers_of(graph) if len(n.inputs) == 5]


# ── explicit: torch ───────────────────────────────────────────────────────────────────────────────


def near(x: torch.Tensor, scale: float, zero: int, low: int = -128, high: int = 127):
    dtype = torch.int8 if low < 0 else torch.uint8
    arguments = (scale, zero, low, high, dtype)
    return torch_codes.dequantize_per_tensor(
        torch_codes.quantize_per_tensor(x, *arguments), *arguments
    )


def near_channels(weight: torch.Tensor, scale: torch.Tensor):
    arguments = (scale, torch.zeros_like(scale, dtype=torch.int32), 0, -127, 127, torch.int8)
    return torch_codes.dequantize_per_channel(
        torch_codes.quantize_per_channel(weight, *arguments), *arguments
    )


class Explicit(nn.Module):
    """Powers of two as scales: float32 holds every number exactly, and ties are frequent."""

    def __init__(self, zeros: tuple[int, int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(32, 4)
        for layer in (self.a, self.b, self.last):  # halves and eighths
            layer.weight.data = (layer.weight.data * 32).round() / 64
            layer.bias.data = (layer.bias.data * 8).round() / 8
        self.register_buffer("steps", 2.0 ** -torch.arange(4, 12).float())
        self.zeros = zeros

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.zeros
        x = near(x, 2**-4, first)
        x = F.conv2d(x, near_channels(self.a.weight, self.steps), self.a.bias, padding=1).relu()
        x = near(x, 2**-5, second, 0, 255)
        y = F.conv2d(x, near_channels(self.b.weight, self.steps), self.b.bias, padding=1)
        y = near((y + x).relu(), 2**-4, third)
        y = F.max_pool2d(y, 2).flatten(1)
        return F.linear(y, near_channels(self.last.weight, self.steps[:4]), self.last.bias)


@pytest.mark.parametrize("zeros", [(0, 128, 0), (2, 0, -128), (3, 0, 5), (-7, 7, 1)])
def test_torchs_roundings_are_kept_to_the_last_bit(zeros: tuple[int, int, int]) -> None:
    module = Explicit(zeros)
    graph = graph_of(module, 3, 4, 4)
    made = rounded(graph)
    assert len(on_codes(made)) == 3
    x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(5)) * 3
    x = (x * 32).round() / 32  # ties
    right = module(x)
    assert torch.equal(interpret(made, {"x": x})["scores"], right)
    exact = interpret(made, {"x": x}, upcast=torch.float64)["scores"]
    assert torch.equal(exact, right.double())
    engine = runtime.load(plan(graph, (1, 8, 8)))
    assert torch.equal(engine(x=x)["scores"], right)


def test_even_zero_points_are_taken_in_and_odd_ones_are_a_step() -> None:
    even = rounded(graph_of(Explicit((2, 0, -128)), 3, 4, 4))
    assert [n.output.dtype for n in on_codes(even)] == ["int8", "int8", "float32"]
    assert [n.op for n in even.nodes].count("quantize") == 1
    residual = on_codes(even)[1]
    assert residual.attrs["beta"] == 0.5
    assert residual.inputs[3].dtype == "int8"
    odd = rounded(graph_of(Explicit((3, 128, 5)), 3, 4, 4))
    assert [n.op for n in odd.nodes].count("quantize") > 1


class Fake(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 8)
        self.register_buffer("steps", torch.rand(8) * 0.01 + 0.001)
        self.register_buffer("zeros", torch.zeros(8, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, 0.03, 4, -128, 127)
        weight = torch.fake_quantize_per_channel_affine(
            self.layer.weight, self.steps, self.zeros, 0, -127, 127
        )
        return F.linear(x, weight, self.layer.bias)


def test_fake_quantization_is_read() -> None:
    module = Fake().eval()  # torch exports it for a fixed batch only
    spec = TensorSpec(name="x", dtype="float32", shape=(DimRange(min=5, opt=5, max=5), 16))
    made = rounded(capture(module, (spec,), outputs=("scores",)))
    assert [n.op for n in made.nodes] == ["quantize", "linear"]
    x = torch.randn(5, 16)
    torch.testing.assert_close(interpret(made, {"x": x})["scores"], module(x))


# ── explicit: ONNX ────────────────────────────────────────────────────────────────────────────────


class Reader(CalibrationDataReader):
    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self._left = [generator.standard_normal((4, 3, 8, 8), np.float32) for _ in range(3)]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return {"x": self._left.pop()} if self._left else None


@pytest.fixture(scope="module")
def float_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    ).eval()  # fmt: skip
    path = tmp_path_factory.mktemp("onnx") / "float.onnx"
    torch.onnx.export(
        module, (torch.randn(2, 3, 8, 8),), str(path), input_names=["x"], opset_version=17,
        output_names=["scores"], dynamic_axes={"x": {0: "n"}, "scores": {0: "n"}}, dynamo=False,
    )  # fmt: skip
    return path


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("activations", [QuantType.QInt8, QuantType.QUInt8])
@pytest.mark.parametrize("per_channel", [True, False])
def test_onnx_roundings_are_kept(
    float_onnx: Path, tmp_path: Path, activations: QuantType, per_channel: bool
) -> None:
    path = tmp_path / "quantized.onnx"
    symmetric = {"ActivationSymmetric": activations == QuantType.QInt8, "WeightSymmetric": True}
    quantize_static(
        str(float_onnx), str(path), Reader(), quant_format=QuantFormat.QDQ,
        activation_type=activations, weight_type=QuantType.QInt8, per_channel=per_channel,
        extra_options=symmetric,
        reduce_range=True,  # ONNX Runtime's 8-bit weights saturate on a processor without VNNI
    )  # fmt: skip
    graph = read(path)
    made = rounded(graph)
    assert len(on_codes(made)) == len(layers_of(made)) == 3
    assert all(n.output.dtype == "int8" for n in on_codes(made)[:2])
    x = np.random.default_rng(1).standard_normal((5, 3, 8, 8), np.float32)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (right,) = session.run(None, {"x": x})
    assert np.array_equal(interpret(graph, {"x": torch.from_numpy(x)})["scores"], right)
    assert np.array_equal(runtime.load(plan(graph, (1, 8, 8)))(x=x)["scores"], right)


# ── by calibration ────────────────────────────────────────────────────────────────────────────────


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.a, self.b = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.c, self.last = nn.Conv2d(16, 32, 1), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(x).relu(), 2)
        x = (self.b(self.a(x).relu()) + x).relu()
        return self.last(self.c(x).relu().mean((2, 3)))


def integers_by_hand(module: Residual, calibration: compiler.Calibration, x: torch.Tensor):
    """The network in float64 on integers, written out."""

    def layer(
        at: nn.Module, quantized: torch.Tensor, step: float, name: str, **window
    ) -> torch.Tensor:
        weight = at.weight.detach()
        steps = (weight.flatten(1).abs().amax(1).double() / calibration.weight_limit).float()
        line = (-1, *[1] * (weight.dim() - 1))
        whole = (weight / steps.view(line)).round().double()
        bias = at.bias.detach().double() + calibration.corrections["int8"][name].double()
        product = F.conv2d(quantized, whole, **window) if weight.dim() == 4 else quantized @ whole.T
        line = (-1, 1, 1) if weight.dim() == 4 else (-1,)
        return product * (steps.double() * step).view(line) + bias.view(line)

    def codes_of(values: torch.Tensor, name: str) -> torch.Tensor:
        """Less the zero point."""
        zero = calibration.zero_point(name, "int8")
        return (values / scale(name)).round().clamp(-128 - zero, 127 - zero)

    scale = lambda name: float(torch.tensor(calibration.scale(name, "int8")))  # noqa: E731
    stem = F.conv2d(x, module.stem.weight, module.stem.bias, padding=1).relu().double()
    start = codes_of(F.max_pool2d(stem, 2), "max_pool2d")
    a = layer(module.a, start, scale("max_pool2d"), "relu.1", padding=1).relu()
    a = codes_of(a, "relu.1")
    b = layer(module.b, a, scale("relu.1"), "relu.2", padding=1)
    b = codes_of((b + start * scale("max_pool2d")).relu(), "relu.2")
    c = layer(module.c, b, scale("relu.2"), "relu.3").relu()
    mean = codes_of(c.mean((2, 3)), "mean")
    return layer(module.last, mean, scale("mean"), "scores")


def test_the_rounded_network_is_that_of_integers_by_hand() -> None:
    module = Residual()
    graph = graph_of(module, 3, 8, 8)
    calibration = calibrated(graph, 3, 8, 8)
    first = layers_of(pipeline.optimized(graph))[0].output.name
    made = rounded(graph, "int8", calibration=calibration, **{first: "fp32"})
    assert [n.output.dtype for n in layers_of(made)] == [
        "float32", "int8", "int8", "float32", "float32"
    ]  # fmt: skip
    assert len(on_codes(made)) == 4
    x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(9))
    right = integers_by_hand(module, calibration, x)
    got = interpret(made, {"x": x}, upcast=torch.float64)["scores"]
    torch.testing.assert_close(got, right, rtol=1e-6, atol=1e-6)
    unpadded = {"relu.2", "mean"} if code.adds_in_32_bits() else set()
    assert calibration.zero_points == dict.fromkeys(unpadded, -128)
    near_float = interpret(pipeline.optimized(graph), {"x": x})["scores"]
    assert F.cosine_similarity(got.flatten(), near_float.flatten().double(), dim=0) > 0.999


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_plan_gives_the_rounded_networks_answers(kind: str) -> None:
    graph = graph_of(Residual(), 3, 8, 8)
    calibration = calibrated(graph, 3, 8, 8, kinds=(kind,))
    made = plan(graph, (1, 2, 4), precision=kind, calibration=calibration)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(9))
    right = interpret(rounded(graph, kind, calibration=calibration), {"x": x})["scores"]
    got = runtime.load(from_bytes(to_bytes(made)))(x=x)["scores"]  # as a file, checked
    torch.testing.assert_close(got, right, rtol=1e-2, atol=1e-2)
    kernels = {s.kernel for s in made.program.buckets[0].steps}
    assert kind == "fp8" or sum("int8." in f"{k}." for k in kernels) > 1
    assert made.manifest.precision == kind


def test_corrections_take_the_mean_error_away() -> None:
    graph = graph_of(Residual(), 3, 8, 8)
    torch.manual_seed(3)
    x = torch.randn(64, 3, 8, 8)
    calibration = compiler.calibrate(graph, [{"x": x}], kinds=("fp8",))
    exact = interpret(pipeline.optimized(graph), {"x": x}, upcast=torch.float64)["scores"]

    def mean_error(calibration: compiler.Calibration) -> float:
        made = interpret(rounded(graph, "fp8", calibration=calibration), {"x": x})["scores"]
        return float((made - exact).mean(0).abs().mean())

    without = mean_error(dataclasses.replace(calibration, corrections={}))
    assert mean_error(calibration) < 0.5 * without


@functools.cache
def of_images(name: str) -> compiler.Calibration:
    torch.manual_seed(1)
    images = [{"image": torch.randn(2, 3, 32, 32)}]
    return compiler.calibrate(captured(name), images, method="min-max", kinds=("int8", "fp8"))


def test_resnet_stays_in_int8_between_stem_and_pool() -> None:
    made = rounded(captured("resnet18"), "int8", calibration=of_images("resnet18"))
    check(made)
    # three input channels are worth it where products of int8 do not saturate
    stem = [] if code.adds_in_32_bits() else ["conv1"]
    assert [n.layer for n in layers_of(made) if len(n.inputs) < 5] == stem
    floating = [n for n in on_codes(made) if n.output.dtype == "float32"]
    assert [n.layer for n in floating] == ["layer4.1.conv2", "fc"]
    ops = [n.op for n in made.nodes]
    assert (ops.count("quantize"), ops.count("dequantize")) == (2, 1)
    assert sum(n.inputs[3] is not None for n in on_codes(made)) == 8


def test_branches_are_joined_in_int8() -> None:
    made = rounded(captured("googlenet"), "int8", calibration=of_images("googlenet"))
    assert {n.output.dtype for n in made.nodes if n.op == "cat"} == {"int8", "float32"}
    assert [n.output.dtype for n in made.nodes if n.op == "cat"].count("float32") == 1  # the last
    ops = [n.op for n in made.nodes]
    assert (ops.count("quantize"), ops.count("dequantize")) == (2, 0)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 16, 1), (16, 32, 2), (48, 16, 1))
        self.first, self.below, self.last = (nn.Conv2d(i, o, 3, s, 1) for i, o, s in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        larger = F.interpolate(self.below(x).relu(), scale_factor=2.0, mode="nearest")
        made: torch.Tensor = self.last(torch.cat([larger, x], 1))
        return made


def test_the_nearest_pixels_are_repeated_in_int8() -> None:
    torch.manual_seed(0)
    graph = graph_of(Decoder(), 3, 8, 8)
    calibration = calibrated(graph, 3, 8, 8, kinds=("int8",))
    made = rounded(graph, "int8", calibration=calibration)
    moved = [(n.op, n.output.dtype) for n in made.nodes if n.op in ("interpolate", "cat")]
    assert moved == [("interpolate", "int8"), ("cat", "int8")]
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(9))
    right = interpret(made, {"x": x})["scores"]
    got = runtime.load(plan(graph, (1, 2, 4), precision="int8", calibration=calibration))(x=x)
    torch.testing.assert_close(got["scores"], right, rtol=1e-2, atol=1e-2)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 32, 3, padding=1), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.first(x).flatten(2).transpose(1, 2))
        return made


def test_a_map_s_pixels_are_rows_that_kernels_of_int8_take() -> None:
    """Flattened first, they were strided numbers, which the reference alone multiplied."""
    graph = graph_of(Rows(), 3, 8, 8)
    calibration = calibrated(graph, 3, 8, 8, kinds=("int8",))
    made = plan(graph, (1, 2, 4), precision="int8", calibration=calibration)
    (step,) = (s for s in made.program.buckets[0].steps if s.op == "linear")
    assert "int8" in step.kernel


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x


def test_the_sums_of_a_transformer_stay_floating() -> None:
    graph = graph_of(Block(), 5, 32)
    made = rounded(graph, "int8", calibration=calibrated(graph, 5, 32))
    assert {n.output.dtype for n in on_codes(made)} == {"float32"}
    assert all(n.inputs[3].dtype == "float32" for n in on_codes(made) if n.inputs[3] is not None)


class PostNorm(nn.Module):
    """BERT's order: what a norm makes is read by the next layers, and is their residual."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.LayerNorm(32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = self.norm(x + self.down(F.gelu(self.up(x))))
        return x


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_norm_makes_codes_and_the_residual_that_is_not_rounded(kind: str) -> None:
    graph = graph_of(PostNorm(), 5, 32)
    calibration = calibrated(graph, 5, 32, kinds=(kind,))
    made = rounded(graph, kind, calibration=calibration, target="sm_90")
    ops = [n.op for n in made.nodes]
    assert (ops.count("quantize"), ops.count("dequantize")) == (4, 0)  # two norms, two GELUs
    assert {n.attrs.get("fast_accumulation", False) for n in on_codes(made)} == {kind == "fp8"}
    residuals = [n.inputs[3] for n in on_codes(made) if n.inputs[3] is not None]
    assert [made.producer(v).op for v in residuals] == ["layer_norm", "layer_norm"]
    exact = pipeline.optimized(graph)
    request = request_for(exact, assign(exact, kind, {}, "sm_90", calibration), calibration)
    fused = run(made, request, after="lower", until="fuse")
    chains = [n for n in fused.nodes if n.op == "pointwise" and len(n.outputs) == 2]
    small = {"int8": "int8", "fp8": "float8_e4m3fn"}[kind]
    assert [[v.dtype for v in n.outputs] for n in chains] == [[small, "float16"]] * 2
    assert not {"dequantize", "quantize", "layer_norm"} & {n.op for n in fused.nodes}
    x = torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(7))
    exact, before, after = (
        interpret(g, {"x": x}, upcast=torch.float64)["scores"]
        for g in (pipeline.optimized(graph), made, fused)
    )
    error = lambda got: float((got - exact).norm() / exact.norm())  # noqa: E731
    assert error(before) < {"int8": 0.01, "fp8": 0.03}[kind]
    assert error(after) < 1.2 * error(before)
    answers = runtime.load(plan(graph, (1, 2, 4), precision=kind, calibration=calibration))(x=x)
    assert error(answers["scores"].double()) < 1.2 * error(before)


class Attention(nn.Module):
    """A transformer's attention; ``early``: a file's own rounding, before heads become rows."""

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.early = early

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.reshape(x.shape[0], 5, 4, 8).permute(0, 2, 1, 3)

        y = F.scaled_dot_product_attention(heads(self.q(x)), heads(self.k(x)), heads(self.v(x)))
        y = near(y, 2**-6, 0) if self.early else y
        y = y.permute(0, 2, 1, 3).reshape(x.shape[0], 5, 32)
        if self.early:
            weight = near_channels(self.out.weight, torch.full((32,), 2.0**-8))
            return F.linear(y, weight, self.out.bias)
        return self.out(y)


@pytest.mark.parametrize(("kind", "early"), [("int8", False), ("fp8", False), ("fp32", True)])
def test_attentions_rows_are_rounded_where_they_are_dense(
    kind: str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(Attention(early), 5, 32)
    calibration = None if early else calibrated(graph, 5, 32, kinds=(kind,))
    made = rounded(graph, kind, target="sm_90", calibration=calibration)
    ops = [n.op for n in made.nodes]
    last = ops.index("scaled_dot_product_attention")
    assert ops[last:] == [
        "scaled_dot_product_attention", "permute", "reshape", "quantize", "linear"
    ]  # fmt: skip
    laid_out, formats = variants.with_layout(made, "contiguous")
    concrete = laid_out.at_batch(4)
    node = next(n for n in concrete.nodes[last:] if n.op == "quantize")
    problem = problem_of(concrete, node, formats)
    for id in ("quantize.tiled", "quantize.generated"):
        assert catalog.kernel(id).refusal(problem) is None
    monkeypatch.setattr(lower_quantization, "_settle", lambda graph, node: ())
    before = rounded(graph, kind, target="sm_90", calibration=calibration)
    assert [n.op for n in before.nodes][last + 1] == "quantize"
    x = torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(7))
    right, got = (interpret(g, {"x": x})["scores"] for g in (before, made))
    assert torch.equal(got, right)


class Capped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
        self.a.weight.data *= 10

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.relu6(self.a(x))).mean((2, 3))


def test_relu6_is_the_range_of_the_codes() -> None:
    graph = graph_of(Capped(), 16, 4, 4)
    calibration = calibrated(graph, 16, 4, 4, method="min-max")
    made = rounded(graph, "int8", calibration=calibration)
    assert made.nodes[1].output.dtype == "int8"
    assert made.nodes[1].attrs["activation"] == "relu"
    x = torch.randn(3, 16, 4, 4, generator=torch.Generator().manual_seed(2))
    exact = interpret(pipeline.optimized(graph), {"x": x})["scores"]
    got = interpret(made, {"x": x})["scores"]
    assert F.cosine_similarity(got.flatten(), exact.flatten(), dim=0) > 0.999


# ── by layer ──────────────────────────────────────────────────────────────────────────────────────


def test_layers_have_precisions_of_their_own() -> None:
    graph = graph_of(Residual(), 3, 8, 8)
    names = compiler.layers(graph)
    assert names == ("relu", "relu.1", "relu.2", "relu.3", "scores")
    calibration = calibrated(graph, 3, 8, 8, kinds=("int8", "fp8"))
    chosen = {"relu.1": "fp8", "relu.3": "bf16", "scores": "int8"}
    made = plan(graph, (1, 2, 2), precisions=chosen, calibration=calibration)
    found = {s.layer: s for s in made.program.buckets[0].steps if s.layer}
    buffers = {b.name: b.dtype for b in made.program.buckets[0].buffers}
    read = {name: buffers.get(s.inputs[0]) for name, s in found.items()}
    assert (read["a"], read["b"], read["c"]) == ("float8_e4m3fn", "float32", "bfloat16")
    assert read["last"] == "int8"
    alone = plan(graph, (1, 2, 2), precision="int8", precisions={"relu.2": "fp32"},
                 calibration=calibration)  # fmt: skip
    steps = {s.layer: s for s in alone.program.buckets[0].steps if s.layer}
    assert len(steps["b"].inputs) == 4
    assert len(steps["a"].inputs) == len(steps["c"].inputs) == 5


def test_what_is_not_right_is_refused() -> None:
    graph = graph_of(Residual(), 3, 8, 8)
    with pytest.raises(UsageError, match="needs a calibration"):
        plan(graph, precision="int8")
    with pytest.raises(UsageError, match="no operation of the optimized network"):
        plan(graph, precisions={"conv1": "fp16"})
    with pytest.raises(UsageError, match="no precision of a single layer"):
        plan(graph, precisions={"relu": "tf32"})
    calibration = calibrated(graph, 3, 8, 8)
    with pytest.raises(UsageError, match="only convolutions and linear layers"):
        plan(graph, precisions={"max_pool2d": "int8"}, calibration=calibration)
    other = calibrated(graph_of(Capped(), 16, 4, 4), 16, 4, 4)
    with pytest.raises(CompileError, match="has not seen this value"):
        plan(graph, precision="int8", calibration=other)


def test_rounding_that_breaks_a_network_is_refused() -> None:
    module = Residual()
    graph = graph_of(module, 3, 8, 8)
    calibration = calibrated(graph, 3, 8, 8)
    tiny = {name: value / 500 for name, value in calibration.thresholds.items()}
    with pytest.raises(CompileError, match="changes what the network says"):
        plan(graph, precision="int8", calibration=dataclasses.replace(calibration, thresholds=tiny))


def test_a_plan_whose_answers_rounding_makes_noisy_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipped to less than half they keep 17 dB, which is no warning; to a third 5."""
    monkeypatch.setattr("tessella.compiler.verify.LEAST_COSINE", 0.8)
    torch.manual_seed(0)
    graph = graph_of(Residual(), 3, 8, 8)
    calibration = calibrated(graph, 3, 8, 8)
    for clipped, is_noisy in ((2.5, False), (3.0, True)):
        told: list[str] = []
        small = {name: value / clipped for name, value in calibration.thresholds.items()}
        plan(
            graph,
            precision="int8",
            calibration=dataclasses.replace(calibration, thresholds=small),
            emit=lambda event, told=told: told.append(f"{event.kind}: {event.text}"),
        )
        assert any(t.startswith("warning: rounding to int8 or fp8") for t in told) is is_noisy


class Uneven(nn.Module):
    """One channel between ``a`` and ``b`` is many times as large as the others."""

    def __init__(self, times: float = 1e4) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(16, 16, 1, bias=False) for _ in range(4))
        with torch.no_grad():
            self.a.weight[0] *= times
            self.b.weight[:, 0] /= times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x).relu()).tanh()
        return self.d(self.c(x).relu()).flatten(1)


def test_a_layer_that_int8_does_not_suit_falls_back_and_the_plan_says_so() -> None:
    torch.manual_seed(0)
    module = Uneven()
    graph = graph_of(module, 16, 4, 4)
    told: list[str] = []
    made = plan(
        graph,
        precision="int8",
        calibration=calibrated(graph, 16, 4, 4, method="min-max"),
        emit=lambda event: told.append(event.text),
    )
    (fallen,) = made.manifest.precisions.items()
    assert fallen[1] == "fp32"
    layers = {s.layer: s for s in made.program.buckets[0].steps if s.op == "conv2d"}
    assert [name for name, step in layers.items() if len(step.inputs) < 5] == ["b"]
    assert f"computed in float32 instead: {fallen[0]}" in told
    assert f"{fallen[0]} fp32" in str(made)
    x = torch.randn(2, 16, 4, 4, generator=torch.Generator().manual_seed(2))
    got, right = runtime.load(made)(x=x)["scores"], module(x)
    assert F.cosine_similarity(got.flatten(), right.flatten(), dim=0) > 0.99
    found = calibrated(graph, 16, 4, 4, method="min-max")
    with pytest.raises(CompileError, match="changes what the network says"):
        plan(graph, precisions={fallen[0]: "int8"}, calibration=found)


def test_the_loudest_layers_of_a_noisy_network_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says is like what the network says, but not within 19 dB: on a CPU that is mended,
    but where it would cost too much.
    """
    torch.manual_seed(0)
    module = Uneven(times=50)
    graph = graph_of(module, 16, 4, 4)
    found = calibrated(graph, 16, 4, 4, method="min-max")
    x = torch.randn(64, 16, 4, 4, generator=torch.Generator().manual_seed(2))
    right = module(x).detach()

    def noise(target: str) -> tuple[dict[str, str], float]:
        made = plan(graph, (64, 64, 64), precision="int8", calibration=found, target=target)
        error = runtime.load(made)(x=x)["scores"] - right
        return dict(made.manifest.precisions), float(error.square().mean())

    none, noisy = noise("cpu")  # of three layers "b" has more of the products than may fall
    assert none == {}
    monkeypatch.setattr(fall_back, "MOST_WORK", 1.0)
    fallen, quiet = noise("cpu")
    assert {n.layer for n in pipeline.optimized(graph).nodes if n.output.name in fallen} == {"b"}
    assert quiet < noisy / 4


@pytest.mark.parametrize("saturating", [False, True])
def test_weights_are_as_wide_as_the_processor_multiplies_at_full_speed(
    saturating: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "narrow_sums", lambda: saturating)
    graph = graph_of(Residual(), 3, 8, 8)
    calibration = calibrated(graph, 3, 8, 8, target="cpu")
    made = plan(graph, precision="int8", calibration=calibration)
    weights = [t for t in made.weights.values() if t.dtype == torch.int8 and t.dim()]
    widest = [int(t.abs().max()) for t in weights]
    assert set(widest) == {64 if saturating else 127}
    assert calibrated(graph, 3, 8, 8, target="sm_90").weight_limit == 127


@pytest.mark.parametrize("factor", [1e6, 300.0])
def test_numbers_beyond_float16_are_refused(factor: float) -> None:
    module = Residual()
    module.stem.weight.data *= factor  # its weights, or what comes of them, exceed 65,504
    module.a.weight.data *= factor
    with pytest.raises(CompileError, match=r"float16|does not compute"):
        plan(graph_of(module, 3, 8, 8), precision="fp16")


def test_fp8_and_uint8_roundings_move_only_where_they_may() -> None:
    graph = captured("lenet")
    _, channels, size = NETWORKS["lenet"]
    calibration = calibrated(graph, channels, size, size, kinds=("fp8",))
    made = rounded(graph, "fp8", calibration=calibration)
    for node in made.nodes:
        if node.op in lower_quantization.MOVES and node.output.dtype == "float8_e4m3fn":
            assert node.op in lower_quantization.VIEWS


@pytest.mark.parametrize(
    ("name", "kind"), [("resnet18", "int8"), ("resnet18", "fp8"), ("googlenet", "int8")]
)
def test_a_gpus_kernels_take_every_rounded_layer(name: str, kind: str) -> None:
    found, exact = of_images(name), pipeline.optimized(captured(name))
    assignment = assign(exact, kind, {}, "sm_90", found)
    assert assignment.rest == "float16"
    made = run(exact, request_for(exact, assignment, found), after="optimize", until="fuse")
    laid_out, formats = variants.with_layout(made, "channels_last")
    concrete = laid_out.at_batch(8)
    hopper = {"conv2d": "conv2d.implicit_gemm.sm90", "linear": "linear.wgmma.sm90"}
    others = {
        "quantize": "quantize.tiled", "dequantize": "dequantize.tiled",
        "max_pool2d": "max_pool2d.windows",
    }  # fmt: skip
    seen = set()
    for node in concrete.nodes:
        problem = problem_of(concrete, node, formats)
        id = hopper.get(node.op) if len(node.inputs) == 5 else others.get(node.op)
        if id is None:
            assert not {"int8", "float8_e4m3fn"} & {node.inputs[0].dtype} or node.op in (
                "reshape", "cat"
            ), node  # fmt: skip
            continue
        assert catalog.kernel(id).load().fits(problem) is None, node
        seen.add(id)
    assert hopper.keys() <= {id.split(".")[0] for id in seen}


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(16, 24, 3, padding=1), nn.Conv2d(24, 20, 1)
        self.c, self.last = nn.Conv2d(24, 32, 1), nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.a(x).relu()
        return self.last(self.b(x).mean((2, 3))), self.c(x)


def test_padded_channels_change_no_answer() -> None:
    graph = capture(
        Narrow().eval(),
        (TensorSpec(name="x", dtype="float32", shape=(DimRange(min=1, opt=2, max=8), 16, 4, 4)),),
        outputs=("scores", "map"),
    )
    made = rounded(graph, "int8", calibration=calibrated(graph, 16, 4, 4))
    x = torch.randn(3, 16, 4, 4)
    before = interpret(made, {"x": x})
    assert pad_channels.apply(made) == 1
    check(made)
    assert made.nodes[1].output.shape[1] == 32  # 24 and zeros; 20, read by a mean, stays
    after = interpret(made, {"x": x})
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(("place", "least", "most"), [(0.0, 0.0, 5e-6), (0.499999, 4e-3, 0.5)])
def test_numbers_between_two_steps_are_noise(place: float, least: float, most: float) -> None:
    """float32 and float64 round them alike; kernels whose last bits differ do not."""
    graph = graph_of(nn.Linear(16, 16), 16)
    calibration = calibrated(graph, 16)
    step = calibration.scale("x", "int8")
    samples = {"x": step * (torch.arange(16.0)[None] + place)}
    answers = verify.expected(pipeline.optimized(graph), 1, 8, samples, target="cpu")
    rounds = rounded(graph, "int8", calibration=calibration)
    found = verify.rounded(answers, rounds, lambda _: None, target="cpu", alike=False)
    assert least <= found.noise <= most
    for noise in (0.4, 30.0):  # a detector's boxes may move wholly; answers of zeros are off by 1
        moved = dataclasses.replace(found, noise=noise)
        assert moved.tolerance("int8") < 1
        assert moved.least_cosine("int8") > 0.5


def test_what_falls_otherwise_inside_is_noise_though_the_first_step_rounds() -> None:
    """Inputs that are whole steps lose their last bits at once; biases and factors keep theirs."""
    first = nn.Linear(16, 16)
    nn.init.eye_(first.weight)
    nn.init.zeros_(first.bias)
    graph = graph_of(nn.Sequential(first, nn.Linear(16, 16)), 16)
    calibration = calibrated(graph, 16)
    step = calibration.scale("x", "int8")
    samples = {"x": step * torch.arange(16.0)[None]}
    answers = verify.expected(pipeline.optimized(graph), 1, 8, samples, target="cpu")
    rounds = rounded(graph, "int8", calibration=calibration)
    rounds.constants[rounds.nodes[1].inputs[2]] = torch.full((16,), 0.499999)  # of a step
    found = verify.rounded(answers, rounds, lambda _: None, target="cpu", alike=False)
    assert 4e-3 < found.noise < 0.5
