"""Groups of channels in the Hopper convolution: what a tile reads of its input, and its weights.

A tile of output channels reads the input channels of those groups that it has a part of, and no
others; where a weight would join two groups it is zero. 64 output channels in groups of four are 16
times as many products as count, and tensor cores make them while the tile's pixels arrive: 128
channels in 32 groups at 56 × 56, 128 images, take 75.6 µs on an H200, cuDNN's kernel 162. An input
that is not finite makes NaN in other groups of its tile, too.

What a tile reads begins at a multiple of 16 bytes, as bulk copies must: 20 channels a group, read
from byte 40 on, stopped an H200 with an illegal instruction.
"""

from __future__ import annotations

import functools

import torch


@functools.lru_cache(maxsize=1024)
def reach(groups: int, group_k: int, group_c: int, tile_k: int, unit: int) -> int:
    """The most input channels that a tile reads: all of them, if there is one group.

    Args:
        group_k, group_c: output and input channels of a group.
        tile_k: output channels of a tile.
        unit: channels in 16 bytes, where what it reads begins.
    """
    K = groups * group_k
    ends = (((min(k + tile_k, K) - 1) // group_k + 1) * group_c for k in range(0, K, tile_k))
    firsts = (k // group_k * group_c // unit * unit for k in range(0, K, tile_k))
    return max(end - first for end, first in zip(ends, firsts, strict=True))


def pack(weight: torch.Tensor, groups: int, tile_k: int, channels: int, unit: int) -> torch.Tensor:
    """[K, C / groups, R, S] → [K', channels, R, S] channels_last: whole tiles, with zeros between.

    Channel 0 of a row is the first that the row's tile reads (``walk_device.first_channel``).

    Args:
        channels: ``reach`` or more.
    """
    K, group_c, R, S = weight.shape
    group_k = K // groups
    k = torch.arange(K, device=weight.device)
    at = k // group_k * group_c - k // tile_k * tile_k // group_k * group_c // unit * unit
    index = at[:, None] + torch.arange(group_c, device=weight.device)
    # fp8 as bytes: not everything takes it
    numbers = weight.view(torch.int8) if weight.itemsize == 1 else weight
    rows = numbers.new_zeros(-(-K // tile_k) * tile_k, R, S, channels)
    rows[:K].scatter_(
        3, index[:, None, None, :].expand(K, R, S, group_c), numbers.permute(0, 2, 3, 1)
    )
    return rows.view(weight.dtype).permute(0, 3, 1, 2)
