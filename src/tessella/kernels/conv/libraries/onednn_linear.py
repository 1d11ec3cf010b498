"""1×1 convolution as oneDNN's linear layer over the pixels: in channels_last the same bytes.

torch's way into oneDNN's convolution takes about 10 µs longer a call, and its product is a little
slower: on one core (AMD EPYC, Zen 5) 108 → 98 µs for 192→64 @28, 520 → 494 µs for 64→256 @56, and
38 → 31 µs for 512→24 @14 in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from tessella.device.packing import onednn_layout, packed
from tessella.kernels.catalog import Call
from tessella.kernels.conv.libraries import onednn
from tessella.kernels.shared.onednn import post_op
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    x, weight = problem["input"], problem["weight"]
    plain = {"stride": [1, 1], "padding": [0, 0]}
    if tuple(weight.shape[2:]) != (1, 1) or problem.attrs["groups"] != 1:
        return "1×1 filters without groups only"
    if any(list(problem.attrs[name]) != value for name, value in plain.items()):
        return "stride 1 and no padding only"
    if problem.epilogue.residual is not None:
        return "a residual is not fused"
    if not x.has("channels_last"):
        return "the input must be channels_last"
    return onednn.fits(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    n, _, height, width = problem["input"].shape
    name, numbers, variant = post_op(problem.epilogue)
    bias, pixels = constants.get(2), math.prod((n, height, width))
    weight = packed(
        constants[1],
        ("conv2d.onednn_linear",),
        lambda w: torch.ops.mkldnn._reorder_linear_weight(w.flatten(1).contiguous(), pixels),
        layout=onednn_layout,
    )
    unary: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default

    def convolve(x: torch.Tensor) -> torch.Tensor:
        made = unary(x.permute(0, 2, 3, 1), weight, bias, name, numbers, variant)
        return made.permute(0, 3, 1, 2)

    return convolve
