"""Linear by cuBLASLt through torch, with bias and ReLU or tanh-GELU in its epilogue."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.kernels.problem import Problem

WRITES_OUT = True


def fits(problem: Problem) -> str | None:
    if not {1, 2} <= set(problem.constant):
        return "weight and bias must be there, as constants"
    if problem.inputs[3] is not None:
        return "a residual is not fused"
    if problem.attrs.get("activation") not in ("relu", "gelu_tanh"):
        return f"fuses relu and gelu_tanh only, not {problem.attrs.get('activation')}"
    if len({t.dtype for t in problem.inputs if t is not None}) > 1:
        return "one element type throughout"
    if problem.output.format != "contiguous":
        return "makes contiguous"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    """x [..., K] · weight[N, K]ᵀ, as one product of rows."""
    weight_KN, bias = constants[1].t(), constants[2]
    features_in, features_out = weight_KN.shape
    use_gelu = problem.attrs["activation"] == "gelu_tanh"
    product = torch.ops.aten._addmm_activation.out

    def linear(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        rows, target = x.reshape(-1, features_in), out.view(-1, features_out)
        product(bias, rows, weight_KN, use_gelu=use_gelu, out=target)
        return out

    return linear
