"""The convolution of ``shared.x86_convolution`` that writes into the memory of its residual.

Each tile reads its part of the residual just before it writes there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call, Config
from tessella.kernels.conv.libraries import onednn_sum
from tessella.kernels.shared import x86_convolution as x86
from tessella.operations.problem import Problem


def configs(problem: Problem) -> tuple[Config, ...]:
    """No passes: sums cannot wait where the residual lies."""
    return tuple(config for config in x86.configs(problem) if "depth" not in config)


def fits(problem: Problem) -> str | None:
    return onednn_sum.refusal(problem) or x86.fits(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: int) -> Call:
    product = x86.bind(problem, constants, **config)
    return lambda x, residual: product(x, residual, out=residual)
