"""Sums and means over axes that are not the last in memory: a global average pool of NHWC.

A tensor is [outer, reduced, inner] in memory; a block adds up some rows of some inner places at a
time, in float32. In plain Triton.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tessella.kernels.catalog import Call, Config
from tessella.kernels.launch import launch
from tessella.kernels.overlap import await_earlier, overlapping
from tessella.kernels.problem import Problem, TensorMeta

WRITES_OUT = True

MAX_ELEMENTS = 2**31 - 1  # offsets have 32 bits
TYPES = ("float32", "float16", "bfloat16")


def fits(problem: Problem) -> str | None:
    x, out = problem.inputs[0], problem.output
    if x.dtype not in TYPES or out.dtype not in TYPES:
        return f"no sum of {x.dtype}"
    if x.format == "strided" or out.format == "strided":
        return "needs dense tensors"
    if 0 in x.shape:
        return "nothing to add up"
    if math.prod(x.shape) > MAX_ELEMENTS:
        return "indices have 32 bits"
    shape = _as_columns(problem)
    if shape is None:
        return "reduces axes that lie together in memory"
    return "reduces the last axes" if shape[2] == 1 else None


def configs(problem: Problem) -> tuple[Config, ...]:
    """Some inner places, and as many rows of them as make 2048 or 1024 elements."""
    _, reduced, inner = _as_columns(problem) or (1, 1, 1)
    tall = triton.next_power_of_2(reduced)
    found = []
    for width, size, warps in ((64, 4096, 4), (32, 4096, 4), (128, 2048, 4), (8, 2048, 4)):
        width = min(width, triton.next_power_of_2(inner))
        rows = max(1, min(tall, size // width))
        found.append({"rows": rows, "columns": width, "warps": warps})
    return tuple(c for i, c in enumerate(found) if c not in found[:i])


def bind(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    *,
    rows: int,
    columns: int,
    warps: int,
) -> Call:
    outer, reduced, inner = _as_columns(problem) or (1, 1, 1)
    divisor = 1 if problem.op == "sum" else reduced
    grid = (outer * triton.cdiv(inner, columns),)

    def run(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        launch(
            columns_kernel,
            grid,
            x,
            out,
            REDUCED=reduced,
            INNER=inner,
            DIVISOR=divisor,
            TILE_ROWS=rows,
            TILE_COLUMNS=columns,
            num_warps=warps,
            **overlapping(),
        )
        return out

    return run


def _as_columns(problem: Problem) -> tuple[int, int, int] | None:
    """Sizes of the outer, reduced and inner axes; None if those do not lie together."""
    x = problem.inputs[0]
    axes = len(x.shape)
    if problem.op == "adaptive_avg_pool2d":
        if tuple(problem.attrs["output_size"]) != (1, 1):
            return None
        dims = [axes - 2, axes - 1]
    else:
        dim = problem.attrs["dim"]
        dims = [d % axes for d in (range(axes) if dim is None else dim)]
    order = _in_memory(x)
    reduced = [order.index(d) for d in dims if x.shape[d] != 1]
    if not reduced or max(reduced) - min(reduced) + 1 != len(reduced):
        return None
    kept = [d for d in order if d not in dims]
    if not _keeps_order(problem.output, kept, axes):
        return None
    sizes = [x.shape[d] for d in order]
    first, last = min(reduced), max(reduced)
    return (
        math.prod(sizes[:first]),
        math.prod(sizes[first : last + 1]),
        math.prod(sizes[last + 1 :]),
    )


def _in_memory(meta: TensorMeta) -> list[int]:
    """The axes larger than 1, the slowest first."""
    strides = meta.dense_strides
    axes = [a for a, size in enumerate(meta.shape) if size != 1]
    return sorted(axes, key=lambda a: -strides[a])


def _keeps_order(out: TensorMeta, kept: list[int], axes: int) -> bool:
    """Whether the axes that stay lie in the result as they lie in the input."""
    if len(out.shape) == axes:
        return _in_memory(out) == kept
    return kept == sorted(kept)  # the result is contiguous


@triton.jit
def columns_kernel(
    x_pointer,
    y_pointer,
    REDUCED: tl.constexpr,
    INNER: tl.constexpr,
    DIVISOR: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_earlier(OVERLAP)
    TILES: tl.constexpr = (INNER + TILE_COLUMNS - 1) // TILE_COLUMNS
    block = tl.program_id(0)
    outer = block // TILES
    columns = (block % TILES) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    rows = tl.arange(0, TILE_ROWS)
    start = x_pointer + outer * (REDUCED * INNER)
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for first in range(0, REDUCED, TILE_ROWS):
        there = (first + rows < REDUCED)[:, None] & (columns < INNER)[None, :]
        places = (first + rows)[:, None] * INNER + columns[None, :]
        total += tl.load(start + places, mask=there, other=0).to(tl.float32)
    y = tl.sum(total, 0) / DIVISOR
    place = outer * INNER + columns
    tl.store(y_pointer + place, y.to(y_pointer.dtype.element_ty), mask=columns < INNER)
