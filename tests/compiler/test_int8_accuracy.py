"""INT8 and FP8 plans keep the accuracy of a network trained on real data, by calibration alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella import compiler, runtime
from tessella.core.spec import DimRange, TensorSpec
from tessella.device.x86 import code
from tessella.graph import capture
from tessella.graph.graph import Graph
from tests.support.digits import shuffled
from tests.support.networks import plan
from tests.support.static_int8 import answers_in_int8

pytestmark = pytest.mark.instructions

TRAIN, CALIBRATION = 1200, 300  # of 1,797 handwritten digits; the others are the test's


class Block(nn.Module):
    def __init__(self, channels: int, made: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, made, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.norm, self.norm2 = nn.BatchNorm2d(made), nn.BatchNorm2d(made)
        self.past = nn.Conv2d(channels, made, 1, stride) if channels != made else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.norm2(self.second(F.relu(self.norm(self.first(x)))))
        return F.relu(inside + self.past(x))


class Inverted(nn.Module):
    """MobileNetV3's block: a depthwise convolution, squeeze and excitation, hardswish."""

    def __init__(self, channels: int, inside: int, stride: int) -> None:
        super().__init__()
        self.wide = nn.Conv2d(channels, inside, 1, bias=False)
        self.deep = nn.Conv2d(inside, inside, 3, stride, 1, groups=inside, bias=False)
        self.squeeze, self.excite = nn.Conv2d(inside, 16, 1), nn.Conv2d(16, inside, 1)
        self.narrow = nn.Conv2d(inside, channels, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (inside, inside, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.hardswish(self.norms[0](self.wide(x)))
        y = F.hardswish(self.norms[1](self.deep(y)))
        y = y * F.hardsigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        y = self.norms[2](self.narrow(y))
        return x + y if x.shape == y.shape else y


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    return shuffled()


@pytest.fixture(scope="module")
def trained(digits: tuple[torch.Tensor, torch.Tensor]) -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    images, labels = (t[:TRAIN] for t in digits)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), Block(16, 16, 1),
        Block(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return train(net, images, labels)


def train(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[nn.Module, Graph]:
    solver = torch.optim.AdamW(net.parameters(), 5e-3)
    for _ in range(6):
        for batch in torch.randperm(TRAIN).split(50):
            solver.zero_grad()
            F.cross_entropy(net(images[batch]), labels[batch]).backward()
            solver.step()
    spec = TensorSpec(
        name="image", dtype="float32", shape=(DimRange(min=1, opt=64, max=64), 1, 8, 8)
    )
    return net.eval(), capture(net, (spec,), outputs=("scores",))


@pytest.mark.parametrize(
    ("kind", "method"),
    [("int8", m) for m in ("min-max", "percentile", "entropy", "mse")] + [("fp8", "mse")],
)
def test_top1_stays_within_half_a_point(
    digits: tuple[torch.Tensor, torch.Tensor],
    trained: tuple[nn.Module, Graph],
    kind: str,
    method: str,
) -> None:
    (images, labels), (net, graph) = digits, trained
    shown = [{"image": batch} for batch in images[:CALIBRATION].split(50)]
    calibration = compiler.calibrate(graph, shown, method=method, kinds=(kind,))
    made = plan(graph, (64, 64, 64), precision=kind, calibration=calibration)
    scores = runtime.load(made)(image=images[TRAIN:])["scores"]
    with torch.no_grad():
        right = net(images[TRAIN:])

    def top1(given: torch.Tensor) -> float:
        return 100 * float((given.argmax(1) == labels[TRAIN:]).float().mean())

    assert top1(right) > 95
    assert top1(scores) >= top1(right) - 0.5
    assert (scores.argmax(1) == right.argmax(1)).float().mean() >= 0.99
    layers = [s for s in made.program.buckets[0].steps if s.op in ("conv2d", "linear")]
    first = kind == "fp8" or not code.adds_in_32_bits()  # computes in float32
    assert sum(len(s.inputs) == 5 for s in layers) == len(layers) - first
    assert min(calibration.snr_db[kind].values()) > (35 if kind == "int8" else 25)


def test_depthwise_layers_and_excitations_lose_less_than_half_a_point(
    digits: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Where layers read what hardly reaches below zero, a zero point is worth some decibels."""
    torch.manual_seed(0)
    images, labels = digits
    net, graph = train(
        nn.Sequential(
            nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.Hardswish(), Inverted(16, 64, 1),
            Inverted(16, 96, 2), Inverted(16, 96, 1), nn.Conv2d(16, 96, 1), nn.Hardswish(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10),
        ), images[:TRAIN], labels[:TRAIN],
    )  # fmt: skip
    calibration = compiler.calibrate(graph, [{"image": b} for b in images[:CALIBRATION].split(50)])
    with torch.no_grad():
        right = net(images[TRAIN:])

    def asked(calibration: compiler.Calibration) -> torch.Tensor:
        made = plan(graph, (64, 64, 64), precision="int8", calibration=calibration)
        return runtime.load(made)(image=images[TRAIN:])["scores"]

    scores = asked(calibration)
    found, exact = ((s.argmax(1) == labels[TRAIN:]).float().mean() for s in (scores, right))
    assert exact > 0.95
    assert found >= exact - 0.005
    assert (scores.argmax(1) == right.argmax(1)).float().mean() >= 0.99
    assert bool(calibration.zero_points) == code.adds_in_32_bits()
    if calibration.zero_points:  # without them there is more noise
        without = asked(replace(calibration, zero_points={}))
        noise = [(s - right).square().mean() for s in (without, scores)]
        assert noise[0] > 1.2 * noise[1]


def test_it_is_as_accurate_as_onnx_runtimes_static_int8(
    digits: tuple[torch.Tensor, torch.Tensor], trained: tuple[nn.Module, Graph], tmp_path: Path
) -> None:
    """The same network, the same 300 images to calibrate with, the other 597 to judge by."""
    (images, labels), (_, graph) = digits, trained
    shown = list(images[:CALIBRATION].split(50))
    theirs = answers_in_int8(graph, shown, images[TRAIN:], tmp_path)
    calibration = compiler.calibrate(graph, [{"image": batch} for batch in shown])
    made = plan(graph, (64, 64, 64), precision="int8", calibration=calibration)
    ours = runtime.load(made)(image=images[TRAIN:])["scores"]
    right, peer = (int((s.argmax(1) == labels[TRAIN:]).sum()) for s in (ours, theirs))
    assert right >= peer - 1, f"{right} of {len(images) - TRAIN} right, {peer} by ONNX Runtime"
