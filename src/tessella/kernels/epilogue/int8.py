"""What an epilogue of int8 results reads beside its sums, made on the host.

``int8_device.codes`` is what reads it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.operations.problem import Problem

Tensor = torch.Tensor

BIAS, RESIDUAL, SCALE = 2, 3, 4
CLAMPS = (None, "relu")  # activations that are a part of rounding
SHIFT = 12582912.0  # 1.5 · 2^23: in its neighbourhood floats are integers
BYTES = 32896.0  # 2^15 + 128: where ``int8_device.float_of_shifted_int8`` puts zero
MOST_PRODUCTS = 256  # of int8, whose sums are below 2^22
# An offset that takes ``SHIFT`` away from sums is rounded, in steps of the result, by 0.75 of the
# scale; one that takes ``BYTES`` away from a residual by 0.004 of its factor.
LARGEST_SCALE = 1 / 64
LARGEST_BETA = 16.0


def refusal(problem: Problem) -> str | None:
    """Why ``codes`` would not be right; None if it is."""
    residual = problem.meta(RESIDUAL)
    if residual is None or residual.dtype != "int8":
        return None
    if abs(problem.epilogue.beta * problem.epilogue.gamma) > LARGEST_BETA:
        return f"a residual's steps may be {LARGEST_BETA:.0f} of the result's at most"
    return None


def folded(
    problem: Problem, constants: Mapping[int, Tensor], *, small: bool
) -> tuple[Tensor, Tensor] | None:
    """``vectors`` of a layer, where the scale and bias that it has are constants, else None."""
    if not _clamps(problem) or not _knows(problem, constants):
        return None
    if problem.meta(BIAS) is None and problem.meta(SCALE) is None:
        return None
    beta = problem.epilogue.beta if problem.meta(RESIDUAL) is not None else None
    return vectors(
        constants.get(SCALE),
        constants.get(BIAS),
        alpha=problem.epilogue.alpha,
        beta=beta,
        gamma=problem.epilogue.gamma,
        activation=problem.epilogue.activation,
        small=small,
    )


def small_sums(problem: Problem, constants: Mapping[int, Tensor], products: int) -> bool:
    """Whether a layer's int32 sums may be read as float32 of ``SHIFT`` + sum.

    They must be below 2^22; and where ``SHIFT`` is taken away in the offset (``codes``), scales
    must be known and small.
    """
    if problem.inputs[0].dtype != "int8" or problem.output.dtype == "int32":
        return False
    if products > MOST_PRODUCTS or not _clamps(problem):
        return products <= MOST_PRODUCTS
    factor = problem.epilogue.alpha * problem.epilogue.gamma
    return _knows(problem, constants) and is_small_scale(constants.get(SCALE), factor)


def is_small_scale(scale: Tensor | None, factor: float = 1.0) -> bool:
    """Whether an offset may take ``SHIFT`` away; of tensors without numbers, as is usual."""
    if scale is None:
        return abs(factor) <= LARGEST_SCALE
    return scale.is_meta or float(scale.abs().max()) * abs(factor) <= LARGEST_SCALE


def _clamps(problem: Problem) -> bool:
    return problem.output.dtype == "int8" and problem.epilogue.activation in CLAMPS


def _knows(problem: Problem, constants: Mapping[int, Tensor]) -> bool:
    """Whether the scale and the bias that a layer has are constants."""
    return all(i in constants for i in (BIAS, SCALE) if problem.meta(i) is not None)


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
        small: whether sums come as float32 of ``SHIFT`` + sum.

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
        offset -= SHIFT * rounded.double()
    if beta is not None:
        offset -= BYTES * step * beta
    return rounded, offset.float()
