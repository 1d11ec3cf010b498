from __future__ import annotations

import torch
from torch import nn

from tessella.training.loss import first_not_finite, not_finite
from tests.support.training import recipe


def test_divergence_says_where_and_what_to_do():
    settings = recipe("data", precision="fp16")
    text = str(not_finite(float("nan"), 17, 0.25, settings, "the layer is head.2"))
    for part in (
        "nan at step 17",
        "learning rate 0.25",
        "lr=0.001",
        "precision fp32",
        "warmup",
        "head.2",
    ):
        assert part in text


def test_the_layer_where_it_begins():
    """Finite weights whose product is not in 16 bits; then a weight that is no number."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    images = torch.ones(3, 4)

    def call():
        with torch.autocast("cpu", torch.float16):
            net(images)

    assert first_not_finite(net, call) is None
    with torch.no_grad():
        net[0].bias.fill_(3e4)
        net[2].weight.fill_(3.0)
    found = first_not_finite(net, call)
    assert found == "the output of 2 (Linear) is the first that is not finite"
    with torch.no_grad():
        net[4].bias[1] = float("nan")
    assert first_not_finite(net, call) == "1 of 6 weights are not finite, 4.bias the first"
    assert not net[0]._forward_hooks

    def fails():
        raise ValueError("something else")

    assert first_not_finite(net[:2], fails) is None  # which an error is told instead of


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x) / 0


def test_what_a_layer_with_parts_computes_itself():
    net = nn.Sequential(Root(), nn.ReLU())
    found = first_not_finite(net, lambda: net(torch.ones(1, 2)))
    assert found == "the output of 0 (Root) is the first that is not finite"
