"""Attention by torch: flash, memory-efficient or plain, as torch decides."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from tessella.kernels.catalog import Call
from tessella.kernels.problem import Problem

WRITES_OUT = False


def fits(problem: Problem) -> str | None:
    if problem.constant:
        return "takes no constants"
    if problem.output.dtype != problem.inputs[0].dtype:
        return f"makes {problem.inputs[0].dtype}, not {problem.output.dtype}"
    if problem.output.format != "strided":
        return f"promises no strides, cannot make {problem.output.format}"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    a = problem.attrs
    settings = {n: a[n] for n in ("is_causal", "scale", "enable_gqa")}
    return lambda q, k, v, mask=None: F.scaled_dot_product_attention(q, k, v, mask, **settings)
