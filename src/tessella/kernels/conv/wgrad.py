"""Gradient of a convolution by its weight in plain Triton: any layout, stride, dilation and groups.

A matrix product of output channels × (tap, input channels), over all pixels. The pixels are cut
into parts for more blocks; their sums are added in order, so they are the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.device.launch import launch
from tessella.device.machine import multiprocessors
from tessella.kernels.catalog import Call, Config
from tessella.kernels.conv.backward import portable_refusal, window_of
from tessella.kernels.conv.tiles import is_wide, on_plain_units
from tessella.kernels.epilogue.triton_device import cast
from tessella.operations.problem import Problem

CHUNK = 256  # elements of dw that one block adds


def fits(problem: Problem) -> str | None:
    return portable_refusal(problem, problem["input"], problem.output, problem["grad"])


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles as large as the gradient fills, and as many parts as fill the GPU twice."""
    rows, columns = _matrix(problem)
    pixels = _pixels(problem)
    plain = on_plain_units(problem, "grad")
    tiles = ((64, 64, 4), (32, 32, 4)) if plain else ((128, 128, 8), (64, 64, 4), (32, 32, 4))
    found = []
    for high, wide, warps in tiles:
        blocks = -(-rows // high) * -(-columns // wide) * problem.attrs["groups"]
        steps = -(-pixels // 32)
        splits = max(1, min(2 * multiprocessors() // blocks, steps // 4, 256))
        if (high < 2 * rows and wide < 2 * columns) or (high, wide) == tiles[-1][:2]:
            found.append({"rows": high, "columns": wide, "splits": splits, "warps": warps})
    return tuple(found)


def _matrix(problem: Problem) -> tuple[int, int]:
    """Rows and columns of one group's gradient: output channels, and taps × input channels."""
    shape = problem.output.shape
    return shape[0] // problem.attrs["groups"], math.prod(shape[1:])


def _pixels(problem: Problem) -> int:
    shape = problem["grad"].shape
    return shape[0] * math.prod(shape[2:])


def workspace_bytes(problem: Problem, **config: Any) -> int:
    """The parts, in float32, where there is more than one."""
    splits = (config or configs(problem)[0])["splits"]
    return 4 * splits * math.prod(problem.output.shape) if splits > 1 else 0


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    config, attrs, made = config or configs(problem)[0], problem.attrs, problem.output
    (rows, columns), pixels, splits = _matrix(problem), _pixels(problem), config["splits"]
    tiles = -(-rows // config["rows"]) * -(-columns // config["columns"])
    taps = (made.shape[2], made.shape[3])

    def call(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        dy, x = problem.tensors(constants, inputs)
        # parts are dense, in the order k, tap, c
        dense = (columns, 1, taps[1] * made.shape[1], made.shape[1])
        target = out
        if splits > 1:
            assert workspace is not None
            target = workspace.view(torch.float32)
        launch(
            _wgrad,
            (tiles, attrs["groups"], splits),
            dy,
            x,
            target,
            pixels,
            rows,
            tuple(x.shape[2:]),
            tuple(dy.shape[2:]),
            dy.stride(),
            x.stride(),
            dense if splits > 1 else out.stride(),
            out.numel() if splits > 1 else 0,
            C=made.shape[1],
            WINDOW=window_of(problem, taps),
            STEPS=-(-pixels // (32 * splits)),
            PRECISION=problem.math if dy.dtype == torch.float32 else "ieee",
            WIDE=is_wide(dy, x),
            ROWS=config["rows"],
            COLUMNS=config["columns"],
            DEPTH=32,
            num_warps=config["warps"],
        )
        if splits > 1:
            launch(
                _add,
                (-(-out.numel() // CHUNK),),
                target,
                out,
                out.numel(),
                out.stride(),
                C=made.shape[1],
                TAPS=taps,
                SPLITS=splits,
                CHUNK=CHUNK,
            )
        return out

    return call


@triton.jit
def _wgrad(
    dy, x, out, pixels, filters, image, size, dy_strides, x_strides, strides, part_stride,
    C: tl.constexpr, WINDOW: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(C * WINDOW.TAPS[0] * WINDOW.TAPS[1], COLUMNS)
    tile, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    k = tile // across * ROWS + tl.arange(0, ROWS)
    j = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    c = j % C
    r = j // C // WINDOW.TAPS[1]
    s = j // C % WINDOW.TAPS[1]
    filter = group * filters + k
    channel = group * C + c
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(0, STEPS):
        m = (part * STEPS + step) * DEPTH + tl.arange(0, DEPTH)
        if WIDE:
            m = m.to(tl.int64)
        n = m // (size[0] * size[1])
        p = m // size[1] % size[0]
        q = m % size[1]
        here = (k < filters)[:, None] & (m < pixels)[None, :]
        at = n * dy_strides[0] + p * dy_strides[2] + q * dy_strides[3]
        a = tl.load(dy + (filter * dy_strides[1])[:, None] + at[None, :], mask=here, other=0.0)
        h = (p * WINDOW.STRIDE[0] - WINDOW.PADDING[0])[:, None] + (r * WINDOW.DILATION[0])[None, :]
        v = (q * WINDOW.STRIDE[1] - WINDOW.PADDING[1])[:, None] + (s * WINDOW.DILATION[1])[None, :]
        here = (m < pixels)[:, None] & (r < WINDOW.TAPS[0])[None, :]
        here = here & (h >= 0) & (h < image[0]) & (v >= 0) & (v < image[1])
        at = (n * x_strides[0])[:, None] + (channel * x_strides[1])[None, :]
        b = tl.load(x + at + h * x_strides[2] + v * x_strides[3], mask=here, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    here = (k < filters)[:, None] & (r < WINDOW.TAPS[0])[None, :]
    at = c * strides[1] + r * strides[2] + s * strides[3]
    base = out + part.to(tl.int64) * part_stride
    made = cast(acc, out.dtype.element_ty)
    tl.store(base + (filter * strides[0])[:, None] + at[None, :], made, mask=here)


@triton.jit
def _add(
    parts, out, count, strides, C: tl.constexpr, TAPS: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """dw from its parts, which lie in the order k, tap, c."""
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK,), tl.float32)
    for part in tl.range(0, SPLITS):
        base = parts + tl.full((), part, tl.int64) * count
        total += tl.load(base + i, mask=i < count, other=0.0)
    tap = i // C % (TAPS[0] * TAPS[1])
    at = i // (C * TAPS[0] * TAPS[1]) * strides[0] + i % C * strides[1]
    at += tap // TAPS[1] * strides[2] + tap % TAPS[1] * strides[3]
    tl.store(out + at, cast(total, out.dtype.element_ty), mask=i < count)
