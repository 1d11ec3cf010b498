"""Linear by oneDNN through torch: the weight packed once, bias and activation fused."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tessella.device.packing import onednn_layout, packed
from tessella.kernels.catalog import Call
from tessella.kernels.shared.onednn import POST_OPS, has_onednn
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    x, bias, residual = problem["input"], problem.get("bias"), problem.get("residual")
    if not has_onednn():
        return "this torch was built without oneDNN"
    if not problem.is_constant("weight") or (bias is not None and not problem.is_constant("bias")):
        return "weight and bias must be constants"
    if problem.plain:
        return problem.plain
    if {t.dtype for t in problem.inputs if t is not None} not in ({"float32"}, {"bfloat16"}):
        return f"float32 or bfloat16 throughout, not {x.dtype}"
    if x.dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 instructions"
    if len(x.shape) < 2 or x.format != "contiguous" or problem.output.format != "contiguous":
        return "needs contiguous rows"
    activation = problem.epilogue.activation
    if activation not in POST_OPS:
        return f"activation {activation} is not fused"
    if residual is not None and (activation is not None or residual.format != "contiguous"):
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
