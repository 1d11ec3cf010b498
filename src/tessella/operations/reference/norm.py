"""Normalization in plain torch, for inference: the statistics of ``batch_norm`` are given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def batch_norm(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
) -> Tensor:
    """input [N, C, ...]; the statistics, weight and bias are [C]."""
    return F.batch_norm(input, running_mean, running_var, weight, bias, training=False, eps=eps)


def layer_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    normalized_shape: Sequence[int],
    eps: float,
) -> Tensor:
    """input [..., *normalized_shape]; weight and bias are [*normalized_shape]."""
    return F.layer_norm(input, list(normalized_shape), weight, bias, eps)


def group_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    num_groups: int,
    eps: float,
) -> Tensor:
    """input [N, C, ...]; weight and bias are [C]."""
    return F.group_norm(input, num_groups, weight, bias, eps)


def rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    *,
    normalized_shape: Sequence[int],
    eps: float | None,
) -> Tensor:
    """input [..., *normalized_shape]; eps None means the element type's own."""
    return F.rms_norm(input, list(normalized_shape), weight, eps)


def local_response_norm(input: Tensor, *, size: int, alpha: float, beta: float, k: float) -> Tensor:
    """input [N, C, ...], over ``(k + alpha · mean of squares of size channels) ** beta``."""
    around = [0, 0] * (input.ndim - 2) + [size // 2, (size - 1) // 2]
    mean = F.pad(input.square(), around).unfold(1, size, 1).mean(-1)
    return input / (k + alpha * mean) ** beta
