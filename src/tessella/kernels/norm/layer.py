"""The gradients of a layer norm in training: rows are read once.

Torch and its compiler read what is normalized and the gradient once for the gradients of rows and
once more for those of the parameters, and the sum before the norm once for itself, once for the
layer whose result was added, and once for that layer's bias. In plain Triton, of contiguous rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tessella.device.launch import launch
from tessella.device.machine import multiprocessors
from tessella.kernels.norm.layer_device import layer_gradients_kernel
from tessella.kernels.shared.column_sums import column_sums

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WIDEST = 8192
_ROWS, _WARPS, _BLOCKS = 2, 4, 3  # of a tile, of a block, and blocks of a multiprocessor


class Gradients(NamedTuple):
    """Of what a norm was given.

    Attributes:
        x: like what was normalized.
        low: the same as another type, or None.
        weight, bias: float32 [width].
        columns: the sums of ``x`` over rows, float32 [width], or None.
    """

    x: Tensor
    low: Tensor | None
    weight: Tensor
    bias: Tensor
    columns: Tensor | None


def runs(x: Tensor, weight: Tensor) -> bool:
    """Whether rows [..., width] can be taken here: contiguous, where Triton runs."""
    return (
        x.dtype in _DTYPES
        and weight.dtype == torch.float32
        and x.numel() > 0
        and 32 <= x.shape[-1] <= _WIDEST
        and x.is_contiguous()
        and (x.is_cuda or triton.knobs.runtime.interpret)
    )


def gradients(
    given: list[Tensor],
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor,
    *,
    beside: Tensor | None = None,
    low: torch.dtype | None = None,
    sums: bool = False,
) -> Gradients:
    """The gradients of ``(x − mean) · inverse · weight + bias``.

    Args:
        given: one or two gradients of the result, of its shape, which are added.
        x: rows [..., width].
        mean, inverse: of each row, and one by its deviation; float32.
        beside: a gradient that ``x`` gets from elsewhere.
        low: give the gradient of ``x`` in this type, too.
        sums: give its sums over rows.
    """
    width = x.shape[-1]
    rows = x.numel() // width
    programs = min(triton.cdiv(rows, _ROWS), _BLOCKS * multiprocessors())
    out = torch.empty_like(x)
    lower = None if low is None else torch.empty_like(x, dtype=low)
    parts = torch.empty(programs, 3 if sums else 2, width, dtype=torch.float32, device=x.device)
    launch(
        layer_gradients_kernel, (programs,),
        x, mean, inverse, weight, given[0], given[1] if len(given) > 1 else None, beside, out,
        lower, parts, rows, width,
        ROWS=_ROWS, COLUMNS=triton.next_power_of_2(width), SUMS=parts.shape[1], num_warps=_WARPS,
    )  # fmt: skip
    of_weight, of_bias, *columns = column_sums(parts)
    return Gradients(out, lower, of_weight, of_bias, columns[0] if sums else None)
