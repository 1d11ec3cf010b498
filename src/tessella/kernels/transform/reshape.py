"""Reshape: a view where the input is contiguous or the result may be strided, else a copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    if problem.constant:
        return "takes no constants"
    if problem.output.format == "channels_last":
        return "makes contiguous, or a view"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    shape = problem.output.shape
    if problem.output.format == "strided":
        return lambda x: x.view(shape)
    return lambda x: x.reshape(shape).contiguous()
