"""``rearrange`` where another axis is innermost: tiles, read along one and written along the other.

What lies between is done once a tile: a block takes one, and its other parts are two offsets.
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
from tessella.kernels.transform.rearrange_device import MOST_PLACES, numbers_on, places, walk
from tessella.kernels.transform.rearrange_rows import refusal
from tessella.operations.problem import Problem
from tessella.operations.rearrangement import Moves, moves

LEAST = 16  # places along both sides of a tile
LINE = 128  # bytes


def fits(problem: Problem) -> str | None:
    if refused := refusal(problem):
        return refused
    made = moves(problem)
    if len(made.parts) < 2 or made.parts[-1].read == 1:
        return "one axis is innermost on both sides"
    along, across = _tile(made)
    if {along, across} & made.turning:
        return "what lies together turns"
    if min(made.parts[along].size, made.parts[across].size) < LEAST:
        return f"fewer than {LEAST} elements lie together"
    return "too large" if math.prod(problem.output.shape) > MOST_PLACES * LEAST else None


def configs(problem: Problem) -> tuple[Config, ...]:
    """A cache line along both sides, or two along one."""
    parts, (along, across) = (
        moves(problem).parts,
        _tile(moves(problem)),
    )
    line = LINE // problem.output.itemsize
    found = []
    for rows, columns in ((line, line), (line // 2, line), (line, line // 2), (line, 2 * line)):
        rows = min(rows, triton.next_power_of_2(parts[across].size))
        columns = min(columns, triton.next_power_of_2(parts[along].size))
        found.append({"rows": rows, "columns": columns})
    return tuple(c for i, c in enumerate(found) if c not in found[:i])


def _tile(moves: Moves) -> tuple[int, int]:
    """The positions of the part that lies together in the input, and in the result."""
    return next(i for i, p in enumerate(moves.parts) if p.read == 1), len(moves.parts) - 1


def bind(
    problem: Problem, constants: Mapping[int, torch.Tensor], *, rows: int = 64, columns: int = 64
) -> Call:
    made = moves(problem)
    along, across = _tile(made)
    others = [i for i in range(len(made.parts)) if i not in (along, across)]
    # every step but 1 is a multiple of these: the other parts' and, as tensors are dense, the sizes
    before = math.gcd(LEAST, *(p.read for p in made.parts if p.read > 1))
    after = math.gcd(LEAST, *(p.write for p in made.parts if p.write > 1))
    way = places(made, others, step=(before, after))
    width, height = made.parts[along].size, made.parts[across].size
    grid = (
        triton.cdiv(width, columns)
        * triton.cdiv(height, rows)
        * math.prod(made.parts[i].size for i in others),
    )
    settings: dict[str, Any] = {
        "DIGITS": way.digits, "TURNS": way.turns, "ROWS": rows, "COLUMNS": columns,
        "BEFORE": before, "AFTER": after, "num_warps": 4,
    }  # fmt: skip
    read, write = made.parts[across].read // before, made.parts[along].write // after

    def rearrange(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        launch(_tiles_kernel, grid, x, out, width // before, height // after, read, write,
               numbers_on(x.device, way.numbers), **overlapping(), **settings)  # fmt: skip
        return out

    return rearrange


@triton.jit(do_not_specialize=["width", "height", "read", "write"])
def _tiles_kernel(
    x, out, width, height, read, write, numbers,
    DIGITS: tl.constexpr, TURNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Of the input ``height`` rows of ``width`` elements; these, and the steps between rows, are
    counted in BEFORE elements there, and in AFTER in the result.
    """
    width, height = width * BEFORE, height * AFTER
    across, along = tl.cdiv(width, COLUMNS), tl.cdiv(height, ROWS)
    block = tl.program_id(0)
    column = block % across * COLUMNS + tl.arange(0, COLUMNS)
    row = block // across % along * ROWS + tl.arange(0, ROWS)
    source, target = walk(block // across // along, numbers, DIGITS, TURNS, True)
    start = (source + row.to(tl.int64) * read) * BEFORE
    inside = (row < height)[:, None] & (column < width)[None, :]
    await_earlier(OVERLAP)
    tile = tl.load(x + start[:, None] + column[None, :], mask=inside)
    start = (target + column.to(tl.int64) * write) * AFTER
    inside = (column < width)[:, None] & (row < height)[None, :]
    tl.store(out + start[:, None] + row[None, :], tl.trans(tile), mask=inside)
