"""Transformers' blocks as code of a compiler with our gradients, beside the same in float64."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision.models.vision_transformer import EncoderBlock

from benchmarks.language import Block, Size
from tessella.kernels.norm import layer
from tessella.kernels.pointwise import trained
from tessella.nn import fp8
from tessella.nn import fused as module_of
from tessella.nn import fused_dense_calls as calls_of
from tessella.nn.fused import compiled

SIZE = Size(layers=1, width=64, heads=2, tokens=9, vocabulary=10)
OURS = {
    calls_of.heads_attended: "heads", calls_of.gelu: "gelu",
    calls_of.heads_of: "cut", calls_of.layer_normed: "norm", calls_of.patches_convolved: "patches",
    calls_of.dense: "dense",
}  # fmt: skip


class Patches(nn.Module):
    """Windows that lie side by side, then those of one pixel, and some with a margin."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 128, 8, 8, bias=False), nn.Conv2d(128, 32, (2, 1), (2, 1)),
            nn.Conv2d(32, 64, 1), nn.Conv2d(64, 64, 2, 2, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x.reshape(-1, 4, 12, 12), (0, 4, 0, 4))
        return self.layers(x).flatten(2).transpose(1, 2)


class Odd(nn.Module):
    """What looks like a block's parts and is not: a broadcast sum, results that are read twice or
    written into, a norm without numbers of its own, a mask, attention that gives its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(4))
        self.layer = nn.Linear(64, 64)
        self.heads = nn.MultiheadAttention(64, 2, batch_first=True)
        self.place = nn.Parameter(torch.randn(1, 9, 64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x + self.place)
        z = self.layer(y)
        y = F.gelu(z) + z
        y = self.norms[1](F.layer_norm(y, (64,)))
        y = y + self.heads(y, y, y, need_weights=True)[0]
        mask = torch.ones(9, 9, dtype=torch.bool, device=x.device).tril()
        q = y.unflatten(-1, (2, 32)).transpose(1, 2)
        y = y + F.scaled_dot_product_attention(q, q, q, mask).transpose(1, 2).flatten(2)
        y = self.norms[2](y)
        y += 1
        y = y * 2
        before = y.mean(1, keepdim=True)
        return self.norms[3](y) + F.dropout(y, 0.5, training=False) + before


BLOCKS = {
    "torchvision": (
        lambda: EncoderBlock(2, 64, 128, 0.0, 0.0, partial(nn.LayerNorm, eps=1e-6)),
        ["norm", "heads", "norm", "gelu"],
    ),
    "norms first": (
        lambda: Block(SIZE, causal=True, first=True), ["norm", "cut", "norm", "gelu"]
    ),
    "norms behind": (
        lambda: Block(SIZE, causal=False, first=False), ["cut", "norm", "gelu", "norm"]
    ),
    "patches": (Patches, ["patches", "patches"]),
    "odd": (Odd, ["norm", "norm", "norm"]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "lowered"),
    [
        *((name, "bf16") for name in BLOCKS), ("norms behind", ""), ("norms behind", "fp8"),
        ("torchvision", "fp8"),
    ],
)  # fmt: skip
def test_a_block_beside_float64(name, lowered, monkeypatch):
    """No further from float64 than torch's own step is, with a margin; by our kernels.

    In fp8 that is the step of the same layers, call by call.
    """
    run: list[str] = []
    for module, function in ((layer, layer.gradients), (trained, trained.gelu_gradients)):
        monkeypatch.setattr(module, function.__name__, spied(run, function))
    seen: list[str] = []
    fuse = module_of.fuse_dense

    def spy(graph: fx.Graph) -> None:
        fuse(graph)
        seen.extend(OURS[node.target] for node in graph.nodes if node.target in OURS)

    monkeypatch.setattr(module_of, "fuse_dense", spy)
    torch.manual_seed(0)
    make, expected = BLOCKS[name]
    net = nn.Sequential(nn.Linear(64, 64), make(), nn.Linear(64, 16))
    for part in net.modules():
        if isinstance(part, nn.LayerNorm):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias)
    double = copy.deepcopy(net).double()
    if lowered == "fp8":
        monkeypatch.setattr(fp8, "LEAST", 64)
        assert fp8.to_fp8(net) == 4
        expected = [{"heads": "cut", "gelu": "dense"}.get(one, one) for one in expected]
    nets = {"double": double, "torch": copy.deepcopy(net), "ours": net}
    calls = {**nets, "ours": compiled(net, "aot_eager")}
    x, cotangent = torch.randn(3, 9, 64), torch.randn(3, 9, 16)
    made = {}
    for who, call in calls.items():
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(lowered) and who != "double"):
            made[who] = call(x.double() if who == "double" else x)
        made[who].backward(cotangent[:, : made[who].shape[1]].to(made[who].dtype))
    assert seen == expected
    assert run.count("gradients") == seen.count("norm")
    assert run.count("gelu_gradients") == seen.count("gelu")
    bound = 4e-3 if lowered else 1e-5

    def off(who: str) -> list[float]:
        pairs = zip(nets[who].parameters(), nets["double"].parameters(), strict=True)
        found = [(p.grad, q.grad) for p, q in pairs] + [(made[who], made["double"])]
        return [
            float((p - q).detach().norm() / q.detach().norm().clamp_min(1e-2)) for p, q in found
        ]

    for ours, theirs in zip(off("ours"), off("torch"), strict=True):
        assert ours < 1.5 * theirs + bound


class Written(nn.Module):
    """A sum before a norm, written into through a view between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
        self.requires_grad_(False)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.layer(x)
        y[:, 0].zero_()
        return self.head(self.norm(y))


def test_what_is_written_through_a_view_is_written_before_it_is_read() -> None:
    net, x = Written(), torch.randn(3, 9, 64)
    torch.testing.assert_close(compiled(net, "aot_eager")(x), net(x))


def spied(told, function):
    def call(*given, **named):
        told.append(function.__name__)
        return function(*given, **named)

    return call
