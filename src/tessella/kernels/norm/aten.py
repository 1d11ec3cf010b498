"""Normalization by torch. The result keeps the input's format."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    if not problem["input"].has(problem.output.format):
        return f"keeps the format, cannot make {problem.output.format}"
    others = problem.operation.shapes(problem.inputs).keys() - {"input"}
    if not others <= set(problem.constants):
        return "statistics, weight and bias must be constants"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    eps = problem.attrs["eps"]
    if problem.op == "layer_norm":
        shape, weight, bias = list(problem.attrs["normalized_shape"]), *map(constants.get, (1, 2))
        return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
    mean, variance, weight, bias = map(constants.get, (1, 2, 3, 4))
    return lambda x: torch.batch_norm(
        x, weight, bias, mean, variance, False, 0.0, eps, torch.backends.cudnn.enabled
    )
