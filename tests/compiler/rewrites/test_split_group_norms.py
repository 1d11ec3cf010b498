"""Group norms as statistics and a product and a sum, which join what follows them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella.compiler import pipeline
from tessella.compiler.choices.variants import layouts_to_try
from tessella.compiler.passes import request_for, run
from tessella.compiler.precision import assign
from tessella.compiler.rewrites import assign_layout, split_group_norms
from tessella.core.spec import DimRange, TensorSpec
from tessella.device.x86 import code
from tessella.graph import capture, check, interpret
from tessella.graph.graph import Graph
from tessella.nn.zoo.unet3d import UNet3d

BATCH = DimRange(min=1, opt=2, max=8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.bare = nn.GroupNorm(4, 8, affine=False)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bare(F.silu(self.norm(self.conv(x))) + x)


def graph_of(module: nn.Module, *shape: int) -> Graph:
    torch.manual_seed(0)
    return capture(module.eval(), (TensorSpec(name="x", dtype="float32", shape=(BATCH, *shape)),))


def fused(graph: Graph, target: str, precision: str = "fp16") -> Graph:
    exact = pipeline.optimized(graph)
    request = request_for(exact, assign(exact, precision, {}, target, None))
    return run(exact, request, after="optimize", until="fuse")


def test_it_computes_the_same() -> None:
    before = graph_of(Block(), 8, 6, 6)
    after = before.copy()
    assert split_group_norms.apply(after, "sm_90") == 2
    check(after)
    x = {"x": torch.randn(3, 8, 6, 6)}
    right, made = (
        next(iter(interpret(g, x, upcast=torch.float64).values())) for g in (before, after)
    )
    torch.testing.assert_close(made, right, rtol=1e-12, atol=1e-12)


def test_a_norm_its_activation_and_its_residual_are_one_pass_on_a_gpu() -> None:
    ops = [n.op for n in fused(graph_of(Block(), 8, 6, 6), "sm_90").nodes]
    assert ops == ["to", "conv2d", "group_factors", "pointwise", "group_factors", "pointwise"]
    assert "group_norm" in [n.op for n in fused(graph_of(Block(), 8, 6, 6), "cpu").nodes]


@pytest.mark.parametrize(("target", "precision"), [("sm_90", "fp16"), ("cpu", "fp32")])
def test_volumes_lie_with_their_channels_together(target: str, precision: str) -> None:
    """From the first convolution to the last, without a copy; a network that grows them, too."""
    if target == "cpu" and code.instructions() is None:
        pytest.skip("its kernel of statistics is machine code")
    graph, narrow = (
        fused(
            graph_of(UNet3d(classes=3, channels=1, width=width, levels=2), 1, 8, 8, 8),
            target, precision,
        )
        for width in (16, 4)
    )  # fmt: skip
    assert layouts_to_try(graph, precision, target)[0] == "channels_last"
    by_torch = layouts_to_try(narrow, precision, target)[0] == "contiguous"
    assert by_torch == ("group_norm" in [n.op for n in narrow.nodes]) == (target == "cpu")
    copies = [n.op for n in graph.nodes].count("to")
    formats = assign_layout.apply(graph, "channels_last")
    check(graph)
    assert [n.op for n in graph.nodes].count("to") == copies
    found = {n.op: formats[n.outputs[0].name] for n in graph.nodes if n.op != "to"}
    assert found == {
        "conv3d": "channels_last", "group_factors": "contiguous", "pointwise": "channels_last",
        "conv_transpose3d": "channels_last", "cat": "channels_last",
    }  # fmt: skip
