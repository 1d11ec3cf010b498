"""Linear of bfloat16 by AMX: the 1×1 convolution of one image whose pixels are the rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.device.x86 import code
from tessella.kernels.catalog import Config
from tessella.kernels.gemm.x86 import as_convolution, refusal, with_filter
from tessella.kernels.shared import amx_bfloat16
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    return refusal(problem) or amx_bfloat16.fits(as_convolution(problem))


def configs(problem: Problem) -> tuple[Config, ...]:
    return amx_bfloat16.configs(as_convolution(problem))


def former_configs(problem: Problem) -> tuple[Config, ...]:
    return amx_bfloat16.former_configs(as_convolution(problem))


def workspace_bytes(problem: Problem, **config: int) -> int:
    return amx_bfloat16.workspace_bytes(as_convolution(problem), **config)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: int) -> code.Launch:
    problem.require_constants(constants)
    return amx_bfloat16.bind(as_convolution(problem), with_filter(constants), **config)
