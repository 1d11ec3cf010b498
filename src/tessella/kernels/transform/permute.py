"""Permute: a view with other strides; no element moves."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.kernels.problem import Problem

WRITES_OUT = False


def fits(problem: Problem) -> str | None:
    if problem.constant:
        return "takes no constants"
    if problem.output.format != "strided":
        return f"makes a view, cannot make {problem.output.format}"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    dims = tuple(problem.attrs["dims"])
    return lambda x: x.permute(dims)
