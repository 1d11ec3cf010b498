"""Attention by cuDNN through torch, which by itself prefers its own flash kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tessella.kernels.attention import aten
from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem

MOST_WIDE = 128  # of a head


def fits(problem: Problem) -> str | None:
    q, k, v = (problem[name] for name in ("query", "key", "value"))
    if q.dtype not in ("float16", "bfloat16") or {q.dtype} != {k.dtype, v.dtype}:
        return f"float16 and bfloat16 only, not {q.dtype}"
    if len(q.shape) != 4 or problem.attrs["enable_gqa"] or problem.get("attn_mask") is not None:
        return "[N, heads, L, E] with as many heads in keys and values, and without a mask"
    if any(t.shape[-1] % 8 or t.shape[-1] > MOST_WIDE for t in (q, k, v)):
        return f"heads of a multiple of 8 and at most {MOST_WIDE} values, not {q.shape[-1]}"
    if 0 in (*q.shape, *k.shape):
        return "empty"
    return aten.fits(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    attend: Callable[..., tuple[torch.Tensor, ...]] = (
        torch.ops.aten._scaled_dot_product_cudnn_attention.default
    )
    causal, scale = problem.attrs["is_causal"], problem.attrs["scale"]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, None, False, 0.0, causal, False, scale=scale)[0]

    return call
