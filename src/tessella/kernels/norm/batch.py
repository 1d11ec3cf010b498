"""Batch normalization in training, forward and backward, with the sum and the activation behind it.

Torch reads and writes the tensor of each of these steps; here the forward pass reads what is
normalized twice and writes the result once, and the backward pass reads it and its gradient twice.
A sum may be with a residual or with what another norm makes, and where the result goes two ways,
both gradients are added on the way back. Written after Ioffe and Szegedy, 2015. In plain Triton, of
channels_last tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from tessella.device.launch import launch
from tessella.device.machine import multiprocessors
from tessella.kernels.norm.batch_device import (
    gradient_sums_kernel,
    input_gradient_kernel,
    moments_kernel,
    normalize_kernel,
    parameters_kernel,
    statistics_kernel,
)

Activation = Literal["relu", "relu6", "silu"] | None

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ELEMENTS = 4096  # of a tile
_WIDEST = 256
_TILES, _FULL = 8, 8  # a block's at most in passes without sums; a multiprocessor's blocks at least
_WARPS = 8
_BLOCKS = 2  # a multiprocessor's, in passes with sums
_SUMMED: dict[str, Any] = {
    "BLOCKS": 256,
    "COLUMNS": 16,
    "num_warps": 8,
}  # a tile of all blocks' sums


class Norm(NamedTuple):
    """What is normalized, [N, C, H, W], and how; the rest is float32 [C].

    Attributes:
        running: mean and variance, which move towards the batch's by ``momentum``.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor
    running: tuple[Tensor, Tensor] | None = None
    momentum: float = 0.1
    eps: float = 1e-5


class Statistics(NamedTuple):
    """Of each channel of a batch, float32: the mean, and one by the deviation."""

    mean: Tensor
    inverse: Tensor


class Gradients(NamedTuple):
    """Of what a norm was given."""

    x: Tensor
    weight: Tensor
    bias: Tensor


def runs(x: Tensor) -> bool:
    """Whether a tensor can be normalized here: [N, C, H, W] in channels_last, where Triton runs."""
    return (
        x.dim() == 4
        and x.dtype in _DTYPES
        and x.shape[1] % 8 == 0
        and x.numel() > x.shape[1]
        and x.is_contiguous(memory_format=torch.channels_last)
        and (x.is_cuda or triton.knobs.runtime.interpret)
    )


