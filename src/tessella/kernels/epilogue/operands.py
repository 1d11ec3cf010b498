"""The tensors of one call: what is multiplied, and the epilogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tessella.operations.epilogue import Epilogue
from tessella.operations.problem import Problem


def operands_of(
    problem: Problem, constants: Mapping[int, torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, Epilogue[torch.Tensor]]:
    """The two factors and the epilogue of a convolution's or a matrix product's call.

    All their rows have the input, the weight (or the other matrix), bias, residual and scale in
    this order.
    """
    x, weight, bias, residual, scale = (*problem.operands(constants, inputs), None, None, None)[:5]
    assert x is not None
    assert weight is not None
    return x, weight, problem.epilogue.of(bias, residual, scale)
