"""Convolution by oneDNN through torch: weights packed once, bias, residual and activation fused.

A packed weight makes oneDNN answer in channels_last, whatever the input's format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tessella.device.packing import onednn_layout, packed
from tessella.kernels.catalog import Call
from tessella.kernels.conv.libraries.aten import window
from tessella.kernels.shared.onednn import float_refusal, post_op
from tessella.operations.epilogue import Epilogue, finish_
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    if refused := float_refusal(problem):
        return refused
    residual = problem.epilogue.residual
    if problem.output.format != "channels_last":
        return "makes channels_last"
    if residual is not None and not residual.has("channels_last"):
        return "the residual must be channels_last"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    stride, padding, dilation, groups = window(problem)
    ending, bias = problem.epilogue, constants.get(2)
    weight = packed_weight(problem, constants[1])
    if ending.residual is None:
        name, numbers, variant = post_op(ending)
        unary: Callable[..., torch.Tensor] = torch.ops.mkldnn._convolution_pointwise.default

        def convolve(x: torch.Tensor) -> torch.Tensor:
            return unary(x, weight, bias, padding, stride, dilation, groups, name, numbers, variant)

        return convolve
    binary = torch.ops.mkldnn._convolution_pointwise.binary
    # after a residual, oneDNN's interface fuses relu only, to 0
    fused = "relu" if ending.activation == "relu" and ending.floor == 0 else None
    after = Epilogue[torch.Tensor](
        activation=None if fused else ending.activation, floor=float(ending.floor)
    )

    def convolve_add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        made = binary(
            x, residual, weight, bias, padding, stride, dilation, groups,
            "add", 1.0, fused, [], "",
        )  # fmt: skip
        return finish_(made, after)

    return convolve_add


def packed_weight(problem: Problem, weight: torch.Tensor) -> torch.Tensor:
    """The weight as oneDNN wants it for the problem's shapes."""
    stride, padding, dilation, groups = window(problem)
    return packed(
        weight,
        ("conv2d.onednn", stride, padding, dilation, groups),
        lambda w: torch.ops.mkldnn._reorder_convolution_weight(
            w, padding, stride, dilation, groups, list(problem["input"].shape)
        ),
        layout=onednn_layout,
    )
