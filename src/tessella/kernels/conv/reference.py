"""Convolution in plain torch: what every convolution kernel must agree with.

Shapes: N batch, C input channels, K output channels, then the spatial axes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tessella.kernels.epilogue import finish

Tensor = torch.Tensor


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str | None = None,
) -> Tensor:
    """input [N, C, L], weight [K, C / groups, S] → [N, K, L']."""
    product = F.conv1d(input, weight, bias, stride, padding, dilation, groups)
    return finish(product, residual, activation)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str | None = None,
) -> Tensor:
    """input [N, C, H, W], weight [K, C / groups, R, S], residual like the result [N, K, H', W']."""
    product = F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    return finish(product, residual, activation)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str | None = None,
) -> Tensor:
    """input [N, C, D, H, W], weight [K, C / groups, T, R, S] → [N, K, D', H', W']."""
    product = F.conv3d(input, weight, bias, stride, padding, dilation, groups)
    return finish(product, residual, activation)


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
