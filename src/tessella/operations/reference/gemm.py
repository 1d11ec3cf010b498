"""Matrix products in plain torch: what every kernel of them must agree with.

They answer in the element type that they are given; integers and fp8 are computed exactly, in
float64. ``epilogue.store`` says how a result becomes int8 or fp8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tessella.operations.epilogue import exact, finish, finish_as, store
from tessella.operations.reference.quant import quantize

Tensor = torch.Tensor


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 1.0,
    fast_accumulation: bool = False,
    dtype: str | None = None,
    sparsity: str | None = None,
) -> Tensor:
    """``gamma · activation(alpha · scale · input · weightᵀ + bias + beta · residual)``.

    input [..., K], weight [N, K], bias and scale [N], residual like the result → [..., N], stored
    as ``dtype`` if one is given. ``sparsity`` says what zeros the weight has, and changes nothing.
    """
    x, w = exact(input), exact(weight)
    if bias is not None and bias.dtype == x.dtype and scale is None and alpha == 1:
        product, bias = F.linear(x, w, bias), None
    else:
        product = F.linear(x, w)
    rest = {"activation": activation, "alpha": alpha, "beta": beta, "gamma": gamma}
    return finish_as(dtype, product, bias, residual, scale, axis=-1, **rest)


def linear_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor,
    code_scale: Tensor | None = None,
    *,
    eps: float,
    results: Sequence[str],
    dtype: str | None = None,
    code_dtype: str | None = None,
    **attrs: Any,
) -> tuple[Tensor, ...]:
    """``linear`` with its epilogue, and the layer norm over the result's rows.

    norm_weight and norm_bias [N], code_scale one number → what ``results`` names: ``sum`` is the
    linear's result, ``norm`` the normalized, both stored as ``dtype``; ``codes`` are
    ``norm / code_scale`` stored as ``code_dtype``. With ``dtype`` nothing is rounded between.
    """
    if not results or not {*results} <= {"norm", "codes", "sum"} or len({*results}) < len(results):
        raise ValueError(f"results are norm, codes and sum, each once, not {results!r}")
    if not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise ValueError(f"eps is a number from zero on, not {eps!r}")
    wide = None if dtype is None else "float64"
    total = linear(input, weight, bias, residual, scale, dtype=wide, **attrs)
    by, plus = (_as(vector, total.dtype) for vector in (norm_weight, norm_bias))
    norm = F.layer_norm(total, [total.shape[-1]], by, plus, eps)
    stored = total.dtype if dtype is None else getattr(torch, dtype)
    made = {"sum": _as(total, stored), "norm": _as(norm, stored)}
    if "codes" in results:
        if code_scale is None or code_scale.numel() != 1 or code_dtype is None:
            raise ValueError("codes have an element type, and a scale of one number")
        made["codes"] = quantize(norm, code_scale, axis=0, dtype=code_dtype)
    return tuple(made[name] for name in results)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As stored; on the meta device, whose own rules are slow to import, only its shape."""
    return torch.empty(x.shape, dtype=dtype, device="meta") if x.is_meta else store(x, dtype)


def matmul(
    input: Tensor,
    other: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 1.0,
    fast_accumulation: bool = False,
) -> Tensor:
    """``gamma · activation(alpha · scale · op(input) · op(other) + bias + beta · residual)``.

    op(input) [..., M, K], op(other) [..., K, N], bias and scale [N], residual like the result →
    [..., M, N]; leading axes broadcast. Transposing swaps the last two axes.
    """
    a = exact(input.mT if transpose_a else input)
    b = exact(other.mT if transpose_b else other)
    product = torch.matmul(a, b)
    rest = {"activation": activation, "alpha": alpha, "beta": beta, "gamma": gamma}
    return finish(product, bias, residual, scale, **rest)
