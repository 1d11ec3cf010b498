"""Softmax by torch, written into the given buffer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    if problem.output.format != "contiguous":
        return "makes contiguous"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    function = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}[problem.op]
    dim, dtype = problem.attrs["dim"], getattr(torch, problem.output.dtype)
    return lambda x, *, out: function(x, dim, dtype=dtype, out=out)
