"""Convolution of int8 by oneDNN through torch: scale, bias, residual, relu and requantize fused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tessella.device.packing import onednn_layout, packed
from tessella.kernels.catalog import Call
from tessella.kernels.conv.libraries.aten import window
from tessella.kernels.shared.onednn import (
    SHIFT,
    int8_refusal,
    must_split,
    narrow_weight,
    scales,
    shifted,
)
from tessella.operations.epilogue import finish_
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    tensors = (problem["input"], problem.output, problem.epilogue.residual)
    if not all(t is None or t.has("channels_last") for t in tensors):
        return "needs channels_last"
    return int8_refusal(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    geometry, ending = window(problem), problem.epilogue
    groups = geometry[3]
    activation, beta = ending.activation, ending.beta
    scale, zeros = scales(problem, constants)
    bias = constants.get(2)
    split = must_split(constants[1])
    images, channels, *size = problem["input"].shape
    shape = [images, 2 * channels if split else channels, *size]
    weight = packed(
        constants[1],
        ("conv2d.onednn_int8", *geometry, split),
        lambda w: torch.ops.onednn.qconv_prepack(
            narrow_weight(w, split), scale, 1.0, SHIFT, *geometry, shape
        ),
        layout=onednn_layout,
    )

    def given(x: torch.Tensor) -> torch.Tensor:
        return shifted(_twice(x, groups) if split else x)

    stored = getattr(torch, problem.output.dtype)
    small = stored == torch.int8
    inside = activation if small or ending.residual is None else None
    inside = inside if inside == "relu" else None
    plain: Callable[..., torch.Tensor] = torch.ops.onednn.qconv2d_pointwise.default
    summed: Callable[..., torch.Tensor] = torch.ops.onednn.qconv2d_pointwise.binary

    def convolve(x: torch.Tensor) -> torch.Tensor:
        made = plain(
            given(x), 1.0, SHIFT, weight, scale, zeros, bias, *geometry, 1.0, 0, stored,
            inside or "none", [], "",
        )  # fmt: skip
        return made if inside == activation else finish_(made, ending.of())

    def convolve_add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if not small:
            made = plain(
                given(x), 1.0, SHIFT, weight, scale, zeros, bias, *geometry, 1.0, 0, stored,
                "none", [], "",
            )  # fmt: skip
            return finish_(made, ending.of(residual=residual))
        into = residual.clone(memory_format=torch.preserve_format)  # it is overwritten
        return summed(
            given(x), 1.0, SHIFT, weight, scale, zeros, into, bias, *geometry, 1.0, 0, stored,
            beta, 0, "sum", 1.0, inside, [], None,
        )  # fmt: skip

    return convolve if ending.residual is None else convolve_add


def _twice(x: torch.Tensor, groups: int) -> torch.Tensor:
    """The channels of each group, and the same again."""
    if groups == 1:
        return torch.cat((x, x), 1)
    parts = torch.unflatten(x, 1, (groups, -1))
    return torch.cat((parts, parts), 2).flatten(1, 2).contiguous(memory_format=torch.channels_last)
