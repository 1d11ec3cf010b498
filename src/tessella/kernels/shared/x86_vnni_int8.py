"""Convolutions of int8 on a CPU with VNNI, of 256 or 512 bits: the tiles of ``shared.x86_int8``,
with one instruction for four products and their sum.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.device.x86 import code
from tessella.kernels.catalog import Config
from tessella.kernels.shared import x86_int8
from tessella.operations.problem import Problem

fits = x86_int8.words_refusal


def configs(problem: Problem) -> tuple[Config, ...]:
    return x86_int8.tiles_of(problem, x86_int8.VNNI_TILES[code.require_instructions()])


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: int) -> code.Launch:
    return x86_int8.bound(problem, constants, config, configs(problem), vnni=True)
