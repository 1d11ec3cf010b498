"""``pointwise``: a program in one pass over memory, by a kernel that Triton makes of the program.

Also single operations, as programs of one instruction (``single``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessella.core.integers import power_of_two
from tessella.device.launch import launch
from tessella.device.overlap import overlapping
from tessella.kernels.catalog import Call, Config
from tessella.kernels.pointwise.generated_device import program_kernel
from tessella.kernels.pointwise.walk import MAX_OPERANDS, MAX_OUTPUTS, refusal, walk
from tessella.kernels.shared.axes import tile_width
from tessella.operations.problem import Problem

MAX_TILE = 16384
WIDEST = 16  # elements: what is known to divide the columns makes loads of up to 16 bytes


def fits(problem: Problem) -> str | None:
    if len(problem.outputs) != 1:
        return "makes one result"
    return refusal(problem)


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles of 2048 elements by 4 warps; beside it, few elements, or few warps for a long row."""
    made = walk(problem)
    columns = made.axes.columns
    if made.lowered.rows:
        width = power_of_two(columns)
        few = (
            (1, width, max(1, min(16, width // 512))) if width >= 512 else (512 // width, width, 2)
        )
        shapes = [(max(1, 2048 // width), width, max(4, min(16, width // 1024))), few]
    else:
        rows = made.axes.rows
        shapes = [_tile(rows, columns, size, 4) for size in (2048, 1024)]
    kept = [s for s in dict.fromkeys(shapes) if s[0] * s[1] <= MAX_TILE]
    return tuple({"tile_rows": r, "tile_columns": c, "warps": w} for r, c, w in kept)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    walked = walk(problem)
    lowered, axes = walked.lowered, walked.axes
    single = len(problem.outputs) == 1
    operands = lowered.binder(constants)
    unit = math.gcd(axes.columns, WIDEST)
    sizes = axes.rows, axes.columns // unit
    grid = (-(-axes.rows // tile["tile_rows"]) * -(-axes.columns // tile["tile_columns"]),)
    program: dict[str, Any] = {
        "INPUTS": len(lowered.operands),
        "OUTPUTS": len(problem.outputs),
        "UNIT": unit,
        "OPS": tuple(lowered.ops),
        "READS": tuple(lowered.reads),
        "NUMBERS": tuple(lowered.numbers),
        "RESULTS": lowered.results,
        "SIZES": axes.sizes[1:-1],
        "STRIDES": tuple((0, *s) if len(axes.sizes) == 1 else s for s in axes.strides),
        "FORMS": walked.forms,
        "TILE_ROWS": tile["tile_rows"],
        "TILE_COLUMNS": tile["tile_columns"],
    }

    def run(*inputs: torch.Tensor, out: Any) -> Any:
        tensors = operands(problem.tensors(constants, inputs))
        inputs = _padded(tensors, MAX_OPERANDS)
        outs = _padded((out,) if single else out, MAX_OUTPUTS)
        launch(
            program_kernel, grid, inputs, outs, *sizes,
            num_warps=tile["warps"], **overlapping(), **program,
        )  # fmt: skip
        return out

    return run


def _padded(tensors: Sequence[torch.Tensor], count: int) -> tuple[torch.Tensor, ...]:
    return (*tensors, *[tensors[0]] * (count - len(tensors)))


def _tile(rows: int, columns: int, size: int, warps: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a tile of so many elements."""
    width = tile_width(columns, size)
    return min(size // width, power_of_two(rows)), width, warps
