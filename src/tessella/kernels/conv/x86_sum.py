"""The convolution of ``shared.x86_convolution`` that writes into the memory of its residual.

Each tile reads its part of the residual just before it writes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from tessella.core.errors import KernelError
from tessella.device.x86 import code
from tessella.kernels.catalog import Call, Config
from tessella.kernels.conv.libraries import onednn_sum
from tessella.kernels.shared import x86_convolution as x86
from tessella.kernels.shared import x86_tiles
from tessella.operations.problem import Problem


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles whose panels do not overlap, since nothing may be added twice; and no passes, since
    sums cannot wait where the residual lies."""
    isa, channels = code.require_instructions(), x86.own_channels(problem)
    wide = [vectors for vectors in x86_tiles.PIXELS[isa] if channels % (vectors * isa.lanes) == 0]
    return tuple({"vectors": vectors} for vectors in wide[:2])


def fits(problem: Problem) -> str | None:
    if why := onednn_sum.refusal(problem) or x86.fits(problem):
        return why
    residual = problem.epilogue.residual
    if residual is None or residual.pixel_pitch != problem.output.pixel_pitch:
        return "the residual's pixels lie as the result's"
    if not configs(problem):
        return f"channels by {code.require_instructions().lanes}"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: int) -> Call:
    config = config or dict(configs(problem)[0])
    lanes = code.require_instructions().lanes
    if x86.own_channels(problem) % (config["vectors"] * lanes) or "depth" in config:
        raise KernelError(
            "a residual would be added twice where panels overlap or sums wait",
            seen=config,
            fix=f"take one of {configs(problem)}",
        )
    return replace(x86.bind(problem, constants, **config), into=1)
