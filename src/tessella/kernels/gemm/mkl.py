"""Linear by MKL through torch: the float32 weight packed once for this number of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tessella.device.packing import packed
from tessella.kernels.catalog import Call
from tessella.operations.epilogue import finish_
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    x, bias = problem["input"], problem.get("bias")
    available = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if not available or not hasattr(torch.ops.mkl, "_mkl_linear"):
        return "this torch was built without MKL"
    if not problem.is_constant("weight") or (bias is not None and not problem.is_constant("bias")):
        return "weight and bias must be constants"
    if problem.plain:
        return problem.plain
    if {t.dtype for t in problem.inputs if t is not None} != {"float32"}:
        return f"float32 throughout, not {x.dtype}"
    if len(x.shape) < 2 or x.format != "contiguous" or problem.output.format != "contiguous":
        return "needs contiguous rows"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    rows = math.prod(problem["input"].shape[:-1])
    plain, bias = constants[1].contiguous(), constants.get(2)
    ending = problem.epilogue.of()
    weight = packed(
        constants[1],
        ("linear.mkl", rows),
        lambda _: torch.ops.mkl._mkl_reorder_linear_weight(plain, rows),
    )
    product = torch.ops.mkl._mkl_linear.default

    def linear(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        rest = ending if residual is None else ending.of(residual=residual)
        return finish_(product(x, weight, plain, bias, rows), rest)

    return linear
