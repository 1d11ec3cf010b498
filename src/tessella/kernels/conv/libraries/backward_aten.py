"""Both gradients of a convolution by torch, whatever library it takes for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tessella.core.dtype import FLOATS
from tessella.kernels.catalog import Call
from tessella.kernels.conv.libraries.aten import window
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import memory_format


def fits(problem: Problem) -> str | None:
    grad, types = problem["grad"].dtype, [meta.dtype for meta in problem.given]
    if problem.constant:
        return "operands must be arguments"
    if len(set(types)) != 1 or grad not in ("float64", *FLOATS):
        return f"floating-point operands of one type, not {' × '.join(types)}"
    if problem.output.dtype != grad:
        return f"makes {grad}, not {problem.output.dtype}"
    if problem.output.format == "strided":
        return "makes contiguous or channels_last"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    backward: Callable[..., tuple[torch.Tensor, ...]] = torch.ops.aten.convolution_backward.default
    made, (stride, padding, dilation, groups) = problem.output, window(problem)
    ending = (stride, padding, dilation, False, [0] * len(stride), groups)
    form = memory_format(made.format, len(made.shape))
    dtype = getattr(torch, made.dtype)

    # torch asks for the operand that only the other gradient reads: its shape and format count
    def dgrad(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = torch.empty(made.shape, dtype=dtype, device=dy.device, memory_format=form)
        dx = backward(dy, x, weight, None, *ending, [True, False, False])[0]
        return dx.contiguous(memory_format=form)

    def wgrad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weight = torch.empty(made.shape, dtype=dtype, device=dy.device, memory_format=form)
        dw = backward(dy, x, weight, None, *ending, [False, True, False])[1]
        return dw.contiguous(memory_format=form)

    return dgrad if problem.op.endswith("dgrad") else wgrad
