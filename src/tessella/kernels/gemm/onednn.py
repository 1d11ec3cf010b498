"""Linear by oneDNN through torch: the weight packed once, bias and activation fused."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tessella.device.packing import onednn_layout, packed
from tessella.kernels.catalog import Call
from tessella.kernels.shared.onednn import POST_OPS, float_refusal
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    if refused := float_refusal(problem):
        return refused
    x, residual = problem["input"], problem.epilogue.residual
    if len(x.shape) < 2 or x.format != "contiguous" or problem.output.format != "contiguous":
        return "needs contiguous rows"
    activates = problem.epilogue.activation is not None
    if residual is not None and (activates or residual.format != "contiguous"):
        return "a residual is fused only when contiguous and without an activation"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    rows = math.prod(problem["input"].shape[:-1])
    bias = constants.get(2)
    weight = packed(
        constants[1],
        ("linear.onednn",),
        lambda w: torch.ops.mkldnn._reorder_linear_weight(w.contiguous(), rows),
        layout=onednn_layout,
    )
    if problem.epilogue.residual is None:
        name, numbers, variant = POST_OPS[problem.epilogue.activation]
        unary = torch.ops.mkldnn._linear_pointwise.default
        return lambda x: unary(x, weight, bias, name, numbers, variant)
    binary = torch.ops.mkldnn._linear_pointwise.binary
    return lambda x, residual: binary(x, residual, weight, bias, "add")
