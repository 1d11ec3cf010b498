"""Convolution of int8 by oneDNN through torch: scale, bias, residual, relu and requantize fused."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.device.packing import onednn_layout, packed
from tessella.kernels.catalog import Call
from tessella.kernels.conv.libraries.aten import window
from tessella.kernels.shared.onednn import (
    int8_layer,
    int8_refusal,
    must_split,
    narrow_weight,
    scales,
    shifted,
    zero_point,
)
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    tensors = (problem["input"], problem.output, problem.epilogue.residual)
    if not all(t is None or t.has("channels_last") for t in tensors):
        return "needs channels_last"
    return int8_refusal(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    geometry = window(problem)
    groups, scale = geometry[3], scales(problem, constants)[0]
    split, zero = must_split(problem, constants[1]), zero_point(problem)
    images, channels, *size = problem["input"].shape
    shape = [images, 2 * channels if split else channels, *size]
    weight = packed(
        constants[1],
        ("conv2d.onednn_int8", *geometry, split, zero),
        lambda w: torch.ops.onednn.qconv_prepack(
            narrow_weight(w, split), scale, 1.0, zero, *geometry, shape
        ),
        layout=onednn_layout,
    )
    operators = torch.ops.onednn.qconv2d_pointwise
    layer = int8_layer(problem, constants, operators, weight, geometry, nothing=(None, None))

    def convolve(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return layer(shifted(_twice(x, groups) if split else x, zero), residual)

    return convolve


def _twice(x: torch.Tensor, groups: int) -> torch.Tensor:
    """The channels of each group, and the same again."""
    if groups == 1:
        return torch.cat((x, x), 1)
    parts = torch.unflatten(x, 1, (groups, -1))
    return torch.cat((parts, parts), 2).flatten(1, 2).contiguous(memory_format=torch.channels_last)
