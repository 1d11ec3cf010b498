"""Gradients with the sums of their columns, which are a bias' gradient: what both need is read
once. Of a GELU, and of attention's queries, keys and values, which a linear layer made together.

Torch's compiler reads the gradient of the bias' result once more to add up its columns. In plain
Triton, of contiguous rows.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tessella.device.launch import launch
from tessella.device.machine import multiprocessors
from tessella.kernels.pointwise.trained_device import gelu_gradient_kernel, joined_kernel
from tessella.kernels.shared.column_sums import column_sums

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ROWS, _WARPS, _BLOCKS = 2, 4, 8
_COLUMNS, _JOINED_COLUMNS = 512, 1024


def runs(x: Tensor, bias: Tensor | None = None) -> bool:
    """Whether rows [..., width] can be taken here: contiguous, where Triton runs."""
    return (
        x.dtype in _DTYPES
        and x.numel() > 0
        and (bias is None or (bias.dtype == torch.float32 and bias.shape == x.shape[-1:]))
        and x.is_contiguous()
        and (x.is_cuda or triton.knobs.runtime.interpret)
    )


def gelu_gradients(
    gradient: Tensor, x: Tensor, bias: Tensor, *, tanh: bool
) -> tuple[Tensor, Tensor]:
    """Of ``gelu(x + bias)``: the gradients of ``x`` [..., width] and of ``bias`` float32 [width].

    Args:
        tanh: the GELU is the one with a hyperbolic tangent.
    """
    width = x.shape[-1]
    rows = x.numel() // width
    columns, across, blocks = _grid(rows, width, _COLUMNS)
    out = torch.empty_like(x)
    parts = torch.empty(blocks, 1, width, dtype=torch.float32, device=x.device)
    launch(
        gelu_gradient_kernel, (blocks, across), x, bias, gradient, out, parts, rows, width,
        ROWS=_ROWS, COLUMNS=columns, TANH=tanh, num_warps=_WARPS,
    )  # fmt: skip
    return out, column_sums(parts)[0]


def joined(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Three contiguous [..., width], side by side as [..., 3 · width]; and the sums of all columns,
    float32 [3 · width].
    """
    first, second, third = parts
    width = first.shape[-1]
    rows = first.numel() // width
    columns, across, blocks = _grid(rows, width, _JOINED_COLUMNS, 3)
    out = first.new_empty(*first.shape[:-1], 3 * width)
    sums = torch.empty(blocks, 1, 3 * width, dtype=torch.float32, device=first.device)
    launch(
        joined_kernel, (blocks, across, 3), first, second, third, out, sums, rows, width,
        ROWS=_ROWS, COLUMNS=columns, num_warps=_WARPS,
    )  # fmt: skip
    return out, column_sums(sums)[0]


def _grid(rows: int, width: int, most_columns: int, parts: int = 1) -> tuple[int, int, int]:
    """A tile's columns, and the blocks across and along the rows of so many matrices."""
    columns = min(most_columns, triton.next_power_of_2(width))
    across = triton.cdiv(width, columns)
    most = max(1, _BLOCKS * multiprocessors() // (across * parts))
    return columns, across, min(triton.cdiv(rows, _ROWS), most)
