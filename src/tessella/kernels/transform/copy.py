"""``to`` and ``cat``: elements copied into the given buffer, whatever its type and format."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    if problem.in_place:
        return "would read a part where it writes it"
    return "takes no constants" if problem.constant else None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    if problem.op == "to":
        return lambda x, *, out: out.copy_(x)
    dim = problem.attrs["dim"]
    return lambda *parts, out: torch.cat(parts, dim, out=out)
