"""Attention in plain torch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tessella.operations.epilogue import Epilogue, finish_as
from tessella.operations.operation import Attributes, Shape, Shapes, row, shown

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
    return finish_as(dtype, made, Epilogue(gamma=gamma), axis=-1)


def repeated(mask: Tensor, query: Tensor) -> Tensor:
    """A mask for each of the queries [N, heads, L, E], where it is given for fewer."""
    if mask.dim() < 4 or query.dim() < 4:
        return mask
    given, wanted = mask.shape[0], query.shape[0]
    if given in (0, 1, wanted) or wanted % given:
        return mask
    return mask.repeat(wanted // given, *[1] * (mask.dim() - 1))


def _heads(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    """query […, L, E], key […, S, E], value […, S, V]"""
    query, key, value = (shapes[n] for n in ("query", "key", "value"))
    if min(map(len, (query, key, value))) < 2:
        return f"queries {shown(query)}, keys {shown(key)}, values {shown(value)}"
    if query[-1] != key[-1] or key[-2] != value[-2]:
        return f"queries {shown(query)}, keys {shown(key)}, values {shown(value)}"
    mask = shapes.get("attn_mask")
    if mask is not None and not _reaches(mask, (query[-2], key[-2])):
        return f"a mask {shown(mask)} for {query[-2]} × {key[-2]} scores"
    return None


def _reaches(mask: Shape, scores: Shape) -> bool:
    """Whether the last axes broadcast to the scores."""
    return all(m in (1, s) for m, s in zip(reversed(mask), reversed(scores), strict=False))


def _products(shapes: Shapes, result: Shape, attrs: Attributes) -> int:
    query, key, value = (shapes[n] for n in ("query", "key", "value"))
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


ROWS = (
    row(
        scaled_dot_product_attention,
        "query key value attn_mask?",
        "is_causal scale enable_gqa",
        aten="scaled_dot_product_attention.default",
        defaults={"gamma": 1.0, "dtype": None},
        rule=_heads,
        flops=_products,
    ),
)
