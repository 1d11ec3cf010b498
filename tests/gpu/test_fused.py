"""Fused and captured steps beside torch's on a GPU."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck

from tessella.nn.fused import fused
from tessella.training.captured import WARM, Captured
from tessella.training.loop import train
from tessella.training.precision import arithmetic
from tessella.training.ways import called
from tests.support.training import losses, losses_by_hand, recipe, write_dataset

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`"),  # torch's compiler's own
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    beside = nn.Sequential(nn.Conv2d(64, 256, 1, bias=False), nn.BatchNorm2d(256))
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        Bottleneck(64, 64, downsample=beside), Bottleneck(256, 64),
        nn.Conv2d(256, 24, 1), nn.BatchNorm2d(24), nn.SiLU(), nn.Dropout(0.2),
        nn.Conv2d(24, 24, 5, 2, 2, groups=24), nn.Conv2d(24, 24, 7, padding=3, groups=24),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5),
    )  # fmt: skip
    return net.cuda().to(memory_format=torch.channels_last).train()


def images(count: int) -> Tensor:
    made = torch.randn(count, 3, 40, 36, device="cuda")
    return made.contiguous(memory_format=torch.channels_last)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's, in a backward pass
@pytest.mark.parametrize("way", ["fused", "compile"])
@pytest.mark.parametrize(("dtype", "bound"), [(None, 1e-5), (torch.float16, 4e-3)], ids=str)
def test_gradients_beside_float64(dtype, bound, way):
    """No further from float64 than torch's own step is, with a margin.

    In float32 what a ReLU is given is far from 0: near it the sign often differs from float64's
    (torch's own is off by up to 1.4e-2 then); and of three batches the least distance counts, as
    two of a pooling's window may be alike.
    """
    net = network()
    net[9].p = 0.0
    if dtype is None:
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.data.fill_(0.1)
                module.bias.data[::2], module.bias.data[1::2] = 1.0, -1.0
        net[4].downsample[1].bias.data *= 3  # no sum of two is near 0
    nets = {"double": copy.deepcopy(net).double(), "torch": copy.deepcopy(net), "ours": net}
    calls = {**nets, "ours": called(net, way)}
    found: dict[str, list[list[float]]] = {"torch": [], "ours": []}
    for _ in range(3 if dtype is None else 1):
        x, cotangent = images(6), torch.randn(6, 5, device="cuda")
        with arithmetic("fp32"):
            for name, call in calls.items():
                nets[name].zero_grad()
                given = x.double() if name == "double" else x
                enabled = dtype is not None and name != "double"
                with torch.autocast("cuda", dtype=dtype or torch.float16, enabled=enabled):
                    made = call(given)
                made.backward(cotangent.to(made.dtype))
        for name, each in found.items():
            each.append(distances(nets[name], nets["double"]))
    for ours, theirs in zip(zip(*found["ours"]), zip(*found["torch"]), strict=True):
        assert min(ours) < 2 * min(theirs) + bound


def distances(net: nn.Module, double: nn.Module) -> list[float]:
    """Of each parameter's gradient from that of float64, as a share of its length."""
    pairs = zip(net.parameters(), double.parameters(), strict=True)
    return [float((p.grad - q.grad).norm() / q.grad.norm().clamp_min(1e-3)) for p, q in pairs]


class Widened(nn.Module):
    """What is taken as one product: a 1×1 convolution, its norm, and a sum."""

    def __init__(self, deep: int) -> None:
        super().__init__()
        self.widen = nn.Conv2d(deep, 4 * deep, 1, bias=False)
        self.norm = nn.BatchNorm2d(4 * deep)

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        return self.norm(self.widen(x)) + beside


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("deep", [64, 128, 256])
def test_projections_beside_float64(deep, dtype):
    """No sign can differ here: all gradients are within a rounding's distance."""
    torch.manual_seed(deep)
    net = Widened(deep).cuda().to(memory_format=torch.channels_last)
    net.widen.weight.data = net.widen.weight.data.to(dtype).float()
    double = copy.deepcopy(net).double()
    x, beside, cotangent = (
        torch.randn(8, count, 13, 15, device="cuda", dtype=dtype).contiguous(
            memory_format=torch.channels_last
        )
        for count in (deep, 4 * deep, 4 * deep)
    )
    x = x.relu()
    given = [x.clone().requires_grad_(), beside.clone().requires_grad_()]
    wide = [x.double().requires_grad_(), beside.double().requires_grad_()]
    with torch.autocast("cuda", dtype=dtype):
        made = fused(net)(*given)
    made.backward(cotangent)
    expected = double(*wide)
    expected.backward(cotangent.double())
    bound = 2 * torch.finfo(dtype).eps
    assert (made - expected).norm() < bound * expected.norm()
    pairs = zip([*given, *net.parameters()], [*wide, *double.parameters()], strict=True)
    for ours, theirs in pairs:
        assert (ours.grad - theirs.grad).norm() < bound * theirs.grad.norm()
    for ours, theirs in zip(net.buffers(), double.buffers(), strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["fused", "compile"])
def test_a_captured_pass_is_the_pass(way):
    """Small batches in between, other shapes of either, dropout by torch's generator: the same."""
    nets = [network() for _ in range(2)]
    counts = (
        [(6, 1)] * (WARM + 2) + [(3, 1)] + [(6, 2), (6, 1)] * (WARM + 2) + [(8, 1)] * (WARM + 2)
    )
    found: list[list[Tensor]] = []
    for net, captures in zip(nets, (False, True), strict=True):
        call = called(net, way)

        def work(x: Tensor, labels: Tensor, call: nn.Module = call) -> Tensor:
            loss = F.cross_entropy(call(x), labels[:, 0])
            loss.backward()
            return loss.detach()

        captured = Captured(work, net.parameters())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        found.append([])
        torch.manual_seed(7)
        batches = [
            (images(count), (torch.arange(count, device="cuda") % 5)[:, None].repeat(1, columns))
            for count, columns in counts
        ]
        most = 0
        for step, (x, labels) in enumerate(batches):
            torch.manual_seed(step)
            if captures:
                found[-1].append(captured(x, labels))
                most = max(most, len(captured._recorded))
            else:
                optimizer.zero_grad()
                found[-1].append(work(x, labels))
            optimizer.step()
        if captures:
            assert captured.refused is None
            assert most == 2  # a graph for each shape of targets
    torch.testing.assert_close(*map(torch.stack, found), rtol=1e-4, atol=1e-5)


class Asks(nn.Module):
    """Waits for the GPU, which a graph cannot."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().amax()) > 0 else x


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, where it goes on
def test_what_cannot_be_captured_runs():
    net = nn.Sequential(network(), Asks(), nn.Dropout(0.1))
    call = fused(net)

    def work(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(call(x), labels)
        loss.backward()
        return loss.detach()

    captured = Captured(work, net.parameters())
    labels = torch.arange(6, device="cuda") % 5
    for _ in range(WARM + 3):
        assert captured(images(6), labels).isfinite()
    assert "not one graph" in captured.refused
    assert all(p.grad is not None for p in net.parameters())


def test_a_recording_that_fails_is_forgotten():
    """The network is one graph; what is done with its answer is not."""
    net = network()
    call = fused(net)

    def work(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(call(x), labels)
        loss.backward()
        assert float(loss.detach()) > 0
        return loss.detach()

    captured = Captured(work, net.parameters())
    labels = torch.arange(6, device="cuda") % 5
    for step in range(WARM + 3):
        torch.manual_seed(step)
        assert captured(images(6), labels).isfinite()
    assert captured.refused


@pytest.mark.parametrize(
    ("precision", "rel", "ours"),
    [
        ("fp32", 2e-2, {"fuse": True}),
        ("bf16", 0.25, {"fuse": True}),
        ("fp32", 2e-2, {"compile": True}),
    ],
)
def test_a_training_has_torchs_curve(tmp_path, precision, rel, ours):
    dataset: Path = write_dataset(tmp_path / "stripes", train=40, val=18)
    how = {"network": "resnet18", "precision": precision, "epochs": 3, "batch_size": 12}
    curves = [
        losses(train(recipe(dataset, **way, **how), tmp_path / f"{number}"))
        for number, way in enumerate(({"fuse": False}, ours))
    ]
    assert curves[1][:3] == pytest.approx(curves[0][:3], rel=rel)
    assert all(loss == loss for loss in curves[1])


@pytest.mark.parametrize(
    ("precision", "dtype", "same"), [("fp32", None, 2), ("bf16", torch.bfloat16, 1)]
)
def test_ten_seeds_learn_as_in_a_plain_loop(tmp_path, precision, dtype, same):
    """A ResNet-18 on pictures of 32×32: the first steps one by one, the last ones in the mean."""
    dataset = write_dataset(tmp_path / "stripes", train=60, size=32)
    how = {"network": "resnet18", "precision": precision, "epochs": 6, "batch_size": 20}
    how |= {"val_interval": 9, "snapshot_interval": 9, "fuse": True}
    apart, plain = [], []
    for seed in range(10):
        run = train(recipe(dataset, seed=seed, **how), tmp_path / f"{seed}")
        with arithmetic(precision):
            by_hand = losses_by_hand(run, "cuda", dtype)
        ours = losses(run)
        # bf16's second loss differs by up to 14 % already where torch's loops are compared
        assert ours[:same] == pytest.approx(by_hand[:same], rel=2e-2)
        plain.append(np.mean(by_hand[-6:]))
        apart.append(np.mean(ours[-6:]) - plain[-1])
    chance = 3 * np.std(apart, ddof=1) / np.sqrt(len(apart))
    assert abs(np.mean(apart)) < chance + 0.02 * np.mean(plain)
    assert np.mean(plain) < 0.7 * np.log(3)  # of guessing
