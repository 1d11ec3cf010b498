"""Reductions by torch, written into the given buffer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    function = {"mean": torch.mean, "sum": torch.sum}[problem.op]
    dim, keepdim = problem.attrs["dim"], problem.attrs["keepdim"]
    axes = list(range(len(problem["input"].shape))) if dim is None else list(dim)
    dtype = getattr(torch, problem.output.dtype)
    return lambda x, *, out: function(x, axes, keepdim, dtype=dtype, out=out)
