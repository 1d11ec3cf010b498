"""The convolution of ``x86`` that writes its result into the memory of its residual.

Each tile reads its part of the residual just before it writes there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.kernels.conv import x86
from tessella.kernels.conv.libraries import onednn_sum
from tessella.operations.problem import Problem

configs = x86.configs


def fits(problem: Problem) -> str | None:
    return onednn_sum.refusal(problem) or x86.fits(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: int) -> Call:
    product = x86.bind(problem, constants, **config)
    return lambda x, residual: product(x, residual, out=residual)
