"""Convolution in plain torch: what every convolution kernel must agree with.

Shapes: N batch, C input channels, K output channels, then the spatial axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tessella.operations.epilogue import exact, finish_as
from tessella.operations.reference.pool import max_pool2d

Tensor = torch.Tensor


def _convolution(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A convolution with its epilogue, over one, two or three spatial axes.

    input [N, C, …], weight [K, C / groups, …], bias and scale [K], residual like the result
    [N, K, …]. Integers and fp8 are computed exactly, in float64; ``dtype`` says what is stored,
    ``sparsity`` what zeros the weight has, which changes nothing.
    """

    def convolution(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        scale: Tensor | None = None,
        *,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        activation: str | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        gamma: float = 1.0,
        fast_accumulation: bool = False,
        dtype: str | None = None,
        sparsity: str | None = None,
    ) -> Tensor:
        x, w = exact(input), exact(weight)
        inside = bias is not None and bias.dtype == x.dtype and scale is None and alpha == 1
        made = product(x, w, bias if inside else None, stride, padding, dilation, groups)
        outside = None if inside else bias
        rest = {"activation": activation, "alpha": alpha, "beta": beta, "gamma": gamma}
        return finish_as(dtype, made, outside, residual, scale, axis=1, **rest)

    return convolution


conv1d = _convolution(F.conv1d)
conv2d = _convolution(F.conv2d)
conv3d = _convolution(F.conv3d)


def conv2d_chain(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    next_weight: Tensor,
    next_bias: Tensor | None = None,
    next_scale: Tensor | None = None,
    *,
    activation: str | None,
    next_activation: str | None,
    keep: bool,
    beta: float = 1.0,
    dtype: str | None = None,
    next_dtype: str | None = None,
) -> tuple[Tensor, ...]:
    """Two 1 × 1 convolutions, each with its epilogue: the result, and if kept what lies between.

    input [N, C, H, W], weight [K, C, 1, 1], residual and between [N, K, H, W], next_weight
    [L, K, 1, 1], result [N, L, H, W]; vectors as in ``conv2d``, ``next_…`` are the second one's.
    """
    window = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    between = conv2d(
        input, weight, bias, residual, scale,
        **window, activation=activation, beta=beta, dtype=dtype,
    )  # fmt: skip
    made = conv2d(
        between, next_weight, next_bias, None, next_scale,
        **window, activation=next_activation, dtype=next_dtype,
    )  # fmt: skip
    return (made, between) if keep else (made,)


def conv2d_pool(
    *inputs: Tensor | None,
    kernel_size: Sequence[int],
    pool_stride: Sequence[int],
    pool_padding: Sequence[int],
    pool_dilation: Sequence[int],
    ceil_mode: bool,
    **attrs: Any,
) -> Tensor:
    """``conv2d`` with its epilogue, and the largest number in each window of the result."""
    return max_pool2d(
        conv2d(*inputs, **attrs),
        kernel_size=kernel_size,
        stride=pool_stride,
        padding=pool_padding,
        dilation=pool_dilation,
        ceil_mode=ceil_mode,
    )


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> Tensor:
    """input [N, C, H, W], weight [C, K / groups, R, S] → [N, K, H', W']."""
    return F.conv_transpose2d(
        input, weight, bias, stride, padding, output_padding, groups, dilation
    )


def _input_gradient(
    dy: Tensor,
    weight: Tensor,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    input_size: Sequence[int],
) -> Tensor:
    """dy [N, K, …], weight [K, C / groups, …] → dx of shape input_size [N, C, …].

    A transposed convolution; pixels that the stride leaves over are output padding.
    """
    reached = [
        (p - 1) * s - 2 * pad + d * (r - 1) + 1
        for p, s, pad, d, r in zip(
            dy.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True
        )
    ]
    rest = [size - most for size, most in zip(input_size[2:], reached, strict=True)]
    transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(rest) - 1]
    return transposed(dy, weight, None, stride, padding, rest, groups, dilation)


def _weight_gradient(
    dy: Tensor,
    x: Tensor,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    kernel_size: Sequence[int],
) -> Tensor:
    """dy [N, K, …], x [N, C, …] → dw [K, C / groups, *kernel_size]."""
    shape = (dy.shape[1], x.shape[1] // groups, *kernel_size)
    weight = x.new_empty(shape)
    return torch.ops.aten.convolution_backward(
        dy, x, weight, None, stride, padding, dilation, False, [0] * len(kernel_size), groups,
        [False, True, False],
    )[1]  # fmt: skip


conv1d_dgrad = conv2d_dgrad = conv3d_dgrad = _input_gradient
conv1d_wgrad = conv2d_wgrad = conv3d_wgrad = _weight_gradient
