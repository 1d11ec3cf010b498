"""``cat`` in one launch: every part is rows, which lie side by side in the rows of the result.

So are channels of channels_last maps, of which torch's own takes 43 µs for four of 256 × 128 × 128
on an H200, and any axis of dense tensors. A block copies some rows of one part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.device.launch import launch
from tessella.device.overlap import await_earlier, overlapping
from tessella.kernels.catalog import Call, Config
from tessella.kernels.shared.axes import tile_width
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

# Bytes of a part's row: with them alone a block stores less than memory's 32 to 64 bytes at once.
# Four parts of 16 channels, int8, 32 × 160², took an H200 78 µs, whose bytes are 27.
NARROW = 32
NARROWEST = 64  # columns of a tile, of rows that are not narrower
MOST_TILES = 65535  # along the second axis of a grid
MAX_PARTS = 8
MAX_ELEMENTS = 2**31 - 1  # offsets have 32 bits


@triton.jit
def _copy(
    part, out, rows, columns, in_rows, STARTS: tl.constexpr, WIDTHS: tl.constexpr,
    STRIDES: tl.constexpr, OUT: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    START: tl.constexpr = STARTS[I]
    WIDTH: tl.constexpr = WIDTHS[I]
    STRIDE: tl.constexpr = STRIDES[I]
    inside = in_rows[:, None] & (columns < WIDTH)[None, :]
    x = tl.load(part + rows[:, None] * STRIDE + columns[None, :], mask=inside)
    tl.store(out + rows[:, None] * OUT + (START + columns)[None, :], x, mask=inside)


@triton.jit
def join_kernel(
    parts,  # the first again where there are fewer than the most
    out,
    n_rows,
    COUNT: tl.constexpr,
    STARTS: tl.constexpr,  # of each part in a row of the result
    WIDTHS: tl.constexpr,
    STRIDES: tl.constexpr,  # from row to row of each part
    OUT: tl.constexpr,  # the same of the result
    FIRST: tl.constexpr,  # the first of each part's tiles of columns
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,  # whether a block copies whole rows: no part has more columns than a tile
    OVERLAP: tl.constexpr,
):
    await_earlier(OVERLAP)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = rows < n_rows
    if WHOLE:
        for i in tl.static_range(COUNT):
            columns = tl.arange(0, COLUMNS)
            _copy(parts[i], out, rows, columns, in_rows, STARTS, WIDTHS, STRIDES, OUT, i)
    else:
        tile = tl.program_id(1)
        for i in tl.static_range(COUNT):
            if (tile >= FIRST[i]) & (tile < FIRST[i + 1]):
                columns = (tile - FIRST[i]) * COLUMNS + tl.arange(0, COLUMNS)
                _copy(parts[i], out, rows, columns, in_rows, STARTS, WIDTHS, STRIDES, OUT, i)


def fits(problem: Problem) -> str | None:
    if problem.in_place:
        return "would read a part where it writes it"
    if not 1 < len(problem.given) <= MAX_PARTS:
        return f"two to {MAX_PARTS} parts"
    if len({m.dtype for m in (*problem.given, problem.output)}) > 1:
        return "parts of one element type"
    if 0 in problem.output.shape or problem.output.nbytes // problem.output.itemsize > MAX_ELEMENTS:
        return "empty, or indices have more than 32 bits"
    if problem.output.strides is not None or problem.output.format == "strided":
        return "makes dense results"
    if any(_row(problem, meta) is None for meta in problem.given):
        return "parts lie in the result's order, their rows in equal distances"
    if any(meta.extent // meta.itemsize > MAX_ELEMENTS for meta in problem.given):
        return "a part lies over more than 32 bits of indices"
    if sum(-(-width // NARROWEST) for width in _rows(problem)[0]) > MOST_TILES:
        return "more tiles of columns than a grid has"
    return None


def _row(problem: Problem, meta: TensorMeta) -> tuple[int, int] | None:
    """How many numbers of a part go into a row of the result, and from row to row of the part."""
    dim, shape = problem.attrs["dim"] % len(meta.shape), meta.shape
    pixels = problem.output.format == "channels_last"
    if pixels:
        if dim != 1 or (pitch := meta.pixel_pitch) is None:
            return None
        return shape[1], pitch
    width = math.prod(shape[dim:])
    if meta.format == "contiguous":
        return width, width
    if meta.strides is None or dim != len(shape) - 1 or meta.strides[-1] != 1:
        return None
    pitch = meta.strides[-2]
    steps = zip(shape[:-2], meta.strides[:-2], strict=True)
    expected = [pitch * math.prod(shape[axis + 1 : -1]) for axis in range(len(shape) - 2)]
    alike = all(size == 1 or step == e for (size, step), e in zip(steps, expected, strict=True))
    return (width, pitch) if alike else None


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles that are as wide as most parts, of 2048 numbers and fewer."""
    widest = max(_rows(problem)[0])
    found = []
    for size, warps in ((2048, 4), (1024, 4), (4096, 8), (512, 2)):
        width = tile_width(widest, min(size, 512))
        found.append({"rows": size // width, "columns": width, "warps": warps})
    if widest * problem.output.itemsize <= NARROW:
        whole = [{**config, "whole": True} for config in found[:2] if config["columns"] >= widest]
        return (*whole, *found)
    return tuple(found)


def _rows(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Widths and distances of the parts' rows."""
    found = [row for meta in problem.given if (row := _row(problem, meta)) is not None]
    return tuple(width for width, _ in found), tuple(pitch for _, pitch in found)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    widths, strides = _rows(problem)
    total = sum(widths)
    rows = math.prod(problem.output.shape) // total
    starts, first = [0], [0]
    for width in widths:
        starts.append(starts[-1] + width)
        first.append(first[-1] + triton.cdiv(width, tile["columns"]))
    settings: dict[str, Any] = {
        "COUNT": len(widths), "STARTS": tuple(starts[:-1]), "WIDTHS": widths, "STRIDES": strides,
        "OUT": total, "FIRST": tuple(first), "ROWS": tile["rows"], "COLUMNS": tile["columns"],
        "num_warps": tile["warps"],
        "WHOLE": tile.get("whole", False),
    }  # fmt: skip
    grid = (triton.cdiv(rows, tile["rows"]), 1 if settings["WHOLE"] else first[-1])

    def join(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        parts = problem.tensors(constants, inputs)
        parts += parts[:1] * (MAX_PARTS - len(parts))
        launch(join_kernel, grid, tuple(parts), out, rows, **overlapping(), **settings)
        return out

    return join
