"""Reductions in plain torch. ``dim`` None means over all axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessella.operations.operation import row

Tensor = torch.Tensor
Axes = Sequence[int] | None


def mean(input: Tensor, *, dim: Axes, keepdim: bool, dtype: str | None = None) -> Tensor:
    return torch.mean(
        input, _axes(input, dim), keepdim, dtype=None if dtype is None else getattr(torch, dtype)
    )


def sum(input: Tensor, *, dim: Axes, keepdim: bool, dtype: str | None = None) -> Tensor:
    return torch.sum(
        input, _axes(input, dim), keepdim, dtype=None if dtype is None else getattr(torch, dtype)
    )


def amax(input: Tensor, *, dim: Axes, keepdim: bool) -> Tensor:
    return torch.amax(input, _axes(input, dim), keepdim)


def amin(input: Tensor, *, dim: Axes, keepdim: bool) -> Tensor:
    return torch.amin(input, _axes(input, dim), keepdim)


def _axes(input: Tensor, dim: Axes) -> list[int]:
    return list(range(input.ndim)) if dim is None else list(dim)


ROWS = (
    row(mean, "input", "dim keepdim dtype", aten="mean.dim"),
    row(sum, "input", "dim keepdim dtype", aten="sum.dim_IntList"),
    row(amax, "input", "dim keepdim", aten="amax.default"),
    row(amin, "input", "dim keepdim", aten="amin.default"),
)
