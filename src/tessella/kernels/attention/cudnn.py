"""Attention by cuDNN through torch, which by itself prefers its own flash kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tessella.kernels.attention import aten
from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem
from tessella.operations.reference.attention import repeated

MOST_WIDE = 128  # of a head


def fits(problem: Problem) -> str | None:
    q, k, v = (problem[name] for name in ("query", "key", "value"))
    if q.dtype not in ("float16", "bfloat16") or {q.dtype} != {k.dtype, v.dtype}:
        return f"float16 and bfloat16 only, not {q.dtype}"
    if len(q.shape) != 4 or problem.attrs["enable_gqa"]:
        return "[N, heads, L, E] with as many heads in keys and values"
    mask = problem.get("attn_mask")
    if mask is not None and (len(mask.shape) != 4 or mask.dtype not in ("bool", q.dtype)):
        return f"a mask of four axes, of bool or {q.dtype}, not {mask.dtype}{[*mask.shape]}"
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
    fixed = constants.get(problem.operation.position("attn_mask"))

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = fixed
    ) -> torch.Tensor:
        added = None if mask is None else _added(repeated(mask, q), q.dtype)
        return attend(q, k, v, added, False, 0.0, causal, False, scale=scale)[0]

    return call


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as what is added to scores, as torch hands it to cuDNN."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
