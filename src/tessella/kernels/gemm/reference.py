"""Matrix products in plain torch: what every kernel of them must agree with.

They answer in the element type that they are given; integers and fp8 are computed exactly, in
float64. ``epilogue.store`` says how a result becomes int8 or fp8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tessella.kernels.epilogue import exact, finish, finish_as

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
