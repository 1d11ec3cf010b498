"""What each layer takes of a step: all layers, their work, and that times lie where they belong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessella.artifacts.dataset import Dataset
from tessella.training.parallel import alone
from tessella.training.prepare import describe_run
from tessella.training.profiling import layer_times
from tessella.training.trainer import Trainer
from tests.support.training import recipe

CPU = torch.device("cpu")


class Clock:
    """Each look at it takes a microsecond, and nothing else any time but what is let pass."""

    now_s = 0.0

    @classmethod
    def look(cls):
        cls.now_s += 1e-6
        return cls.now_s


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        Clock.now_s += 0.004
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Clock.now_s += 0.008
        return gradient.clone()


class Slow(nn.Module):
    def forward(self, x):
        return _Slow.apply(x)


class Net(nn.Module):
    """A layer that is called twice, one in place, one on a branch, one that nobody calls."""

    def __init__(self):
        super().__init__()
        self.first, self.slow, self.act = nn.Linear(64, 64), Slow(), nn.ReLU(inplace=True)
        self.aside, self.last, self.unused = nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(2, 2)

    def forward(self, x):
        x = self.act(self.first(self.act(self.first(x))))
        return self.last(self.slow(x) + self.aside(x))


def test_times_lie_at_the_layers_that_take_them(monkeypatch):
    monkeypatch.setattr("time.perf_counter", Clock.look)
    net, images = Net(), torch.randn(16, 64)
    found = {layer.name: layer for layer in layer_times(net, lambda: net(images).sum(), CPU)}
    assert list(found) == ["first", "act", "slow", "aside", "last"]
    assert found["slow"].forward_s == pytest.approx(0.004, rel=0.01)
    assert found["slow"].backward_s == pytest.approx(0.008, rel=0.01)
    others = [layer for name, layer in found.items() if name != "slow"]
    assert all(0 < layer.forward_s < 1e-4 and 0 < layer.backward_s < 1e-4 for layer in others)
    products = 2 * 16 * 64 * 64
    assert [found[name].flops for name in ("first", "aside", "last", "act")] == [
        (2 + 3) * products, 3 * products, 3 * products // 8, 0,
    ]  # fmt: skip
    assert found["aside"].nbytes == 3 * 4 * (2 * 16 * 64 + 64 * 64 + 64)
    assert found["aside"].least_s(1e12, 1e30) == pytest.approx(3 * products / 1e12)
    assert found["aside"].least_s(1e30, 1e9) == pytest.approx(found["aside"].nbytes / 1e9)
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_what_does_not_learn_needs_less():
    """A layer makes a gradient of its weights, of its input, of both, or none."""
    net, images = (
        nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4))),
        torch.ones(8, 32),
    )
    net[0].requires_grad_(False)
    net[2].requires_grad_(False)
    found = layer_times(net, lambda: net(images).sum(), CPU)
    assert [layer.flops / (2 * 8 * 32 * 32) for layer in found] == [1, 2, 2, 3]
    values, weights = 4 * 8 * 32, 4 * 32 * 32
    assert [layer.nbytes for layer in found] == [
        2 * values + weights,  # read, read and written
        (2 + 3) * values + 2 * weights,
        (2 + 3) * values + 2 * weights,
        (3 + 3) * values + 3 * weights,
    ]


def test_layers_of_a_training(dataset):
    trainer = Trainer(describe_run(recipe(dataset)), Dataset(dataset).train.info, alone())
    found = trainer.layers(4)
    assert [layer.kind for layer in found].count("Conv2d") == 2
    assert {layer.name for layer in found} >= {"conv1", "conv2", "fc1", "fc2"}
