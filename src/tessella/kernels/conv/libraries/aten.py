"""Convolution by torch (cuDNN, or oneDNN on a CPU), what it does not fuse as element-wise steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tessella.core.dtype import FLOATS
from tessella.device.packing import with_packed
from tessella.kernels.catalog import Call
from tessella.operations.epilogue import bias_inside, finish_
from tessella.operations.problem import Problem
from tessella.operations.reference.conv import conv_volumes
from tessella.operations.tensor_meta import memory_format

TYPES = (*FLOATS, "float64")


def fits(problem: Problem) -> str | None:
    x, weight, epilogue = problem["input"], problem["weight"], problem.epilogue
    if x.dtype not in TYPES:
        return f"torch convolves floating types only, not {x.dtype}"
    if {x.dtype, weight.dtype} != {problem.output.dtype}:
        return "one element type throughout"
    added = (epilogue.bias, epilogue.residual, epilogue.scale)
    if any(t is not None and t.dtype not in TYPES for t in added):
        return "the epilogue's tensors must be floating"
    if x.format != "strided" and not x.has(problem.output.format):
        return f"keeps the format, cannot make {problem.output.format}"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    product = conv_volumes if problem.op == "conv3d" else getattr(torch, problem.op)
    return bound(problem, constants, product)


def bound(
    problem: Problem, constants: Mapping[int, torch.Tensor], product: Callable[..., torch.Tensor]
) -> Call:
    """``product`` with the arguments of torch's convolutions, and the epilogue behind it."""
    how, layout = window(problem), layout_of(problem)
    held = in_layout(problem, constants)

    def convolve(*inputs: torch.Tensor) -> torch.Tensor:
        x, weight, epilogue = problem.product_operands(held, inputs)
        weight = weight.contiguous(memory_format=layout)
        inside, rest = bias_inside(epilogue, x.dtype)
        made = product(x, weight, inside, *how)
        # with one channel torch cannot tell the formats apart, and may answer in the other one
        return finish_(made.contiguous(memory_format=layout), rest, axis=1)

    return convolve


def window(problem: Problem) -> tuple[list[int], list[int], list[int], int]:
    """Stride, padding, dilation and groups, as torch's operators take them."""
    stride, padding, dilation = (list(problem.attrs[n]) for n in ("stride", "padding", "dilation"))
    return stride, padding, dilation, problem.attrs["groups"]


def layout_of(problem: Problem) -> torch.memory_format:
    return memory_format(problem.output.format, len(problem.output.shape))


def in_layout(problem: Problem, constants: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The constants, the weight in the result's memory format."""
    layout, how = layout_of(problem), ("conv2d.aten", problem.output.format)
    return with_packed(constants, how, lambda w: w.contiguous(memory_format=layout))
