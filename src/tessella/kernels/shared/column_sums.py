"""Sums of columns over the blocks of a kernel that has added up its own rows, in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tessella.device.launch import launch

_BLOCKS, _COLUMNS, _WARPS = 64, 32, 4


@triton.jit
def column_sums_kernel(
    parts_pointer, out_pointer, blocks, columns, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr
):
    """[blocks, columns] to [columns]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    total = tl.zeros([BLOCKS, COLUMNS], tl.float32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        offsets = block[:, None] * columns + column[None, :]
        mask = (block < blocks)[:, None] & there[None, :]
        total += tl.load(parts_pointer + offsets, mask=mask, other=0.0)
    tl.store(out_pointer + column, tl.sum(total, 0), mask=there)


def column_sums(parts: Tensor) -> Tensor:
    """Of float32 [blocks, ...], what its blocks sum to."""
    blocks, columns = parts.shape[0], parts[0].numel()
    out = torch.empty(parts.shape[1:], dtype=torch.float32, device=parts.device)
    launch(
        column_sums_kernel, (triton.cdiv(columns, _COLUMNS),), parts, out, blocks, columns,
        BLOCKS=_BLOCKS, COLUMNS=_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return out
