"""Matrix products by torch (cuBLAS, oneDNN or MKL under it), written into the given buffer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.kernels.epilogue import finish_
from tessella.kernels.problem import Problem

WRITES_OUT = True


def fits(problem: Problem) -> str | None:
    if problem.op == "linear" and (
        1 not in problem.constant or (problem.inputs[2] is not None and 2 not in problem.constant)
    ):
        return "weight and bias must be constants"
    if len({t.dtype for t in (*problem.inputs, *problem.outputs) if t is not None}) > 1:
        return "one element type throughout"
    if problem.output.format != "contiguous":
        return "makes contiguous"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    return _matmul(constants) if problem.op == "matmul" else _linear(problem, constants)


def _matmul(constants: Mapping[int, torch.Tensor]) -> Call:
    if 0 in constants:
        return lambda y, *, out: torch.matmul(constants[0], y, out=out)
    if 1 in constants:
        return lambda x, *, out: torch.matmul(x, constants[1], out=out)
    return torch.matmul


def _linear(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    """x [..., K] · weight[N, K]ᵀ, as one product of rows."""
    weight_KN, bias = constants[1].t(), constants.get(2)
    activation = problem.attrs.get("activation")
    features_in, features_out = weight_KN.shape
    rows_only = len(problem.output.shape) == 2

    def linear(
        x: torch.Tensor, residual: torch.Tensor | None = None, *, out: torch.Tensor
    ) -> torch.Tensor:
        rows = x if rows_only else x.reshape(-1, features_in)
        target = out if rows_only else out.view(-1, features_out)
        if bias is None:
            torch.mm(rows, weight_KN, out=target)
        else:
            torch.addmm(bias, rows, weight_KN, out=target)
        return finish_(out, residual, activation)

    return linear
