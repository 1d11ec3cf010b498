"""The layers whose meaning in Caffe differs from torch's module of that name."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class InnerProduct(nn.Linear):
    """``[N, …]`` to ``[N, out_features]``: flattens its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1) if x.ndim > 2 else x)


class BatchNorm(nn.BatchNorm2d):
    """Normalizes only; a Scale layer has the affine part. Takes ``[N, C]`` and ``[N, C, …]``.

    Caffe divides its running sums by the sum of their weights, so that the running mean is right
    from the first step; torch's momentum 1 − fraction would take thousands of steps to get there.
    """

    def __init__(self, channels: int, *, eps: float, fraction: float) -> None:
        super().__init__(channels, eps=eps, affine=False)
        self.fraction = fraction

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any rank."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:  # recompute hides it
            step = self.num_batches_tracked.item() + 1
            kept = self.fraction
            self.momentum = (1 - kept) / (1 - kept**step) if kept < 1 else 1 / step
        return super().forward(x)


_EPS = 2.0**-20  # torch 2.11 wants eps > 0; 1 − 2⁻²⁰ and its sum with this are exact


class Scale(nn.Module):
    """A factor, and perhaps an offset, for each channel of ``[N, C, …]``.

    Computed as a batch norm of mean 0 and variance 1, so that the compiler folds it into the
    convolution before it, and mixed precision keeps the input's type.
    """

    zero: Tensor
    variance: Tensor

    def __init__(self, channels: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.register_buffer("zero", torch.zeros(channels), persistent=False)
        self.register_buffer("variance", torch.ones(channels) - _EPS, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.zero, self.variance, self.weight, self.bias, eps=_EPS)


class LocalResponseNormWithinChannel(nn.Module):
    """``x · (1 + α · mean of x² over a size×size window)^−β``, zeros outside the image counted."""

    def __init__(self, size: int, *, alpha: float, beta: float) -> None:
        super().__init__()
        self.size, self.alpha, self.beta = size, alpha, beta

    def forward(self, x: Tensor) -> Tensor:
        mean = F.avg_pool2d(x * x, self.size, stride=1, padding=self.size // 2)
        return x * (1 + self.alpha * mean).pow(-self.beta)


class Power(nn.Module):
    """``(shift + scale · x)^power``."""

    def __init__(self, *, power: float, scale: float, shift: float) -> None:
        super().__init__()
        self.power, self.scale, self.shift = power, scale, shift

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.scale == 1 else x * self.scale
        x = x if self.shift == 0 else x + self.shift
        return x if self.power == 1 else x.pow(self.power)


class Concat(nn.Module):
    """The concatenation of the inputs along ``axis``."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.cat(xs, self.axis)


class Sum(nn.Module):
    """The sum of inputs of one shape, each times a coefficient."""

    def __init__(self, coefficients: list[float]) -> None:
        super().__init__()
        self.coefficients = coefficients

    def forward(self, *xs: Tensor) -> Tensor:
        scaled = [x if c == 1 else c * x for c, x in zip(self.coefficients, xs, strict=True)]
        total = scaled[0]
        for x in scaled[1:]:
            total = total + x
        return total


class Product(nn.Module):
    """The product of inputs of one shape, element by element."""

    def forward(self, *xs: Tensor) -> Tensor:
        total = xs[0]
        for x in xs[1:]:
            total = total * x
        return total


class Maximum(nn.Module):
    """The largest of the inputs, element by element."""

    def forward(self, *xs: Tensor) -> Tensor:
        total = xs[0]
        for x in xs[1:]:
            total = torch.maximum(total, x)
        return total


class Reshape(nn.Module):
    """Reshapes to ``dims``, where 0 keeps the input's size and −1 is inferred."""

    def __init__(self, dims: list[int]) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape([x.shape[i] if d == 0 else d for i, d in enumerate(self.dims)])
