"""Pooling over windows in plain Triton, NHWC and NCHW: the largest number, or the mean.

A tile is some output pixels by some channels, or some planes by some pixels: what lies together in
memory is the tile's second axis. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.kernels.catalog import Call, Config
from tessella.kernels.launch import launch
from tessella.kernels.overlap import await_earlier, overlapping
from tessella.kernels.pointwise.axes import tile_width
from tessella.kernels.problem import Problem

WRITES_OUT = True

MAX_ELEMENTS = 2**31 - 1  # offsets have 32 bits
MAX_TAPS = 128  # of a window: they are unrolled
LARGE_TAPS = 25
FEW_TILES = 1000  # about eight a multiprocessor
TYPES = ("float32", "float16", "bfloat16", "int8")


def fits(problem: Problem) -> str | None:
    x, out = problem.inputs[0], problem.output
    if x.dtype not in TYPES or out.dtype != x.dtype:
        return f"no windows of {x.dtype}"
    if problem.op != "max_pool2d" and x.dtype == "int8":
        return "the mean of int8 has another scale"
    if len(x.shape) != 4 or x.format != out.format or x.format == "strided":
        return "needs [N, C, H, W], dense, and keeps the format"
    if 0 in x.shape or 0 in out.shape:
        return "nothing to pool"
    if max(map(_elements, (x.shape, out.shape))) > MAX_ELEMENTS:
        return "indices have 32 bits"
    if problem.op == "adaptive_avg_pool2d" and any(
        size % wanted for size, wanted in zip(x.shape[2:], out.shape[2:], strict=True)
    ):
        return "windows of several sizes"
    window = _window(problem)
    taps = window["KERNEL_H"] * window["KERNEL_W"]
    return None if taps <= MAX_TAPS else f"a window of {taps} pixels, at most {MAX_TAPS}"


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles of 1024 elements by 4 warps, and others; the small ones first where they are few.

    Of NCHW, which is read element by element, and of large windows, which compile for seconds, only
    small ones.
    """
    rows, columns = _sizes(problem)
    width = tile_width(columns, 256)
    window = _window(problem)
    elements = [1024, 2048, 512]
    if rows * columns < FEW_TILES * elements[0]:
        elements = [512, 1024]
    if not _channels_last(problem) or window["KERNEL_H"] * window["KERNEL_W"] > LARGE_TAPS:
        elements = [512]
    sizes = dict.fromkeys(max(1, size // width) for size in elements)
    return tuple({"tile_rows": rows, "tile_columns": width, "warps": 4} for rows in sizes)


def bind(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    *,
    tile_rows: int,
    tile_columns: int,
    warps: int,
) -> Call:
    _, channels, height, width = problem.inputs[0].shape
    rows, columns = _sizes(problem)
    grid = (triton.cdiv(rows, tile_rows) * triton.cdiv(columns, tile_columns),)
    window = {
        "CHANNELS": channels,
        "HEIGHT": height,
        "WIDTH": width,
        **dict(zip(("OUT_HEIGHT", "OUT_WIDTH"), problem.output.shape[2:], strict=True)),
        "LAST": _channels_last(problem),
        **_window(problem),
    }

    def run(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        launch(
            window_kernel,
            grid,
            x,
            out,
            rows,
            TILE_ROWS=tile_rows,
            TILE_COLUMNS=tile_columns,
            num_warps=warps,
            **overlapping(),
            **window,
        )
        return out

    return run


def _channels_last(problem: Problem) -> bool:
    return problem.inputs[0].format == "channels_last"


def _sizes(problem: Problem) -> tuple[int, int]:
    """Rows and columns of the result: pixels by channels, or planes by pixels."""
    images, channels, height, width = problem.output.shape
    if _channels_last(problem):
        return images * height * width, channels
    return images * channels, height * width


def _window(problem: Problem) -> dict[str, Any]:
    """The window, as compile-time constants."""
    a, op = problem.attrs, problem.op
    if op == "adaptive_avg_pool2d":
        shapes = zip(problem.inputs[0].shape[2:], problem.output.shape[2:], strict=True)
        size = tuple(whole // wanted for whole, wanted in shapes)
        settings = {"kernel_size": size, "stride": size, "padding": (0, 0)}
        a = {**settings, "count_include_pad": True, "divisor_override": None}
    pairs = {
        "KERNEL": a["kernel_size"],
        "STRIDE": a["stride"],
        "PADDING": a["padding"],
        "DILATION": a["dilation"] if op == "max_pool2d" else (1, 1),
    }
    return {
        **{f"{name}_{axis}": n for name, pair in pairs.items() for axis, n in zip("HW", pair)},
        "MEAN": op != "max_pool2d",
        "PADDED": bool(a.get("count_include_pad")),
        "DIVISOR": a.get("divisor_override") or 0,
    }


def _elements(shape: Any) -> int:
    return int(torch.Size(shape).numel())


@triton.jit
def window_kernel(
    x_pointer,
    y_pointer,
    n_rows,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    MEAN: tl.constexpr,
    PADDED: tl.constexpr,  # the padding counts in the mean
    DIVISOR: tl.constexpr,  # of the mean; 0: the number of pixels
    LAST: tl.constexpr,  # channels_last
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_earlier(OVERLAP)
    PIXELS: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    COLUMNS: tl.constexpr = CHANNELS if LAST else PIXELS
    TILES: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    tile = tl.program_id(0)
    rows = ((tile // TILES) * TILE_ROWS + tl.arange(0, TILE_ROWS))[:, None]
    columns = ((tile % TILES) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS))[None, :]
    inside = (rows < n_rows) & (columns < COLUMNS)
    if LAST:
        pixels = rows % PIXELS
        starts = rows // PIXELS * (HEIGHT * WIDTH * CHANNELS) + columns
        PITCH: tl.constexpr = CHANNELS
    else:
        pixels = columns
        starts = rows * (HEIGHT * WIDTH)
        PITCH: tl.constexpr = 1
    top = pixels // OUT_WIDTH * STRIDE_H - PADDING_H
    left = pixels % OUT_WIDTH * STRIDE_W - PADDING_W
    if MEAN:
        made = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    elif x_pointer.dtype.element_ty == tl.int8:  # int8 to float32 has a quarter of the rate
        made = tl.full([TILE_ROWS, TILE_COLUMNS], -128, tl.int16)
    elif x_pointer.dtype.element_ty == tl.float16:  # two at a time
        made = tl.full([TILE_ROWS, TILE_COLUMNS], float("-inf"), tl.float16)
    else:
        made = tl.full([TILE_ROWS, TILE_COLUMNS], float("-inf"), tl.float32)
    for r in tl.static_range(KERNEL_H):
        for s in tl.static_range(KERNEL_W):
            h = top + r * DILATION_H
            w = left + s * DILATION_W
            there = inside & (h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH)
            places = starts + (h * WIDTH + w) * PITCH
            if MEAN:
                made += tl.load(x_pointer + places, mask=there, other=0).to(tl.float32)
            elif x_pointer.dtype.element_ty == tl.int8:
                x = tl.load(x_pointer + places, mask=there, other=-128).to(tl.int16)
                made = tl.maximum(made, x)
            else:
                x = tl.load(x_pointer + places, mask=there, other=float("-inf")).to(made.dtype)
                made = tl.maximum(made, x, propagate_nan=tl.PropagateNan.ALL)
    if MEAN:
        if DIVISOR != 0:
            made = made / DIVISOR
        else:
            tall = _overlap(top, KERNEL_H, HEIGHT, PADDING_H, PADDED)
            wide = _overlap(left, KERNEL_W, WIDTH, PADDING_W, PADDED)
            made = made / (tall * wide).to(tl.float32)
    y = made.to(y_pointer.dtype.element_ty)
    tl.store(y_pointer + rows * COLUMNS + columns, y, mask=inside)


@triton.jit
def _overlap(
    start, KERNEL: tl.constexpr, SIZE: tl.constexpr, PADDING: tl.constexpr, PADDED: tl.constexpr
):
    """How many places of a window lie on the image, or on it and its padding."""
    end = tl.minimum(start + KERNEL, SIZE + PADDING)
    if PADDED:
        n = end - start
    else:
        n = tl.minimum(end, SIZE) - tl.maximum(start, 0)
    return tl.maximum(n, 1)  # of places that are not stored
