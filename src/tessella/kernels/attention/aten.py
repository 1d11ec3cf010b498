"""Attention by torch: flash, memory-efficient or plain, as torch decides."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem
from tessella.operations.reference.attention import repeated


def fits(problem: Problem) -> str | None:
    if set(problem.constants) - {"attn_mask"}:
        return "takes no constants but a mask"
    if problem.output.dtype != problem["query"].dtype:
        return f"makes {problem['query'].dtype}, not {problem.output.dtype}"
    if problem.output.format != "strided":
        return f"promises no strides, cannot make {problem.output.format}"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    a = problem.attrs
    settings = {n: a[n] for n in ("is_causal", "scale", "enable_gqa")}
    fixed = constants.get(problem.operation.position("attn_mask"))

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = fixed
    ) -> torch.Tensor:
        if mask is not None:
            mask = repeated(mask, q)
        return F.scaled_dot_product_attention(q, k, v, mask, **settings)

    return attend
