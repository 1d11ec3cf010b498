"""What an epilogue of int8 results reads beside its sums, made on the host.

``int8_device.codes`` is what reads it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.int8_device import BYTES, SHIFT
from tessella.kernels.problem import Problem

Tensor = torch.Tensor

BIAS, RESIDUAL, SCALE = 2, 3, 4
CLAMPS = (None, "relu")  # activations that are a part of rounding


def folded(
    problem: Problem, constants: Mapping[int, Tensor], *, small: bool
) -> tuple[Tensor, Tensor] | None:
    """``vectors`` of a layer, where the scale and bias that it has are constants, else None."""
    known = {i: constants.get(i) for i in (BIAS, SCALE) if problem.meta(i) is not None}
    activation = problem.attr("activation")
    clamps = problem.output.dtype == "int8" and activation in CLAMPS
    if not clamps or not known or any(t is None for t in known.values()):
        return None
    beta = problem.attr("beta") if problem.meta(RESIDUAL) is not None else None
    return vectors(
        known.get(SCALE),
        known.get(BIAS),
        alpha=problem.attr("alpha"),
        beta=beta,
        gamma=problem.attr("gamma"),
        activation=activation,
        small=small,
    )


def vectors(
    scale: Tensor | None,
    bias: Tensor | None,
    *,
    alpha: float = 1.0,
    beta: float | None = None,
    gamma: float = 1.0,
    activation: str | None,
    small: bool,
) -> tuple[Tensor, Tensor]:
    """Factor and offset of each channel, in ranges of 128 steps behind a ReLU, else of 256.

    They hold alpha and gamma; the residual is still to be multiplied by beta · gamma.

    Args:
        scale, bias: one of them at least.
        beta: None if there is no residual.
        activation: one of ``CLAMPS``.
        small: whether sums come as float32 of ``int8_device.SHIFT`` + sum.

    Returns:
        Two float32 vectors, as long as those given.
    """
    relu = activation == "relu"
    step = gamma / (128.0 if relu else 256.0)
    some = scale if scale is not None else bias
    assert some is not None
    factor = torch.full_like(some, alpha * step, dtype=torch.float64)
    if scale is not None:
        factor *= scale.double()
    rounded = factor.float()
    offset = torch.full_like(factor, 0.0 if relu else 0.5)
    if bias is not None:
        offset += bias.double() * step
    if small:  # by the factor as it is rounded: what was added is taken away again
        offset -= SHIFT.value * rounded.double()
    if beta is not None:
        offset -= BYTES.value * step * beta
    return rounded, offset.float()
