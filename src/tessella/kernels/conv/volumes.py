"""Convolutions of volumes in training, and the gradients of what they read, on Hopper.

With a filter turned round, the gradient is a convolution as well. cuDNN takes up to 2.3 times as
long for few channels: a volume's slices are read once for each column of a filter, not each tap.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from tessella.core.dtype import SIXTEEN_BIT, dtype_name
from tessella.device.machine import gpu
from tessella.kernels.conv.hopper import implicit_gemm, implicit_gemm_tiles
from tessella.operations import problems
from tessella.operations.tensor_meta import Format, TensorMeta

FEWEST = 16  # channels: of fewer, most of what is multiplied would be zeros
FEWEST_VOXELS = 1 << 15  # of smaller ones a launch for each of a batch takes longer
UNIT = 8  # channels of 16 bytes


def runs(x: Tensor, weight: Tensor, window: tuple[tuple[int, ...], ...], groups: int) -> bool:
    """Whether volumes [N, C, D, H, W] can be convolved here, and their gradients.

    Args:
        window: stride, padding and dilation.
    """
    stride, padding, dilation = window
    if x.dim() != 5 or weight.dim() != 5 or not x.is_cuda or "wgmma" not in gpu().has:
        return False
    taps = tuple(weight.shape[2:])
    return (
        dtype_name(x.dtype) in SIXTEEN_BIT
        and groups == 1
        and {*stride, *dilation} == {1}
        and all(t % 2 for t in taps)
        and max(taps) > 1
        and math.prod(x.shape[2:]) >= FEWEST_VOXELS
        and padding == tuple(t // 2 for t in taps)
        and all(c >= FEWEST and c % UNIT == 0 for c in weight.shape[:2])
        and 0 < max(weight.shape[:2]) * (x.numel() // max(1, x.shape[1])) < 2**31
        and x.is_contiguous(memory_format=torch.channels_last_3d)
    )


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """The convolution of x [N, C, D, H, W] with weight [K, C, …] of the same type: as large as x.

    Both may lie in any way; the result is of channels_last.
    """
    x = x.contiguous(memory_format=torch.channels_last_3d)
    weight = weight.contiguous()
    call, nbytes = _bound(tuple(x.shape), tuple(weight.shape), dtype_name(x.dtype))
    out = out_of(x, weight)
    space = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    call(x, weight, out=out, workspace=space)
    return out


def out_of(x: Tensor, weight: Tensor) -> Tensor:
    """Where a result goes."""
    shape = (x.shape[0], weight.shape[0], *x.shape[2:])
    layout = torch.channels_last_3d
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


def turned(weight: Tensor) -> Tensor:
    """The filters with which the gradient of the result gives that of what was read."""
    return weight.transpose(0, 1).flip(2, 3, 4)


@functools.lru_cache(maxsize=256)
def _bound(x: tuple[int, ...], weight: tuple[int, ...], dtype: str) -> tuple[Any, int]:
    """The kernel in its first configuration, which was within 2 % of the best of twelve, and the
    bytes that it wants.
    """
    last: Format = "channels_last"
    problem = problems.conv(
        TensorMeta(shape=x, dtype=dtype, format=last),
        TensorMeta(shape=weight, dtype=dtype),
        padding=tuple(t // 2 for t in weight[2:]),
    )
    config = implicit_gemm_tiles.configs(problem)[0]
    nbytes = implicit_gemm.workspace_bytes(problem, **config)
    return implicit_gemm.bind(problem, {}, **config), nbytes
