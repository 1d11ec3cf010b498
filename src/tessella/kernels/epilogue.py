"""The epilogue: what a convolution or a matrix product does to its result before storing it.

``out = activation(product + bias + residual)``. The names are what the attribute ``activation``
may hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tessella.kernels.pointwise.unary import OUT

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
}


def finish(x: torch.Tensor, residual: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """``activation(x + residual)``; either may be None."""
    if residual is not None:
        x = x + residual
    return x if activation is None else ACTIVATIONS[activation](x)


def finish_(x: torch.Tensor, residual: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """``finish`` in place, for kernels that own ``x``."""
    if residual is not None:
        x.add_(residual)
    return x if activation is None else OUT[activation](x, out=x)
