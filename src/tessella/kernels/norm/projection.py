"""1×1 convolutions with the batch norm behind them in training, and the sum and ReLU behind that.

What such a convolution makes, often the largest tensor around it, is only read by its norm. The
norm's moments follow from those of the smaller tensor that the convolution reads, ``Var(W x) =
W Cov(x) Wᵀ``, so that one product with folded weights makes the result at once; and backward, the
gradients of x and of the weights are products of the result's gradient, less products of x. Of the
convolution's result nothing is written, read or kept: of a ResNet-50's bottleneck, 7 of 14 passes
over tensors of that size are left. In plain Triton, of channels_last tensors of 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tessella.core.architectures import Feature, has
from tessella.core.integers import ceil_div
from tessella.device.launch import launch
from tessella.device.machine import gpu_target, multiprocessors
from tessella.kernels.norm.projection_device import (
    fold_kernel,
    gradient_kernel,
    products_kernel,
    project_kernel,
    remainder_kernel,
    slopes_kernel,
    total_kernel,
)

# and what multiplies them; without it Triton's code keeps kilobytes a thread in memory (sm_75)
_DTYPES: dict[torch.dtype, Feature] = {torch.float16: "fp16_mma", torch.bfloat16: "bf16_mma"}
# Channels of x and of the result that are taken: those with which an H200 was faster. ResNet-50's
# last stage takes 3.62 ms with (512, 2048) and 3.21 without; less wide results were not compared.
TAKEN = frozenset({(64, 256), (128, 512), (256, 1024)})
_BLOCKS = 2  # a multiprocessor's, in products over rows


class Projection(NamedTuple):
    """A convolution of one tap and its norm.

    Attributes:
        x: [N, K, H, W].
        weight: float32 [C, K, 1, 1].
        gamma, beta: float32 [C], as ``running``: the mean and variance that move by ``momentum``
            towards the batch's.
    """

    x: Tensor
    weight: Tensor
    gamma: Tensor
    beta: Tensor
    running: tuple[Tensor, Tensor] | None = None
    momentum: float = 0.1
    eps: float = 1e-5


class Kept(NamedTuple):
    """Float32 numbers of the forward pass: of x, ``[K, K]`` products and ``[K]`` sums in one; of
    the result, mean and one by the deviation, [C]; and ``W Cov(x)``, [C, K]."""

    totals: Tensor
    mean: Tensor
    inverse: Tensor
    spread: Tensor


class Gradients(NamedTuple):
    """Of what a projection was given."""

    x: Tensor
    weight: Tensor
    gamma: Tensor
    beta: Tensor


def widens(shape: Sequence[int]) -> bool:
    """Whether a convolution, whose weight has this shape, is taken together with its norm."""
    channels, deep, *taps = shape
    return taps == [1, 1] and (deep, channels) in TAKEN


def runs(x: Tensor, weight: Tensor) -> bool:
    """Whether a convolution without bias can run together with its norm: x [N, K, H, W] of 16 bits
    in channels_last, where Triton runs and has tensor cores for them, weight float32
    [C, K, 1, 1]."""
    return (
        x.dim() == 4
        and x.dtype in _DTYPES
        and has(gpu_target(), _DTYPES[x.dtype])
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and widens(weight.shape)
        and x.shape[1] == weight.shape[1]
        and x.numel() > x.shape[1]
        and x.is_contiguous(memory_format=torch.channels_last)
        and (x.is_cuda or triton.knobs.runtime.interpret)
    )


def project(
    given: Sequence[Projection], *, residual: Tensor | None = None, relu: bool = False
) -> tuple[Tensor, list[Kept], Tensor | None]:
    """``relu(sum of projections + residual)``.

    Args:
        given: one, or two whose results have the same shape.
        residual: like the result, of the same element type.

    Returns:
        The result, [N, C, H, W] in channels_last; what ``backward`` needs of each; and where there
        is a ReLU, a bit for each place that tells whether the result was positive.
    """
    x = given[0].x
    rows, channels = _rows(x), given[0].weight.shape[0]
    folded = [_folded(one) for one in given]
    y = torch.empty(
        (x.shape[0], channels, *x.shape[2:]), dtype=x.dtype, device=x.device,
        memory_format=torch.channels_last,
    )  # fmt: skip
    bits = torch.empty(rows, channels // 8, dtype=torch.uint8, device=x.device) if relu else None
    second: tuple[Tensor | None, ...] = (None, None, None)
    deep = 0
    if len(given) > 1:
        second, deep = (given[1].x, *folded[1][:2]), given[1].x.shape[1]
    tile = _tile_of_results(channels, min(x.shape[1], deep or x.shape[1]))
    launch(
        project_kernel, (ceil_div(rows, tile["ROWS"]) * (channels // tile["COLUMNS"]),),
        x, *folded[0][:2], *second, residual, y, bits, rows,
        C=channels, K=x.shape[1], OTHER=deep, **tile, RELU=relu,
    )  # fmt: skip
    return y, [kept for _, _, kept in folded], bits


def backward(
    gradients: Sequence[Tensor],
    given: Sequence[Projection],
    kept: Sequence[Kept],
    bits: Tensor | None,
    *,
    residual: bool,
) -> tuple[list[Gradients], Tensor | None]:
    """The gradients of ``project``'s projections and of its residual, if it had one.

    Args:
        gradients: one or two of its result, which are added.
        kept, bits: as it returned them.
    """
    first, second = gradients[0], gradients[1] if len(gradients) > 1 else None
    joins = residual or second is not None or bits is not None
    joined = torch.empty_like(first) if joins else None
    made = []
    for number, (one, own) in enumerate(zip(given, kept, strict=True)):
        if number == 0:
            totals = _products(first, one.x, second, bits, joined)
        else:
            totals = _products(first if joined is None else joined, one.x)
        made.append(_gradients(first if joined is None else joined, one, own, totals))
    return made, joined if residual else None


# Tiles measured on an H200 in FP16: 64 to 512 channels widened to four times as many.


def _tile_of_products(wide: int, deep: int) -> dict[str, Any]:
    if deep <= 64:
        rows, high, columns, warps = (32, 128, 64, 4) if wide > deep else (128, 64, 64, 4)
    elif deep <= 128:
        rows, high, columns, warps = 64, 64, 128, 4
    else:
        rows, high, columns, warps = (32, 128, 128, 4) if wide > deep else (64, 64, 128, 4)
    return {
        "ROWS": rows, "WIDE": min(wide, high), "DEEP": min(deep, columns), "num_warps": warps,
        "num_stages": 3,
    }  # fmt: skip


def _tile_of_results(channels: int, deep: int) -> dict[str, Any]:
    columns, warps = (256, 8) if deep <= 64 and channels % 256 == 0 else (min(channels, 128), 4)
    tile = {"ROWS": 64, "COLUMNS": columns, "DEEP": min(deep, 64)}
    return tile | {"num_warps": warps, "num_stages": 3}


def _tile_of_gradients(channels: int, deep: int) -> dict[str, Any]:
    tile = {"ROWS": 128, "COLUMNS": min(deep, 128), "DEEP": min(channels, 64)}
    return tile | {"LESS": min(deep, 64), "num_warps": 8, "num_stages": 3}


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def _numbers(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _products(
    a: Tensor, b: Tensor, second: Tensor | None = None, bits: Tensor | None = None,
    joined: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``aᵀ b`` of rows, and a's column sums behind it, float32 [A · B + A]; see the kernel."""
    rows, wide, deep = _rows(a), a.shape[1], b.shape[1]
    tile = _tile_of_products(wide, deep)
    across = (wide // tile["WIDE"], deep // tile["DEEP"])
    most = max(1, _BLOCKS * multiprocessors() // (across[0] * across[1]))
    blocks, count = min(ceil_div(rows, tile["ROWS"]), most), wide * deep + wide
    shares = _numbers(a, blocks, count)
    launch(
        products_kernel, (blocks, *across),
        a, second, bits, joined, b, shares, rows, A=wide, B=deep, **tile,
    )  # fmt: skip
    if blocks == 1:
        return shares[0]
    made = _numbers(a, count)
    launch(
        total_kernel, (ceil_div(count, 32),), shares, made, count, blocks,
        BLOCKS=min(128, triton.next_power_of_2(blocks)), COLUMNS=32, num_warps=4,
    )  # fmt: skip
    return made


def _folded(one: Projection) -> tuple[Tensor, Tensor, Kept]:
    """Weights in the type of x and a bias that give normalized results, and what is kept."""
    x = one.x
    channels, deep = one.weight.shape[:2]
    totals = _products(x, x)
    low = torch.empty(channels, deep, dtype=x.dtype, device=x.device)
    bias = _numbers(x, channels)
    kept = Kept(totals, _numbers(x, channels), _numbers(x, channels), _numbers(x, channels, deep))
    launch(
        fold_kernel, (channels // 16,),
        totals, one.weight, one.gamma, one.beta, *(one.running or (None, None)), low, bias,
        *kept[1:], _rows(x), one.momentum, one.eps,
        C=channels, K=deep, CHANNELS=16, DEEP=min(deep, 64), num_warps=4,
    )  # fmt: skip
    return low, bias, kept


def _gradients(g: Tensor, one: Projection, kept: Kept, totals: Tensor) -> Gradients:
    """Of a projection by the gradient of its result, and by that one's products with x."""
    x, weight = one.x, one.weight
    rows, (channels, deep) = _rows(x), weight.shape[:2]
    of_weight, of_gamma = torch.empty_like(weight), torch.empty_like(one.gamma)
    of_beta, of_x = torch.empty_like(one.beta), torch.empty_like(x)
    low, less = (
        torch.empty(count, deep, dtype=x.dtype, device=x.device) for count in (channels, deep)
    )
    shares, scale, constant = _numbers(x, 2, channels), _numbers(x, deep), _numbers(x, deep)
    sums = kept.totals[deep * deep :]
    launch(
        slopes_kernel, (channels // 16,),
        totals, sums, weight, one.gamma, *kept[1:], of_weight, of_gamma, of_beta, low, shares, rows,
        C=channels, K=deep, CHANNELS=16, num_warps=4,
    )  # fmt: skip
    launch(
        remainder_kernel, (deep // 16, deep // min(deep, 64)),
        weight, shares, kept.mean, less, scale, constant,
        C=channels, K=deep, ROWS=16, DEEP=min(deep, 64), num_warps=4,
    )  # fmt: skip
    tile = _tile_of_gradients(channels, deep)
    launch(
        gradient_kernel, (ceil_div(rows, tile["ROWS"]) * (deep // tile["COLUMNS"]),),
        g, low, x, less, scale, constant, of_x, rows, C=channels, K=deep, **tile,
    )  # fmt: skip
    return Gradients(of_x, of_weight, of_gamma, of_beta)
