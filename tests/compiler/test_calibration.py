"""Calibration against brute force in float64: histograms, thresholds, errors of layers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella import compiler
from tessella.compiler import histogram as h
from tessella.compiler.calibration import Calibration, rounded_weight
from tessella.core.errors import ArtifactError, CompileError, UsageError
from tessella.core.spec import DimRange, TensorSpec
from tessella.device.x86 import code
from tessella.graph import capture
from tessella.graph.graph import Graph

BATCH = DimRange(min=1, opt=2, max=8)


def histogram_of(*tensors: torch.Tensor) -> h.Histogram:
    made = h.Histogram()
    for tensor in tensors:
        made.add(tensor)
    return made


def bell(scale: float, count: int = 20_000, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(seed))


# ── histograms ────────────────────────────────────────────────────────────────────────────────────


def test_a_grown_histogram_is_that_of_all_numbers_at_once() -> None:
    parts = [bell(0.01), bell(3.0, seed=1), bell(0.5, seed=2).relu()]
    grown = histogram_of(*parts)
    numbers = torch.cat(parts).abs().double().numpy()
    edges = np.arange(h.BINS + 1) * grown.width
    assert grown.width * h.BINS / 2 < numbers.max() <= grown.width * h.BINS
    assert grown.largest == pytest.approx(numbers.max())
    assert grown.zeros == (numbers == 0).sum() > 1000
    np.testing.assert_array_equal(grown.counts, np.histogram(numbers[numbers > 0], edges)[0])


def test_zeros_alone_choose_no_threshold() -> None:
    empty = histogram_of(torch.zeros(5))
    assert {choose(empty, h.LEVELS) for choose in h.METHODS.values()} == {0.0}


@pytest.mark.parametrize("share", [99.0, 99.99])
def test_percentile_is_numpys_within_a_bin(share: float) -> None:
    numbers = torch.cat([bell(1.0, 50_000), torch.zeros(10_000)])
    made = h.percentile(histogram_of(numbers), share=share)
    right = np.quantile(numbers.abs().numpy(), share / 100, method="inverted_cdf")
    assert right <= made <= right + 2 * histogram_of(numbers).width


def test_mean_square_is_the_least_on_the_numbers_themselves() -> None:
    numbers = torch.cat([bell(1.0, 200_000), torch.tensor([12.0])])  # one far away
    found = histogram_of(numbers)
    chosen = h.mean_square(found)

    def error(threshold: float) -> float:
        step = threshold / 127
        rounded = (numbers.double() / step).round().clamp(-127, 127) * step
        return float((numbers.double() - rounded).square().mean())

    tried = [found.edge(bins) for bins in range(h.FEWEST, h.BINS + 1, h.STRIDE)]
    assert chosen < 0.6 * found.largest
    assert error(chosen) <= 1.02 * min(map(error, tried))


def test_mean_square_cuts_a_normal_distribution_where_theory_says() -> None:
    # Banner et al. 2019: 3.92 σ for 8 bits
    assert h.mean_square(histogram_of(bell(2.0, 400_000))) == pytest.approx(2 * 3.92, rel=0.08)


def test_entropy_is_that_of_loops() -> None:
    numbers = torch.cat([bell(1.0, 5000), bell(20.0, 30, seed=1)])
    found = histogram_of(numbers)
    tried = [found.filled, *range(found.filled - found.filled % h.STRIDE, h.FEWEST - 1, -h.STRIDE)]
    some = tried[::24]
    for bins in some:
        assert h.divergence(found.counts, bins) == pytest.approx(loops(found.counts, bins))
    costs = [h.divergence(found.counts, bins) for bins in tried]
    assert h.entropy(found) == found.edge(tried[int(np.argmin(costs))])


def loops(counts: np.ndarray, bins: int) -> float:
    """Kullback and Leibler's divergence, number by number."""
    p = [float(c) for c in counts[:bins]]
    p[-1] += float(sum(counts[bins:]))
    q = [0.0] * bins
    for level in range(127):
        own = range(level * bins // 127, (level + 1) * bins // 127)
        occupied = [i for i in own if counts[i] > 0]
        for i in occupied:
            q[i] = sum(float(counts[j]) for j in own) / len(occupied)
    there = [i for i in range(bins) if p[i] > 0]
    q = [max(value, 0.5) for value in q]
    p_sum, q_sum = sum(p[i] for i in there), sum(q[i] for i in there)
    return sum(p[i] / p_sum * math.log(p[i] / p_sum / (q[i] / q_sum)) for i in there)


# ── networks ──────────────────────────────────────────────────────────────────────────────────────


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last = nn.Conv2d(16, 8, 3, padding=1), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.max_pool2d(self.conv(x).relu(), 2).flatten(1))


