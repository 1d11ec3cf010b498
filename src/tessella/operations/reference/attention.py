"""Attention in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tessella.operations.epilogue import finish_as

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
    A mask [M, heads, L, S] of which N is a multiple is that of queries n, n + M, n + 2M, …
    """
    if attn_mask is not None:
        attn_mask = repeated(attn_mask, query)
    made = F.scaled_dot_product_attention(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return finish_as(dtype, made, None, None, None, axis=-1, gamma=gamma)


def repeated(mask: Tensor, query: Tensor) -> Tensor:
    """A mask for each of the queries [N, heads, L, E], where it is given for fewer."""
    if mask.dim() < 4 or query.dim() < 4:
        return mask
    given, wanted = mask.shape[0], query.shape[0]
    if given in (0, 1, wanted) or wanted % given:
        return mask
    return mask.repeat(wanted // given, *[1] * (mask.dim() - 1))
