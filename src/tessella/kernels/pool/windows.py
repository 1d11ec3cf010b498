"""Pooling over windows, NHWC and NCHW: the largest number, or the mean, and chains around it.

What is done element by element to what a window reads, and to its result, is done on the way; but
before windows that overlap only what is cheaper than another trip to memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton

from tessella.core.errors import CompileError, KernelError
from tessella.device.launch import launch
from tessella.device.overlap import overlapping
from tessella.kernels.catalog import Call, Config
from tessella.kernels.pool.windows_device import Window, window_kernel
from tessella.kernels.shared.axes import along, tile_width
from tessella.kernels.shared.pooled_program import PooledProgram, in_parts
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

MAX_ELEMENTS = 2**31 - 1  # offsets have 32 bits
MAX_TAPS = 128  # of a window: they are unrolled
LARGE_TAPS = 25
FEW_TILES = 1000  # about eight a multiprocessor
CHEAP = ("sub", "mul", "times")  # what may be done again at each tap: a dequantization


def fits(problem: Problem) -> str | None:
    try:
        _require(problem, in_parts(problem))
    except (KernelError, CompileError) as reason:
        return str(reason)
    return None


def _require(problem: Problem, made: PooledProgram) -> None:
    x, y, out = made.x, made.y, problem.output
    tensors = [m for m in (*problem.inputs, out) if m is not None]
    images = [m for m in tensors if m.shape in (x.shape, y.shape)]
    if any(m.format == "strided" and m.strides is None for m in tensors):
        raise KernelError("strides must be known when the plan is built")
    if len({_channels_last(m) for m in images if max(m.shape[2:]) > 1 < m.shape[1]}) > 1:
        raise KernelError("needs images of one format, which it keeps")
    if 0 in x.shape or 0 in y.shape:
        raise KernelError("nothing to pool")
    if max(math.prod(m.shape) for m in images) > MAX_ELEMENTS:
        raise KernelError("indices have 32 bits")
    if made.pool.op == "adaptive_avg_pool2d" and any(
        size % wanted for size, wanted in zip(x.shape[2:], y.shape[2:], strict=True)
    ):
        raise KernelError("windows of several sizes")
    window = _window(made)
    taps = window.KERNEL_H * window.KERNEL_W
    if taps > MAX_TAPS:
        raise KernelError(f"a window of {taps} pixels, at most {MAX_TAPS}")
    overlap = window.KERNEL_H > window.STRIDE_H or window.KERNEL_W > window.STRIDE_W
    if overlap and not set(made.before.lowered.ops) <= set(CHEAP):
        raise KernelError("windows overlap, so what is done before them would be done again")


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles of 1024 elements by 4 warps, and others; the small ones first where they are few.

    Of NCHW, which is read element by element, and of large windows, which compile for seconds, only
    small ones.
    """
    made = in_parts(problem)
    last = _is_last(problem, made)
    rows, columns = _sizes(made.y, last)
    width = tile_width(columns, 256)
    window = _window(made)
    elements = [1024, 2048, 512]
    if rows * columns < FEW_TILES * elements[0]:
        elements = [512, 1024]
    if not last or window.KERNEL_H * window.KERNEL_W > LARGE_TAPS:
        elements = [512]
    sizes = dict.fromkeys(max(1, size // width) for size in elements)
    return tuple({"tile_rows": rows, "tile_columns": width, "warps": 4} for rows in sizes)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    made = in_parts(problem)
    before, after, last = made.before, made.after, _is_last(problem, made)
    rows, columns = _sizes(made.y, last)
    grid = (triton.cdiv(rows, tile["tile_rows"]) * triton.cdiv(columns, tile["tile_columns"]),)
    settings: dict[str, Any] = {
        "STRIDES": (*before.strides, *after.strides[1:], along(problem.output, made.y.shape)),
        "FIRST": made.first,
        "WINDOW": _window(made),
        "THEN": made.then,
        "LAST": last,
    }
    tensors = made.binder(constants)

    def run(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        launch(
            window_kernel,
            grid,
            tensors(problem.tensors(constants, inputs)),
            out,
            rows,
            TILE_ROWS=tile["tile_rows"],
            TILE_COLUMNS=tile["tile_columns"],
            num_warps=tile["warps"],
            **overlapping(),
            **settings,
        )
        return out

    return run


def _channels_last(meta: TensorMeta) -> bool:
    return meta.pixel_pitch is not None


def _is_last(problem: Problem, made: PooledProgram) -> bool:
    """Whether the images that are pooled have a pixel's channels together."""
    images = (m for m in problem.inputs if m is not None and m.shape == made.x.shape)
    return _channels_last(next(images, problem.output))


def _sizes(y: TensorMeta, last: bool) -> tuple[int, int]:
    """Rows and columns of the result: pixels by channels, or planes by pixels."""
    images, channels, height, width = y.shape
    if last:
        return images * height * width, channels
    return images * channels, height * width


def _window(made: PooledProgram) -> Window:
    a, op = made.pool.attrs, made.pool.op
    if op == "adaptive_avg_pool2d":
        shapes = zip(made.x.shape[2:], made.y.shape[2:], strict=True)
        size = tuple(whole // wanted for whole, wanted in shapes)
        settings = {"kernel_size": size, "stride": size, "padding": (0, 0)}
        a = {**settings, "count_include_pad": True, "divisor_override": None}
    pairs = {
        "KERNEL": a["kernel_size"],
        "STRIDE": a["stride"],
        "PADDING": a["padding"],
        "DILATION": a["dilation"] if op == "max_pool2d" else (1, 1),
    }
    return Window(
        **dict(zip(("CHANNELS", "HEIGHT", "WIDTH"), made.x.shape[1:], strict=True)),
        **dict(zip(("OUT_HEIGHT", "OUT_WIDTH"), made.y.shape[2:], strict=True)),
        **{f"{name}_{axis}": n for name, pair in pairs.items() for axis, n in zip("HW", pair)},
        MEAN=op != "max_pool2d",
        PADDED=bool(a.get("count_include_pad")),
        DIVISOR=a.get("divisor_override") or 0,
    )
