"""Convolution by cuDNN through torch, with bias, residual and ReLU fused."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.kernels.packing import packed
from tessella.kernels.problem import MEMORY_FORMATS, Problem

WRITES_OUT = False


def fits(problem: Problem) -> str | None:
    x, _, bias, residual = problem.inputs
    if 1 not in problem.constant or (bias is not None and 2 not in problem.constant):
        return "weight and bias must be constants"
    if problem.attrs.get("activation") != "relu":
        return f"fuses relu only, not {problem.attrs.get('activation')}"
    if len({t.dtype for t in problem.inputs if t is not None}) > 1:
        return "one element type throughout"
    if not x.has(problem.output.format):
        return f"keeps the format, cannot make {problem.output.format}"
    if residual is not None and not residual.has(problem.output.format):
        return "the residual must have the result's format"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    attrs = problem.attrs
    padding, stride, dilation = (list(attrs[n]) for n in ("padding", "stride", "dilation"))
    groups = attrs["groups"]
    memory_format = MEMORY_FORMATS[problem.output.format]
    bias = constants.get(2)
    weight = packed(
        constants[1],
        ("conv2d.aten", problem.output.format),
        lambda w: w.contiguous(memory_format=memory_format),
    )
    if problem.inputs[3] is None:
        relu = torch.ops.aten.cudnn_convolution_relu.default
        return lambda x: relu(x, weight, bias, stride, padding, dilation, groups).contiguous(
            memory_format=memory_format
        )
    add_relu = torch.ops.aten.cudnn_convolution_add_relu.default
    return lambda x, residual: add_relu(
        x, weight, residual, 1.0, bias, stride, padding, dilation, groups
    ).contiguous(memory_format=memory_format)
