"""Matrix products in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tessella.kernels.epilogue import finish

Tensor = torch.Tensor


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    """input [..., K], weight [N, K], bias [N], residual like the result → [..., N]."""
    return finish(F.linear(input, weight, bias), residual, activation)


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """input [..., M, K], other [..., K, N] → [..., M, N]; leading axes broadcast."""
    return torch.matmul(input, other)
