"""What an epilogue of int8 results reads beside its sums, made on the host.

``int8_device.quantize_sums`` is what reads it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.operations.epilogue import Epilogue
from tessella.operations.problem import Problem

Tensor = torch.Tensor

CLAMPS = (None, "relu")  # activations that are a part of rounding
SHIFT = 12582912.0  # 1.5 · 2^23: in its neighbourhood floats are integers
BYTES = 32896.0  # 2^15 + 128: where ``int8_device.float_of_shifted_int8`` puts zero
MOST_PRODUCTS = 256  # of int8, whose sums are below 2^22
# An offset that takes ``SHIFT`` away from sums is rounded, in steps of the result, by 0.75 of the
# scale; one that takes ``BYTES`` away from a residual by 0.004 of its factor.
LARGEST_SCALE = 1 / 64
LARGEST_BETA = 16.0


def refusal(problem: Problem) -> str | None:
    """Why ``quantize_sums`` would not be right; None if it is."""
    epilogue = problem.epilogue
    if epilogue.residual is None or epilogue.residual.dtype != "int8":
        return None
    if abs(epilogue.beta * epilogue.gamma) > LARGEST_BETA:
        return f"a residual's steps may be {LARGEST_BETA:.0f} of the result's at most"
    return None


def folded(
    problem: Problem, constants: Mapping[int, Tensor], *, small: bool
) -> tuple[Tensor, Tensor] | None:
    """``vectors`` of a layer, where the scale and bias that it has are constants, else None."""
    known = _known(problem, constants)
    if not _clamps(problem) or known is None or known.bias is known.scale is None:
        return None
    return vectors(known, adds=problem.epilogue.residual is not None, small=small)


def small_sums(problem: Problem, constants: Mapping[int, Tensor], products: int) -> bool:
    """Whether a layer's int32 sums may be read as float32 of ``SHIFT`` + sum.

    They must be below 2^22; and where ``SHIFT`` is taken away in the offset (``quantize_sums``),
    scales must be known and small.
    """
    if problem["input"].dtype != "int8" or problem.output.dtype == "int32":
        return False
    if products > MOST_PRODUCTS or not _clamps(problem):
        return products <= MOST_PRODUCTS
    known = _known(problem, constants)
    return known is not None and is_small_scale(known.scale, known.alpha * known.gamma)


def is_small_scale(scale: Tensor | None, factor: float = 1.0) -> bool:
    """Whether scales are small enough for an offset to take ``SHIFT`` away; of tensors without
    numbers, as is usual.
    """
    if scale is None:
        return abs(factor) <= LARGEST_SCALE
    return scale.is_meta or float(scale.abs().max()) * abs(factor) <= LARGEST_SCALE


def _clamps(problem: Problem) -> bool:
    ending = problem.epilogue
    return problem.output.dtype == "int8" and ending.activation in CLAMPS and ending.floor == 0


def _known(problem: Problem, constants: Mapping[int, Tensor]) -> Epilogue[Tensor] | None:
    """The epilogue with the tensors of scale and bias; None where one of these is no constant."""
    asked, found = problem.epilogue, {}
    for name in ("scale", "bias"):
        if getattr(asked, name) is not None:
            found[name] = constants.get(problem.operation.position(name))
    return None if None in found.values() else asked.of(**found)


def vectors(
    epilogue: Epilogue[Tensor], *, adds: bool = False, small: bool
) -> tuple[Tensor, Tensor]:
    """Factor and offset of each channel, in ranges of 128 steps behind a ReLU, else of 256.

    They hold alpha and gamma; the residual is still to be multiplied by beta · gamma.

    Args:
        epilogue: with a scale, a bias or both, and an activation of ``CLAMPS``.
        adds: whether a residual is added.
        small: whether sums come as float32 of ``SHIFT`` + sum.

    Returns:
        Two float32 vectors, as long as those given.
    """
    scale, bias, relu = epilogue.scale, epilogue.bias, epilogue.activation == "relu"
    step = epilogue.gamma / (128.0 if relu else 256.0)
    some = scale if scale is not None else bias
    assert some is not None
    factor = torch.full_like(some, epilogue.alpha * step, dtype=torch.float64)
    if scale is not None:
        factor *= scale.double()
    rounded = factor.float()
    offset = torch.full_like(factor, 0.0 if relu else 0.5)
    if bias is not None:
        offset += bias.double() * step
    if small:  # by the factor as it is rounded: what was added is taken away again
        offset -= SHIFT * rounded.double()
    if adds:
        offset -= BYTES * step * epilogue.beta
    return rounded, offset.float()
