"""Linear to fewer numbers than a vector has lanes: the 1×1 convolution of ``shared.x86_few``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.kernels.gemm import x86
from tessella.kernels.shared import x86_few
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    return x86.refusal(problem) or x86_few.fits(x86.as_convolution(problem))


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    problem.require_constants(constants)
    return x86_few.bind(x86.as_convolution(problem), x86.with_filter(constants))
