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
MOST_PRODUCTS = 256  # of int8, whose sums are below 2^22


def folded(problem: Problem, constants: Mapping[int, Tensor]) -> tuple[Tensor, Tensor] | None:
    """``vectors`` of a layer, where the scale and bias that it has are constants, else None."""
    asked, known = problem.epilogue, {}
    for name in ("scale", "bias"):
        if getattr(asked, name) is not None:
            known[name] = constants.get(problem.operation.position(name))
    clamps = problem.output.dtype == "int8" and asked.activation in CLAMPS
    if not clamps or not known or None in known.values():
        return None
    return vectors(asked.of(**known))


def small_sums(problem: Problem, products: int) -> bool:
    """Whether a layer's int32 sums are below 2^22, so that ``float_of_small`` takes them."""
    is_int8 = problem["input"].dtype == "int8" and problem.outputs[0].dtype != "int32"
    return is_int8 and products <= MOST_PRODUCTS


def vectors(epilogue: Epilogue[Tensor]) -> tuple[Tensor, Tensor]:
    """Factor and offset of each channel, in ranges of 128 steps behind a ReLU, else of 256.

    They hold alpha and gamma; the residual is still to be multiplied by beta · gamma.

    Args:
        epilogue: with a scale, a bias or both, and an activation of ``CLAMPS``.

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
    offset = torch.full_like(factor, 0.0 if relu else 0.5)
    if bias is not None:
        offset += bias.double() * step
    return factor.float(), offset.float()