def graph_of(module: nn.Module, *shape: int) -> Graph:
    spec = TensorSpec(name="x", dtype="float32", shape=(BATCH, *shape))
    return capture(module.eval(), (spec,), outputs=("scores",))


@pytest.fixture(scope="module")
def net() -> tuple[Net, Graph, list[dict[str, torch.Tensor]]]:
    module = Net()
    samples = bell(1.5, 8 * 16 * 16).reshape(8, 16, 4, 4)
    return module, graph_of(module, 16, 4, 4), [{"x": samples[:5]}, {"x": samples[5:]}]


@pytest.fixture(scope="module")
def found(net: tuple[Net, Graph, list[dict[str, torch.Tensor]]]) -> Calibration:
    return compiler.calibrate(
        net[1], net[2], method="min-max", kinds=("int8", "fp8"), target="reference"
    )


def test_moved_values_share_a_scale(
    net: tuple[Net, Graph, list[dict[str, torch.Tensor]]], found: Calibration
) -> None:
    module, _, batches = net
    x = torch.cat([b["x"] for b in batches])
    hidden = float(module.conv(x).relu().detach().max())
    assert found.samples == 8
    assert found.largest["x"] == pytest.approx(float(x.abs().max()))
    for name in ("relu", "max_pool2d", "reshape"):
        assert found.thresholds[name] == pytest.approx(hidden)
    assert found.scale("x", "int8") == pytest.approx(float(x.abs().max()) / 127)
    assert found.scale("x", "fp8") == pytest.approx(float(x.abs().max()) / 448)


def test_moved_constants_have_a_scale() -> None:
    """As a detector's queries, which a layer reads that were learned, not computed."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.layer = nn.Parameter(bell(2.0, 24).reshape(3, 8)), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.queries.expand(len(x), -1, -1)) + x

    asks = Asks()
    graph = graph_of(asks, 3, 4)
    made = compiler.calibrate(graph, [{"x": torch.zeros(2, 3, 4)}], method="min-max")
    (name,) = (n["input"].name for n in graph.nodes if n.op == "linear")
    assert made.largest[name] == pytest.approx(float(asks.queries.detach().abs().max()))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_errors_and_corrections_are_those_of_float64(
    net: tuple[Net, Graph, list[dict[str, torch.Tensor]]], found: Calibration, kind: str
) -> None:
    module, _, batches = net
    x = torch.cat([b["x"] for b in batches]).double()
    weight = module.conv.weight.detach().double()
    scale = found.scale("x", kind)
    if kind == "int8":
        near = (x / scale).round().clamp(-128, 127) * scale
        steps = weight.abs().amax((1, 2, 3), keepdim=True) / 127
        weight_near = (weight / steps).round() * steps
    else:
        near = (x / scale).float().to(torch.float8_e4m3fn).double() * scale
        steps = weight.abs().amax((1, 2, 3), keepdim=True) / 448
        weight_near = (weight / steps).float().to(torch.float8_e4m3fn).double() * steps
    exact = F.conv2d(x, weight, padding=1)
    error = F.conv2d(near, weight_near, padding=1) - exact
    mean = error.mean((0, 2, 3))
    left = error - mean[:, None, None]
    snr_db = 10 * torch.log10(exact.square().sum() / left.square().sum())
    assert found.snr_db[kind]["relu"] == pytest.approx(float(snr_db), abs=0.05)
    made = found.corrections[kind]["relu"].double()
    torch.testing.assert_close(made, -mean, rtol=0.02, atol=float(mean.abs().max()) * 0.02)


def test_a_weights_scale_is_each_channels_own() -> None:
    weight = torch.tensor([[1.0, -2.0], [0.0, 0.0], [0.5, 0.25]])
    quantized, scale = rounded_weight(weight, "int8", 127)
    assert quantized.tolist() == [[64, -127], [0, 0], [127, 64]]
    torch.testing.assert_close(scale, torch.tensor([2 / 127, 1.0, 0.5 / 127]))


class Sided(nn.Module):
    """Layers that read what has both signs, what reaches a little below zero, and what does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.deep = nn.Conv2d(16, 24, 1), nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.deep.weight.data *= 8  # far above zero, not far below
        self.narrow, self.rows = nn.Conv2d(24, 16, 1), nn.Linear(16, 16)
        self.more, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.rows.weight.data *= 20
        self.more.weight.data *= 20

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.hardswish(self.deep(self.wide(x).relu()))
        x = F.gelu(self.rows(self.narrow(x).relu().mean((2, 3))))
        return self.last(F.gelu(self.more(x)))


