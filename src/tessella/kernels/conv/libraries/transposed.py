"""Transposed convolution by torch (cuDNN, or oneDNN on a CPU), in the result's memory format."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.kernels.conv.libraries.aten import TYPES, layout_of
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    types = {meta.dtype for meta in (*problem.given, *problem.outputs)}
    if len(types) > 1 or not types <= set(TYPES):
        return "one floating element type throughout"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    attrs, layout = problem.attrs, layout_of(problem)
    how = tuple(list(attrs[n]) for n in ("stride", "padding", "output_padding"))
    groups, dilation = attrs["groups"], list(attrs["dilation"])
    product = getattr(torch, problem.op)

    def convolve(*inputs: torch.Tensor) -> torch.Tensor:
        x, weight, bias = (*problem.operands(constants, inputs), None)[:3]
        made: torch.Tensor = product(x, weight, bias, *how, groups, dilation)
        return made.contiguous(memory_format=layout)

    return convolve
