"""Max pooling in training: the forward pass keeps a byte for each result, the place of its window.

Torch keeps 8 bytes and, in the backward pass, adds; here each input asks the windows that it lies
in whether it was their largest. In plain Triton, of channels_last tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tessella.device.launch import launch
from tessella.kernels.pool.trained_device import gradient_kernel, largest_kernel

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ELEMENTS, _WIDEST, _WARPS = 2048, 256, 4
_MOST = 64  # places of a window


class Window(NamedTuple):
    """The sides, steps and margins of a pooling, along height and width."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @classmethod
    def of(cls, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Window | None:
        """The window by torch's arguments; None for one with gaps."""
        sides = _pair(kernel)
        if _pair(dilation) != (1, 1):
            return None
        return cls(sides, _pair(stride) if stride else sides, _pair(padding))


def runs(x: Tensor, window: Window) -> bool:
    """Whether a tensor can be pooled here: [N, C, H, W] in channels_last, where Triton runs."""
    return (
        x.dim() == 4
        and x.dtype in _DTYPES
        and x.numel() > 0
        and x.shape[1] > 1
        and x.is_contiguous(memory_format=torch.channels_last)
        and (x.is_cuda or triton.knobs.runtime.interpret)
        and window.kernel[0] * window.kernel[1] <= _MOST
        and all(
            2 * p <= k <= s + 2 * p for k, p, s in zip(window.kernel, window.padding, x.shape[2:])
        )
    )


def max_pool(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """The largest of each window, of several the first, and its place in the window (uint8)."""
    size = [(side + 2 * p - k) // s + 1 for side, k, s, p in zip(x.shape[2:], *window, strict=True)]
    y = _empty((*x.shape[:2], *size), x)
    places = torch.empty_like(y, dtype=torch.uint8)
    tile, grid = _tile(y)
    launch(
        largest_kernel, grid,
        x, y, places, y.numel() // y.shape[1], *_sizes(x), *size, **_constants(window), **tile,
    )  # fmt: skip
    return y, places


def max_pool_backward(
    gradient: Tensor, places: Tensor, shape: Sequence[int], window: Window
) -> Tensor:
    """The gradient of what was pooled, of ``shape``."""
    x = _empty(shape, gradient)
    tile, grid = _tile(x)
    launch(
        gradient_kernel, grid,
        gradient, places, x, x.numel() // x.shape[1], *_sizes(x), *gradient.shape[2:],
        **_constants(window), **tile,
    )  # fmt: skip
    return x


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    layout = torch.channels_last
    return torch.empty(*shape, dtype=like.dtype, device=like.device, memory_format=layout)


def _constants(window: Window) -> dict[str, Any]:
    names = ("KERNEL", "STRIDE", "PADDING")
    return {
        f"{name}_{axis}": pair[n]
        for name, pair in zip(names, window, strict=True)
        for n, axis in enumerate("HW")
    }


def _sizes(x: Tensor) -> tuple[int, ...]:
    return x.shape[1], x.shape[2], x.shape[3]


def _tile(made: Tensor) -> tuple[dict[str, Any], tuple[int, int]]:
    channels = made.shape[1]
    columns = min(triton.next_power_of_2(channels), _WIDEST)
    rows = _ELEMENTS // columns
    grid = triton.cdiv(made.numel() // channels, rows), triton.cdiv(channels, columns)
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": _WARPS}, grid


def _pair(value: Any) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    return (pair[0], pair[-1])
