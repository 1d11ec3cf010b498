"""2:4 sparsity: of each four weights along the reduction, at most two are not zero.

A weight is stored as its two values of four and, for each, two bits that say where it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tessella.core.errors import UsageError

TWO_FOUR = "2:4"  # the attribute ``sparsity`` of an operation whose constant weight is
LAYERS = ("conv2d", "linear")  # operations that have it
FOUR = 4
ROWS = 64  # of a wgmma; its metadata come from 128 threads
_FIRST_ROWS = 16  # they tell a dense weight


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """A 2:4 matrix [N, K].

    Attributes:
        values: [N, K / 2], two of each four, in order.
        places: uint8 [N, K / 4], where they were: the first in bits 0 and 1, the second in 2 and 3.
            The first is always before the second, zeros included, as tensor cores want it.
    """

    values: torch.Tensor
    places: torch.Tensor


def is_two_four(weight: torch.Tensor) -> bool:
    """Whether a weight [N, C, …] has at most two numbers that are not zero in each four along C."""
    if weight.dim() < 2 or not weight.numel() or weight.shape[1] % FOUR:
        return False
    return all(
        int((_fours(rows) != 0).sum(-1, dtype=torch.uint8).max()) <= 2
        for rows in (weight[:_FIRST_ROWS], weight[_FIRST_ROWS:])
        if len(rows)
    )


def mask_two_four(weight: torch.Tensor) -> torch.Tensor:
    """Which weights stay when the two largest magnitudes of each four along C are kept.

    Of equal ones the first stay.

    Args:
        weight: [N, C, …].

    Raises:
        UsageError: C is no multiple of 4.
    """
    if weight.dim() < 2 or weight.shape[1] % FOUR:
        raise UsageError(
            "2:4 sparsity takes fours of a weight's second axis",
            seen=tuple(weight.shape),
            fix="leave this layer dense",
        )
    fours = _fours(weight.float()).abs()
    kept = fours.sort(dim=-1, descending=True, stable=True).indices[:, :2]
    mask = torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, kept, True)
    return mask.view(weight.movedim(1, -1).shape).movedim(-1, 1)


def prune_two_four(weight: torch.Tensor) -> torch.Tensor:
    """The weight with zeros where ``mask_two_four`` is false."""
    return weight.masked_fill(~mask_two_four(weight), 0)


def _fours(weight: torch.Tensor) -> torch.Tensor:
    """[N, C, …] as [groups, 4] along C."""
    return weight.movedim(1, -1).reshape(-1, FOUR)


def compress(matrix: torch.Tensor) -> Compressed:
    """A 2:4 matrix [N, K] without its zeros.

    Raises:
        UsageError: it is not 2:4.
    """
    if matrix.dim() != 2 or not is_two_four(matrix):
        raise UsageError(
            "the weight is not 2:4 sparse",
            seen=tuple(matrix.shape),
            fix="prune it, or run it dense",
        )
    fours = matrix.view(len(matrix), -1, FOUR)
    taken = fours != 0
    order = torch.arange(FOUR, device=matrix.device)
    # the first is never the last of four and the second never the first, so that they differ
    first = order.where(taken, 2).amin(-1)
    second = order.where(taken, 0).amax(-1)
    second = second.where(second > first, 3)
    both = torch.stack([first, second], -1)
    return Compressed(
        values=fours.gather(-1, both).view(len(matrix), -1),
        places=(first | second << 2).to(torch.uint8),
    )


def wgmma_metadata(places: torch.Tensor, itemsize: int) -> torch.Tensor:
    """The places as the registers of ``wgmma.mma_async.sp`` want them, 64 rows and 64 columns each.

    In a quad of threads, with 16 bits: threads 0 and 1 have two rows, 8 apart, of 16 columns each
    for the first 32 columns (selector 0), threads 2 and 3 for the other 32 (selector 1). With 8
    bits each has one row of 32 columns.

    Args:
        places: uint8 [N, K / 4], as in ``Compressed``.
        itemsize: of the values, 1 or 2 bytes.

    Returns:
        int32 [⌈N / 64⌉, ⌈K / 64⌉, 128]: a register of each of 128 threads.
    """
    rows, columns = places.shape
    padded = places.new_full((-(-rows // ROWS) * ROWS, -(-columns // 16) * 16), 0b1110)
    padded[:rows, :columns] = places
    fours = padded.view(-1, 4, 2, 8, padded.shape[1] // 16, 2, 2, 4).long()
    # [block, warp, row half, row, step, 32 columns, 16 columns, place]
    halves = (fours << torch.arange(0, 16, 4, device=places.device)).sum(-1)
    if itemsize == 2:  # a register: two rows; threads of a quad: 32 columns, 16 columns
        low, high = halves.unbind(2)
        words = (low | high << 16).permute(0, 3, 1, 2, 4, 5)
    else:  # a register: 32 columns of a row; threads of a quad: 32 columns, rows 8 apart
        low, high = halves.unbind(-1)
        words = (low | high << 16).permute(0, 4, 1, 3, 5, 2)
    made = words.reshape(words.shape[0], words.shape[1], -1)
    return (made - (made >> 31 << 32)).to(torch.int32)
