"""Softmax in plain torch. ``dtype``: the element type of the result, None for the input's."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def softmax(input: Tensor, *, dim: int, dtype: str | None = None) -> Tensor:
    return torch.softmax(input, dim, None if dtype is None else getattr(torch, dtype))


def log_softmax(input: Tensor, *, dim: int, dtype: str | None = None) -> Tensor:
    return torch.log_softmax(input, dim, None if dtype is None else getattr(torch, dtype))
