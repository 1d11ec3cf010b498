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
from tessella.kernels.pointwise.trained_device import (
    gelu_gradient_kernel,
    joined_kernel,
    rounded_gelu_kernel,
    rounded_join_kernel,
)
from tessella.kernels.shared.column_sums import column_sums

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ROWS, _WARPS, _BLOCKS = 2, 4, 8
_COLUMNS, _JOINED_COLUMNS = 512, 1024
WIDEST, _ROW_WARPS = 8192, 8  # of rows that a block takes whole


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
        None, None, None, ROWS=_ROWS, COLUMNS=columns, TANH=tanh, MOST=0.0, num_warps=_WARPS,
    )  # fmt: skip
    return out, column_sums(parts)[0]


# --- and the same as 8-bit numbers ----------------------------------------------------------------


def rounded_gelu(
    x: Tensor, bias: Tensor, dtype: torch.dtype, *, tanh: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``gelu(x + bias)`` [..., width] like x; as ``dtype`` [rows, width], and each row's scale,
    float32 [rows, 1]."""
    width = x.shape[-1]
    out, (codes, scales) = torch.empty_like(x), _codes(x, width, dtype)
    launch(
        rounded_gelu_kernel, (len(codes),), x, bias, out, codes, scales, width,
        COLUMNS=triton.next_power_of_2(width), ACTIVATION="gelu_tanh" if tanh else "gelu",
        MOST=torch.finfo(dtype).max, num_warps=_ROW_WARPS,
    )  # fmt: skip
    return out, codes, scales


def rounded_gelu_gradients(
    gradient: Tensor, x: Tensor, bias: Tensor, factors: Tensor, dtype: torch.dtype, *, tanh: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``gelu_gradients``; and that of x, its columns times ``factors`` float32 [width], as
    ``dtype`` [rows, width], with each row's scale, float32 [rows, 1]."""
    width = x.shape[-1]
    codes, scales = _codes(x, width, dtype)
    rows, out = len(codes), torch.empty_like(x)
    blocks = min(rows, _BLOCKS * multiprocessors())
    parts = torch.empty(blocks, 1, width, dtype=torch.float32, device=x.device)
    launch(
        gelu_gradient_kernel, (blocks, 1), x, bias, gradient, out, parts, rows, width,
        codes, scales, factors, ROWS=1, COLUMNS=triton.next_power_of_2(width), TANH=tanh,
        MOST=torch.finfo(dtype).max, num_warps=_ROW_WARPS,
    )  # fmt: skip
    return out, column_sums(parts)[0], codes, scales


def rounded_join(
    parts: list[Tensor], factors: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``joined``; and the rows, their columns times ``factors`` float32 [3 · width], as ``dtype``
    [rows, 3 · width], with each row's scale, float32 [rows, 1]."""
    first, second, third = parts
    width = first.shape[-1]
    out = first.new_empty(*first.shape[:-1], 3 * width)
    codes, scales = _codes(out, 3 * width, dtype)
    rows = len(codes)
    blocks = min(rows, _BLOCKS * multiprocessors())
    sums = torch.empty(blocks, 1, 3 * width, dtype=torch.float32, device=first.device)
    launch(
        rounded_join_kernel, (blocks,), first, second, third, out, sums, codes, scales, factors,
        rows, width, COLUMNS=triton.next_power_of_2(width), MOST=torch.finfo(dtype).max,
        num_warps=_ROW_WARPS,
    )  # fmt: skip
    return out, column_sums(sums)[0], codes, scales


def _codes(x: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for rows of 8-bit numbers, and their scales."""
    rows = x.numel() // width
    codes = torch.empty(rows, width, dtype=dtype, device=x.device)
    return codes, torch.empty(rows, 1, dtype=torch.float32, device=x.device)


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
