"""``aten::gather`` of whole rows on a GPU: the places that a detector found best, of each picture.

Indices may be the same along a row, as an ``expand`` makes them. In plain Triton.
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


@triton.jit
def gather_kernel(
    x, index, out, n, most, columns, index_image, index_row, index_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``out[i, r, c] = x[i, index[i, r, c], c]`` of rows of ``columns``, of which there are ``n``
    in each image of x and ``most`` in each of the result.

    A place that x does not have gives 0, and nothing else is read.
    """
    await_earlier(OVERLAP)
    image = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < most)[:, None] & (column < columns)[None, :]
    at = row[:, None] * index_row + column[None, :] * index_column
    place = tl.load(index + image * index_image + at, mask=inside, other=0)
    known = inside & (place >= 0) & (place < n)
    place = tl.where(known, place, 0).to(tl.int32)
    made = tl.load(x + (image * n + place) * columns + column[None, :], mask=known, other=0)
    tl.store(out + (image * most + row)[:, None] * columns + column[None, :], made, mask=inside)


def fits(problem: Problem) -> str | None:
    if problem.attrs.get("target") != "aten::gather":
        return "only the operator aten::gather"
    if (problem.constant and problem.constant != (0,)) or len(problem.inputs) != 2:
        return "by places that are computed"
    x, index = problem.given[:2]
    if not _by_rows(problem.attrs.get("args"), problem.attrs.get("kwargs"), x.shape, index.shape):
        return "rows of [images, places, columns], each image by its own places"
    if x.dtype not in FLOATS or x.format != "contiguous" or index.dtype != "int64":
        return f"dense floating numbers of 16 and 32 bits, not {x.format} {x.dtype}"
    if problem.output.strides is not None or problem.output.format == "channels_last":
        return "makes dense rows"
    most = max(math.prod(x.shape), math.prod(index.shape))
    return "indices have 32 bits" if most > MAX_ELEMENTS or x.shape[0] > 65535 else None


def _by_rows(args: Any, kwargs: Any, x: tuple[int, ...], index: tuple[int, ...]) -> bool:
    """Whether the operator's arguments are a tensor, axis 1 and places for whole images."""
    if kwargs or not isinstance(args, list | tuple) or len(args) != 3:
        return False
    if args[0] != {"input": 0} or args[2] != {"input": 1} or type(args[1]) is not int:
        return False
    if len(x) != 3 or len(index) != 3 or 0 in x or 0 in index:
        return False
    return args[1] in (1, -2) and (x[0], x[2]) == (index[0], index[2])


def configs(problem: Problem) -> tuple[Config, ...]:
    columns = min(256, triton.next_power_of_2(problem.output.shape[2]))
    return tuple(
        {"rows": max(1, elements // columns), "warps": warps}
        for elements, warps in ((512, 2), (1024, 4), (2048, 4))
    )


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    (images, n, columns), most = problem.given[0].shape, problem.output.shape[1]
    width = min(256, triton.next_power_of_2(columns))
    grid = (triton.cdiv(most, tile["rows"]), triton.cdiv(columns, width), images)
    made = problem.output

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        x, index = problem.operands(constants, tensors)
        assert x is not None
        assert index is not None
        out = made.empty(index.device)
        launch(
            gather_kernel, grid, x, index, out, n, most, columns, *index.stride(),
            ROWS=tile["rows"], COLUMNS=width, num_warps=tile["warps"], **overlapping(),
        )  # fmt: skip
        return out

    return run
