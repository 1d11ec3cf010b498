"""``aten::topk`` of the last axis on a GPU: each number counts those that come before it.

Nothing is sorted: a number whose rank is below ``k`` is written to its place. A detector's 1,600 or
8,400 scores are few enough for all pairs to be compared, by as many blocks as a GPU has. Equal
numbers keep their order, and NaN is the largest, as torch has it. In plain Triton.
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

MOST_PAIRS = 2**30  # some 0.2 ms of a H200: above, torch's radix sort is faster
MOST_ROWS = 65535


@triton.jit
def _order(x):
    """Integers in the order of float32 numbers, zeros equal and NaN above all."""
    number = x.to(tl.float32) + 0.0  # -0.0 becomes 0.0
    bits = number.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(number == number, bits, 0x7FFFFFFF)


@triton.jit
def rank_kernel(
    scores, values, places, n, k,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_earlier(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    scores += row * n
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = mine < n
    score = tl.load(scores + mine, mask=inside, other=0)
    order = _order(score)[:, None]
    rank = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, n, CHUNK):
        others = first + tl.arange(0, CHUNK)
        other = _order(tl.load(scores + others, mask=others < n, other=0))[None, :]
        is_before = (other > order) | ((other == order) & (others[None, :] < mine[:, None]))
        rank += tl.sum((is_before & (others < n)[None, :]).to(tl.int32), 1)
    chosen = inside & (rank < k)
    tl.store(values + row * k + rank, score, mask=chosen)
    tl.store(places + row * k + rank, mine.to(tl.int64), mask=chosen)


def fits(problem: Problem) -> str | None:
    if problem.attrs.get("target") != "aten::topk":
        return "only the operator aten::topk"
    if problem.constant or len(problem.outputs) != 2:
        return "of a tensor that is computed"
    scores = problem.given[0]
    if problem.attrs.get("kwargs") or not _sorts_last(problem.attrs.get("args"), scores.shape):
        return "the largest of the last axis, sorted"
    if scores.dtype not in FLOATS or scores.format != "contiguous":
        return f"dense floating numbers of 16 and 32 bits, not {scores.format} {scores.dtype}"
    n, rows = scores.shape[-1], math.prod(scores.shape[:-1])
    if 0 in scores.shape or rows > MOST_ROWS or rows * n * n > MOST_PAIRS:
        return f"compares all pairs of a row: {rows} rows of {n} are too many, or none"
    if any(m.strides is not None or m.format == "channels_last" for m in problem.outputs):
        return "makes dense rows"  # which those may be that promise nothing
    return None


def _sorts_last(args: Any, shape: tuple[int, ...]) -> bool:
    """Whether the operator's arguments are a tensor, ``k``, and what is said without the rest."""
    if not isinstance(args, list | tuple) or not 2 <= len(args) <= 5 or not shape:
        return False
    given: list[Any] = [*args, *[-1, True, True][len(args) - 2 :]]
    tensor, k, dim, largest, is_sorted = given
    if tensor != {"input": 0} or type(k) is not int or type(is_sorted) is not bool:
        return False
    return 0 < k <= shape[-1] and dim in (-1, len(shape) - 1) and largest is True


def configs(problem: Problem) -> tuple[Config, ...]:
    """Few numbers a block where there are few: then more multiprocessors have one."""
    shapes = ((16, 128, 4), (32, 128, 4), (8, 256, 4), (64, 64, 4), (32, 256, 8), (64, 128, 8))
    return tuple({"block": block, "chunk": chunk, "warps": warps} for block, chunk, warps in shapes)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    scores, k = problem.given[0], problem.attrs["args"][1]
    n, rows = scores.shape[-1], math.prod(scores.shape[:-1])
    grid = (triton.cdiv(n, tile["block"]), rows)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = (meta.empty(x.device) for meta in problem.outputs)
        launch(
            rank_kernel, grid, x, values, places, n, k, BLOCK=tile["block"], CHUNK=tile["chunk"],
            num_warps=tile["warps"], **overlapping(),
        )  # fmt: skip
        return values, places

    return run
