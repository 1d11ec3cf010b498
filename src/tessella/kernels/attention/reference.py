"""Attention in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tessella.kernels.epilogue import finish_as

Tensor = torch.Tensor


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    gamma: float = 1.0,
    dtype: str | None = None,
) -> Tensor:
    """``gamma · softmax(scale · query · keyᵀ + attn_mask) · value``, as ``dtype`` if one is given.

    query [N, heads, L, E], key [N, heads, S, E], value [N, heads, S, V] → [N, heads, L, V].
    """
    made = F.scaled_dot_product_attention(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return finish_as(dtype, made, None, None, None, axis=-1, gamma=gamma)