def normalize(
    norms: Sequence[Norm], *, residual: Tensor | None = None, activation: Activation = None
) -> tuple[Tensor, list[Statistics], Tensor | None]:
    """``activation(sum of norms + residual)``.

    Args:
        norms: one, or two without a residual; their ``x`` run, and have the same shape and type.
        residual: like ``x``.

    Returns:
        The result; each norm's statistics; and where a ReLU was given a sum, a bit for each place
        that tells whether it was positive.
    """
    x = norms[0].x
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    tile, grid = _tile(rows, channels)
    found = [_statistics(norm, tile, grid) for norm in norms]
    y = torch.empty_like(x)
    other, other_norm = residual, None
    if len(norms) > 1:
        other, other_norm = norms[1].x, (*found[1], *norms[1][1:3])
    bits = None
    if other is not None and activation == "relu":
        bits = torch.empty(rows, channels // 8, dtype=torch.uint8, device=x.device)
    tiles, passes = _passes(rows, tile, grid)
    launch(
        normalize_kernel, passes,
        x, (*found[0], *norms[0][1:3]), other, other_norm, y, bits, rows, channels,
        **tile, TILES=tiles, ACTIVATION=activation, num_warps=_WARPS,
    )  # fmt: skip
    return y, found, bits


def backward(
    gradients: Sequence[Tensor],
    norms: Sequence[Norm],
    found: Sequence[Statistics],
    bits: Tensor | None,
    *,
    residual: bool,
    activation: Activation = None,
) -> tuple[list[Gradients], Tensor | None]:
    """The gradients of ``normalize``'s norms and of its residual, if it had one.

    Args:
        gradients: one or two of its result, which are added.
        found, bits: as it returned them.
    """
    x = norms[0].x
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    tile, grid = _tile(rows, channels)
    operands = [(*own, *norm[1:3]) for own, norm in zip(found, norms, strict=True)]
    sums = [_numbers(x, 2, grid[0], channels) for _ in norms]
    joins = residual or len(gradients) > 1 or len(norms) > 1
    joined = torch.empty_like(x) if joins else None
    other = (norms[1].x, operands[1], sums[1]) if len(norms) > 1 else (None, None, None)
    launch(
        gradient_sums_kernel, grid,
        gradients[0], gradients[1] if len(gradients) > 1 else None, x, operands[0], *other[:2],
        bits, joined, sums[0], other[2], rows, channels,
        **tile, AT_ONCE=_at_once(tile), ACTIVATION=activation, num_warps=_WARPS,
    )  # fmt: skip
    made = []
    tiles, passes = _passes(rows, tile, grid)
    for norm, own, operand, own_sums in zip(norms, found, operands, sums, strict=True):
        of_weight, of_bias = torch.empty_like(norm.weight), torch.empty_like(norm.bias)
        shares = _numbers(x, 2, channels)
        launch(
            parameters_kernel, (triton.cdiv(channels, _SUMMED["COLUMNS"]),),
            own_sums, own.inverse, of_weight, of_bias, shares, grid[0], rows, channels,
            **_SUMMED,
        )  # fmt: skip
        of_x = torch.empty_like(x)
        given, left = (gradients[0], activation) if joined is None else (joined, None)
        launch(
            input_gradient_kernel, passes,
            given, norm.x, operand, shares, of_x, rows, channels,
            **tile, TILES=tiles, ACTIVATION=left, num_warps=_WARPS,
        )  # fmt: skip
        made.append(Gradients(of_x, of_weight, of_bias))
    return made, joined if residual else None


def _statistics(norm: Norm, tile: dict[str, Any], grid: tuple[int, int]) -> Statistics:
    x = norm.x
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    sums = _numbers(x, 2, grid[0], channels)
    launch(
        moments_kernel,
        grid,
        x,
        sums,
        rows,
        channels,
        **tile,
        AT_ONCE=_at_once(tile),
        num_warps=_WARPS,
    )
    found = Statistics(_numbers(x, channels), _numbers(x, channels))
    launch(
        statistics_kernel, (triton.cdiv(channels, _SUMMED["COLUMNS"]),),
        sums, x, *found, *(norm.running or (None, None)), grid[0], rows, channels,
        norm.momentum, norm.eps,
        **_SUMMED,
    )  # fmt: skip
    return found


def _tile(rows: int, channels: int) -> tuple[dict[str, Any], tuple[int, int]]:
    """A tile's sides, and the blocks along rows and channels of a pass with sums."""
    columns = min(triton.next_power_of_2(channels), _WIDEST)
    height = _ELEMENTS // columns
    across = triton.cdiv(channels, columns)
    most = max(1, _BLOCKS * multiprocessors() // across)
    tile = {"ROWS": height, "COLUMNS": columns}
    blocks = min(triton.cdiv(rows, height * _at_once(tile)), most)
    return tile, (blocks, across)


def _at_once(tile: dict[str, Any]) -> int:
    """Tiles that a block of a pass with sums loads at once. On an H200 moments of 256 channels at
    14² (256 images, FP16) take 19 µs where twice the blocks with a tile each take 29.
    """
    return 2 if tile["COLUMNS"] == _WIDEST else 4


def _passes(rows: int, tile: dict[str, Any], grid: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """A block's tiles in a pass without sums, and the grid."""
    tiles = _TILES
    while (
        tiles > 1 and triton.cdiv(rows, tile["ROWS"] * tiles) * grid[1] < _FULL * multiprocessors()
    ):
        tiles //= 2
    return tiles, (triton.cdiv(rows, tile["ROWS"] * tiles), grid[1])


def _numbers(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)
