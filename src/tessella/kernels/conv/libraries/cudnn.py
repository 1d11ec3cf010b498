"""Convolution by cuDNN through torch, with bias, residual and ReLU fused."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.device.packing import packed
from tessella.kernels.catalog import Call
from tessella.kernels.conv.libraries import aten
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import MEMORY_FORMATS


def fits(problem: Problem) -> str | None:
    x, _, bias, residual, scale = (problem.meta(i) for i in range(5))
    if problem.epilogue.activation != "relu":
        return f"fuses relu only, not {problem.attr('activation')}"
    if scale is not None or problem.epilogue.alpha != 1:
        return "fuses neither scale nor alpha"
    if any(t is not None and t.dtype != x.dtype for t in (bias, residual)):
        return "one element type throughout"
    if residual is not None and not residual.has(problem.output.format):
        return "the residual must have the result's format"
    return aten.fits(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    attrs = problem.attrs
    padding, stride, dilation = (list(attrs[n]) for n in ("padding", "stride", "dilation"))
    groups, beta = attrs["groups"], problem.epilogue.beta
    memory_format = MEMORY_FORMATS[problem.output.format]
    held = dict(constants)
    if 1 in constants:
        held[1] = packed(
            constants[1],
            ("conv2d.aten", problem.output.format),
            lambda w: w.contiguous(memory_format=memory_format),
        )
    relu = torch.ops.aten.cudnn_convolution_relu.default
    add_relu = torch.ops.aten.cudnn_convolution_add_relu.default

    def convolve(*inputs: torch.Tensor) -> torch.Tensor:
        x, weight, bias, residual = (*problem.operands(held, inputs), None, None)[:4]
        weight = weight.contiguous(memory_format=memory_format)
        if residual is None or beta == 0:
            made = relu(x, weight, bias, stride, padding, dilation, groups)
        else:
            made = add_relu(x, weight, residual, beta, bias, stride, padding, dilation, groups)
        return made.contiguous(memory_format=memory_format)

    return convolve
