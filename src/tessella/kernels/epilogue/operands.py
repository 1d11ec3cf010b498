"""The tensors of one call by name: what is multiplied, and the epilogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tessella.operations.epilogue import Epilogue
from tessella.operations.problem import Problem


def operands_of(
    problem: Problem, constants: Mapping[int, torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, Epilogue[torch.Tensor]]:
    """Input, weight and epilogue of a convolution's or a linear layer's call."""
    given = dict(zip(problem.operation.operands, problem.operands(constants, inputs)))
    added = problem.epilogue.of(given.get("bias"), given.get("residual"), given.get("scale"))
    x, weight = given["input"], given["weight"]
    assert x is not None
    assert weight is not None
    return x, weight, added
