"""Convolution by torch, its epilogue as separate element-wise operations."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.kernels.epilogue import finish_
from tessella.kernels.packing import packed
from tessella.kernels.problem import MEMORY_FORMATS, Problem

WRITES_OUT = False


def fits(problem: Problem) -> str | None:
    if 1 not in problem.constant or (problem.inputs[2] is not None and 2 not in problem.constant):
        return "weight and bias must be constants"
    if not problem.inputs[0].has(problem.output.format):
        return f"keeps the format, cannot make {problem.output.format}"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    attrs = problem.attrs
    padding, stride, dilation = (list(attrs[n]) for n in ("padding", "stride", "dilation"))
    groups, activation = attrs["groups"], attrs.get("activation")
    memory_format = MEMORY_FORMATS[problem.output.format]
    bias = constants.get(2)
    weight = packed(
        constants[1],
        ("conv2d.aten", problem.output.format),
        lambda w: w.contiguous(memory_format=memory_format),
    )

    def convolve(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        made = torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
        # with one channel torch cannot tell the formats apart, and may answer in the other one
        return finish_(made.contiguous(memory_format=memory_format), residual, activation)

    return convolve
