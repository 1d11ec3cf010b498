"""Softmax in plain torch. ``dtype``: the element type of the result, None for the input's."""

from __future__ import annotations

import torch

from tessella.operations.operation import row

Tensor = torch.Tensor


def softmax(input: Tensor, *, dim: int, dtype: str | None = None) -> Tensor:
    return torch.softmax(input, dim, None if dtype is None else getattr(torch, dtype))


def log_softmax(input: Tensor, *, dim: int, dtype: str | None = None) -> Tensor:
    return torch.log_softmax(input, dim, None if dtype is None else getattr(torch, dtype))


ROWS = (
    row(softmax, "input", "dim dtype", aten="softmax.int"),
    row(log_softmax, "input", "dim dtype", aten="log_softmax.int"),
)
