"""The gradients of a GELU and of the bias before it: what both need is read once.

Torch's compiler reads the gradient of the bias' result once more to add up its columns. In plain
Triton, of contiguous rows.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tessella.device.launch import launch
from tessella.device.machine import multiprocessors
from tessella.kernels.pointwise.trained_device import gelu_gradient_kernel
from tessella.kernels.shared.column_sums import column_sums

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ROWS, _COLUMNS, _WARPS, _BLOCKS = 8, 256, 4, 8


def runs(x: Tensor, bias: Tensor) -> bool:
    """Whether rows [..., width] can be taken here: contiguous, where Triton runs."""
    return (
        x.dtype in _DTYPES
        and bias.dtype == torch.float32
        and x.numel() > 0
        and bias.shape == x.shape[-1:]
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
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    across = triton.cdiv(width, columns)
    blocks = min(triton.cdiv(rows, _ROWS), max(1, _BLOCKS * multiprocessors() // across))
    out = torch.empty_like(x)
    parts = torch.empty(blocks, 1, width, dtype=torch.float32, device=x.device)
    launch(
        gelu_gradient_kernel, (blocks, across), x, bias, gradient, out, parts, rows, width,
        ROWS=_ROWS, COLUMNS=columns, TANH=tanh, num_warps=_WARPS,
    )  # fmt: skip
    return out, column_sums(parts)[0]
