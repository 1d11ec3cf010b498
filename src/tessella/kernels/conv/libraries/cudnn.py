"""Convolution by cuDNN through torch, with bias, residual and ReLU fused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.kernels.conv.libraries import aten
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    epilogue, residual = problem.epilogue, problem.epilogue.residual
    if epilogue.activation != "relu":
        return f"fuses relu only, not {epilogue.activation}"
    if epilogue.scale is not None or epilogue.alpha != 1:
        return "fuses neither scale nor alpha"
    dtype = problem["input"].dtype
    if any(t is not None and t.dtype != dtype for t in (epilogue.bias, residual)):
        return "one element type throughout"
    if residual is not None and not residual.has(problem.output.format):
        return "the residual must have the result's format"
    return aten.fits(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    window, layout = aten.window(problem), aten.layout_of(problem)
    held = aten.in_layout(problem, constants)
    relu: Callable[..., torch.Tensor] = torch.ops.aten.cudnn_convolution_relu.default
    add_relu: Callable[..., torch.Tensor] = torch.ops.aten.cudnn_convolution_add_relu.default

    def convolve(*inputs: torch.Tensor) -> torch.Tensor:
        x, weight, added = problem.product_operands(held, inputs)
        weight = weight.contiguous(memory_format=layout)
        how = (added.bias, *window)
        if added.residual is None:
            made = relu(x, weight, *how)
        else:
            made = add_relu(x, weight, added.residual, added.beta, *how)
        return made.contiguous(memory_format=layout)

    return convolve
