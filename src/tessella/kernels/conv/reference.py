"""Convolution in plain torch: what every convolution kernel must agree with.

Shapes: N batch, C input channels, K output channels, then the spatial axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from tessella.kernels.epilogue import finish

Tensor = torch.Tensor


def _convolution(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A convolution with bias, residual and activation, over one, two or three spatial axes.

    input [N, C, …], weight [K, C / groups, …], residual like the result [N, K, …].
    """

    def convolution(
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
        made = product(input, weight, bias, stride, padding, dilation, groups)
        return finish(made, residual, activation)

    return convolution


conv1d = _convolution(F.conv1d)
conv2d = _convolution(F.conv2d)
conv3d = _convolution(F.conv3d)


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
