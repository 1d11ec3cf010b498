"""Slice, select, split, expand: views of a part of the input; no element moves."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem
from tessella.operations.reference import transform as reference


def fits(problem: Problem) -> str | None:
    if problem.constant:
        return "takes no constants"
    for meta in problem.outputs:
        if meta.format != "strided":
            return f"makes a view, cannot make {meta.format}"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    attrs = problem.attrs
    if problem.op == "slice":
        return lambda x: reference.slice(x, **attrs)
    if problem.op == "select":
        dim, index = attrs["dim"], attrs["index"]
        return lambda x: x.select(dim, index)
    if problem.op == "expand":
        shape = problem.output.shape
        return lambda x: x.expand(shape)
    sizes, dim = list(attrs["sizes"]), attrs["dim"]
    if len(sizes) == 1:
        return lambda x: x.narrow(dim, 0, sizes[0])
    return lambda x: torch.split(x, sizes, dim)