@pytest.mark.parametrize("method", h.METHODS)
def test_what_hardly_reaches_below_zero_has_twice_the_steps(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(code, "adds_in_32_bits", lambda: True)
    graph = graph_of(Sided(), 16, 4, 4)
    batches = [{"x": bell(1.5, 64 * 16 * 16).reshape(64, 16, 4, 4)}]
    found = compiler.calibrate(graph, batches, method=method, target="cpu")
    zeros = found.zero_points
    # not "relu", around which zeros are padded; nor "gelu", whose layer would write float32 then,
    # but for the one before the network's result
    least = {"hardswish": -0.375, "mean": 0.0, "gelu.1": -0.17}
    assert zeros.keys() == least.keys()
    for name, zero in zeros.items():
        step = found.scale(name, "int8")
        assert step * (127 - zero) == pytest.approx(found.thresholds[name])
        assert zero % 2 == 0
        assert abs(-128 - zero - least[name] / step) <= 2  # steps between what is least and -128
    assert compiler.load_calibration(found.save(tmp_path / "c")).zero_points == zeros
    for target in ("reference", "sm_90"):
        other = compiler.calibrate(graph, batches, method=method, target=target)
        assert other.zero_points == found.suiting(target).zero_points == {}
    assert found.suiting("cpu").zero_points == zeros
    for layer in ("relu.1", "gelu", "linear", "scores"):
        if method == "min-max" and layer in found.snr_db["int8"]:
            assert found.snr_db["int8"][layer] > other.snr_db["int8"][layer] + 3
    with pytest.raises(ValueError, match="an even number from -128 to 0, not -127"):
        replace(found, zero_points={"mean": -127}).save(tmp_path / "odd")


def test_it_is_saved_and_read(found: Calibration, tmp_path: Path) -> None:
    again = compiler.load_calibration(found.save(tmp_path / "net.calibration"))
    assert vars(again).keys() == vars(found).keys()
    numbers = ("method", "samples", "thresholds", "largest", "snr_db", "weight_limit")
    for name in (*numbers, "zero_points"):
        assert getattr(again, name) == getattr(found, name)
    assert torch.equal(again.inputs["x"], found.inputs["x"])
    for kind, layers in found.corrections.items():
        for layer, tensor in layers.items():
            assert torch.equal(again.corrections[kind][layer], tensor)


def test_what_cannot_be_calibrated_is_refused(
    net: tuple[Net, Graph, list[dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    _, graph, batches = net
    with pytest.raises(UsageError, match="unknown calibration"):
        compiler.calibrate(graph, batches, method="guess")
    with pytest.raises(UsageError, match="unknown rounding"):
        compiler.calibrate(graph, batches, kinds=("int4",))
    with pytest.raises(CompileError, match="nothing to calibrate with"):
        compiler.calibrate(graph, [])
    with pytest.raises(CompileError, match="not finite"):
        compiler.calibrate(graph, [{"x": torch.full((1, 16, 4, 4), math.nan)}])
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(ArtifactError, match="not a calibration"):
        compiler.load_calibration(tmp_path / "other")
