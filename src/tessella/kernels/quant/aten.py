"""``quantize`` and ``dequantize`` by torch, into the given buffer of any format."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem
from tessella.operations.reference.quant import along


def fits(problem: Problem) -> str | None:
    has_zero_point = problem.get("zero_point") is not None
    if not problem.is_constant("scale") or (
        has_zero_point and not problem.is_constant("zero_point")
    ):
        return "scale and zero point must be constants"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    axis, like = problem.attrs["axis"], problem["input"].empty(torch.device("meta"))
    scale = along(constants[1], like, axis)
    zero = constants.get(2)
    zero = None if zero is None else along(zero, like, axis).to(scale.dtype)
    if problem.op == "dequantize":

        def dequantize(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
            numbers = x.to(scale.dtype)
            if zero is not None:
                numbers.sub_(zero)
            if numbers.dtype == out.dtype:
                return torch.mul(numbers, scale, out=out)
            return out.copy_(numbers.mul_(scale))

        return dequantize
    stored = getattr(torch, problem.output.dtype)
    rounds = not stored.is_floating_point
    limits = torch.iinfo(stored) if rounds else torch.finfo(stored)

    def quantize(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        scaled = torch.div(x.to(scale.dtype), scale)
        if rounds:
            scaled.round_()
        if zero is not None:
            scaled.add_(zero)
        return out.copy_(scaled.clamp_(limits.min, limits.max))

    return quantize
