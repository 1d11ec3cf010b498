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
    parts_pointer, outs, blocks, columns, SUMS: tl.constexpr, BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """[blocks, SUMS, columns] to as many times [columns]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    which = tl.program_id(1)
    total = tl.zeros([BLOCKS, COLUMNS], tl.float32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        offsets = (block * SUMS + which)[:, None] * columns + column[None, :]
        mask = (block < blocks)[:, None] & there[None, :]
        total += tl.load(parts_pointer + offsets, mask=mask, other=0.0)
    made = tl.sum(total, 0)
    for number in tl.static_range(SUMS):
        if which == number:
            tl.store(outs[number] + column, made, mask=there)


def column_sums(parts: Tensor) -> list[Tensor]:
    """Of float32 [blocks, sums, columns], what its blocks sum to: each sum a tensor of its own."""
    blocks, sums, columns = parts.shape
    outs = [torch.empty(columns, dtype=torch.float32, device=parts.device) for _ in range(sums)]
    launch(
        column_sums_kernel, (triton.cdiv(columns, _COLUMNS), sums),
        parts, tuple(outs), blocks, columns,
        SUMS=sums, BLOCKS=_BLOCKS, COLUMNS=_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return outs
