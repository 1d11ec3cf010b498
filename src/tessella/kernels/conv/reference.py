"""Convolution in plain torch: what every convolution kernel must agree with.

Shapes: N batch, C input channels, K output channels, then the spatial axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from tessella.kernels.epilogue import exact, finish

Tensor = torch.Tensor


def _convolution(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A convolution with its epilogue, over one, two or three spatial axes.

    input [N, C, …], weight [K, C / groups, …], bias and scale [K], residual like the result
    [N, K, …]. Integers and fp8 are computed exactly, in float64.
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
        fast_accumulation: bool = False,
    ) -> Tensor:
        x, w = exact(input), exact(weight)
        inside = bias is not None and bias.dtype == x.dtype and scale is None and alpha == 1
        made = product(x, w, bias if inside else None, stride, padding, dilation, groups)
        outside = None if inside else bias
        rest = {"activation": activation, "alpha": alpha, "beta": beta}
        return finish(made, outside, residual, scale, axis=1, **rest)

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
