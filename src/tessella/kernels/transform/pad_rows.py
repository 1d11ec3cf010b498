"""``pad`` with a number on a GPU: a block makes some rows of the result, in its order in memory.

Each element is read where it lies in the input, or is the number. Rows are the channels of a pixel
where these lie together, and else the last axis. In plain Triton.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.dtype import FLOATS
from tessella.device.launch import launch
from tessella.device.overlap import await_earlier, overlapping
from tessella.kernels.catalog import Call, Config
from tessella.operations.problem import Problem

MAX_ELEMENTS = 2**31 - 1  # offsets have 32 bits
MOST_AXES = 5
LONGEST_PIECE = 256  # of a row, that a block takes
MOST_PIECES = 65_535  # blocks along a grid's second axis
LARGEST = {"int8": 127}  # of a number that is written; floating types take all


@triton.jit
def pad_kernel(
    x,
    out,
    rows_made,
    MADE: tl.constexpr,  # sizes of the result in the order of its memory, the slowest first
    READ: tl.constexpr,  # those of the input
    STEPS: tl.constexpr,  # and how far apart its elements lie
    BEFORE: tl.constexpr,  # what is added before each axis
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_earlier(OVERLAP)
    LAST: tl.constexpr = len(MADE) - 1
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = column - BEFORE[LAST]
    columns_in = (at >= 0) & (at < READ[LAST])
    inside, rest, offset = row < rows_made, row, row * 0
    for i in tl.static_range(LAST):
        place = rest % MADE[LAST - 1 - i] - BEFORE[LAST - 1 - i]
        inside = inside & (place >= 0) & (place < READ[LAST - 1 - i])
        offset += place * STEPS[LAST - 1 - i]
        rest = rest // MADE[LAST - 1 - i]
    inside = inside[:, None] & columns_in[None, :]
    made = tl.load(x + offset[:, None] + at[None, :], mask=inside, other=0)
    # not as what a masked load gives: negative bytes came out as -1
    made = tl.where(inside, made, VALUE).to(x.dtype.element_ty)
    into = out + row[:, None] * MADE[LAST] + column[None, :]
    tl.store(into, made, mask=(row < rows_made)[:, None] & (column < MADE[LAST])[None, :])


def fits(problem: Problem) -> str | None:
    x, y, attrs = problem["input"], problem.output, problem.attrs
    if attrs["mode"] != "constant" or problem.constant:
        return "adds a number to a tensor that is computed"
    if x.dtype != y.dtype or x.dtype not in (*FLOATS, *LARGEST):
        return "floating numbers of 16 and 32 bits, or int8"
    if abs(attrs["value"] or 0) > LARGEST.get(x.dtype, math.inf):
        return f"a number that {x.dtype} does not hold"
    if x.format != y.format or x.format == "strided" or y.strides is not None:
        return "dense tensors of one format"
    if not 0 < len(x.shape) <= MOST_AXES or 0 in x.shape or 0 in y.shape:
        return f"1 to {MOST_AXES} axes, none of them empty"
    if any(p < 0 for p in attrs["pad"]):
        return "adds, and takes nothing away"
    if math.prod(y.shape) > MAX_ELEMENTS:
        return "indices have 32 bits"
    longest = MOST_PIECES * LONGEST_PIECE
    return f"rows of at most {longest} elements" if _axes(problem)[0][-1] > longest else None


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles of so many elements, by all of a row or by 256 of more."""
    columns = min(LONGEST_PIECE, triton.next_power_of_2(_axes(problem)[0][-1]))
    return tuple(
        {"rows": max(1, elements // columns), "warps": warps}
        for elements, warps in ((1024, 4), (2048, 4), (4096, 8))
    )


def _axes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Sizes of the result and of the input, and what is added before, in the order of memory.

    Axes to which nothing is added are one with those before them.
    """
    x, y, pairs = problem["input"], problem.output, problem.attrs["pad"]
    order = sorted(range(len(x.shape)), key=lambda axis: -y.dense_strides[axis])
    before = {len(x.shape) - 1 - i: int(pairs[2 * i]) for i in range(len(pairs) // 2)}
    made: list[int] = []
    read: list[int] = []
    added: list[int] = []
    for axis in order:
        plain = x.shape[axis] == y.shape[axis]
        if made and plain and made[-1] == read[-1]:
            made[-1], read[-1] = made[-1] * y.shape[axis], read[-1] * x.shape[axis]
            continue
        made.append(y.shape[axis])
        read.append(x.shape[axis])
        added.append(before.get(axis, 0))
    return tuple(made), tuple(read), tuple(added)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    made, read, before = _axes(problem)
    if len(made) == 1:  # a kernel has rows
        made, read, before = (1, *made), (1, *read), (0, *before)
    columns = min(LONGEST_PIECE, triton.next_power_of_2(made[-1]))
    rows = math.prod(made[:-1])
    grid = (triton.cdiv(rows, tile["rows"]), triton.cdiv(made[-1], columns))
    value = problem.attrs["value"] or 0
    settings: dict[str, Any] = {
        "MADE": made, "READ": read, "BEFORE": before,
        "STEPS": tuple(math.prod(read[i + 1 :]) for i in range(len(read))),
        "ROWS": tile["rows"], "COLUMNS": columns,
        "VALUE": int(value) if problem.output.dtype in LARGEST else float(value),
        "num_warps": tile["warps"],
    }  # fmt: skip

    def run(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        launch(pad_kernel, grid, x, out, rows, **overlapping(), **settings)
        return out

    return run
