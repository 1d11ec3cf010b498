"""``rearrange`` of rows: 16 bytes a thread, or as many as lie together on both sides.

The result is written in its memory's order; each thread computes once for all that it moves where
that comes from. Where only short pieces lie together (channels that are shuffled), a thread gathers
its 16 bytes one element at a time, which the cache has after the first.
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
from tessella.operations.problem import Problem
from tessella.operations.rearrangement import Moves, Part, moves

TYPES = ("float32", "int32", "float16", "bfloat16", "int16", "int8", "uint8", "float8_e4m3fn",
         "float8_e5m2")  # fmt: skip
WIDEST = 16  # bytes
MOST_PARTS = 8
NEAR = 8192  # bytes of the input that a gathered piece may come from


def fits(problem: Problem) -> str | None:
    if refused := refusal(problem):
        return refused
    made = moves(problem)
    if (vector := _together(problem, made)) == 1:
        near = _near(made) * problem.output.itemsize
        if near > NEAR:
            return f"{near} bytes are read for pieces that lie together, {NEAR} are near"
    count = math.prod(problem.output.shape)
    return "offsets have 32 bits" if count // vector > MOST_PLACES else None


def refusal(problem: Problem) -> str | None:
    """Why no kernel of ours for ``rearrange`` can carry a problem out, or None."""
    x, out = problem["input"], problem.output
    if problem.constant:
        return "takes no constants"
    if "strided" in (x.format, out.format):
        return "both sides dense"
    if x.dtype not in TYPES:
        return f"elements of 1, 2 and 4 bytes, not {x.dtype}"
    return None if len(moves(problem).parts) <= MOST_PARTS else f"more than {MOST_PARTS} parts"


def configs(problem: Problem) -> tuple[Config, ...]:
    """How many pieces a block moves; four of them a thread."""
    return tuple({"pieces": pieces} for pieces in (512, 1024, 256))


def _together(problem: Problem, moves: Moves) -> int:
    """Elements that a thread can read at once and write at once: 16 bytes, 8 or 4; else 1."""
    if not moves.parts or moves.parts[-1].read != 1 or len(moves.parts) - 1 in moves.turning:
        return 1
    steps = (moves.parts[-1].size, *(p.read for p in moves.parts[:-1]))
    vector = math.gcd(WIDEST // problem.output.itemsize, *steps)
    return vector if vector * problem.output.itemsize >= 4 else 1


def _near(moves: Moves) -> int:
    """Elements of the result between two whose neighbours in the input lie elsewhere."""
    inner = [i for i, p in enumerate(moves.parts) if p.read == 1]
    return math.prod(p.size for p in moves.parts[min(inner, default=0) :])


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], *, pieces: int = 512) -> Call:
    made = moves(problem)
    count, vector = math.prod(problem.output.shape), _together(problem, made)
    gather = vector == 1
    if gather:
        vector = math.gcd(WIDEST // problem.output.itemsize, count)
        way = places(made, range(len(made.parts)))
    else:
        made = _of_pieces(made, vector)
        way = places(made, range(len(made.parts)), step=(vector, vector))
    settings: dict[str, Any] = {
        "DIGITS": way.digits, "TURNS": way.turns, "VECTOR": vector, "GATHER": gather,
        "PIECES": pieces, "num_warps": max(1, pieces // 128),
    }  # fmt: skip
    grid = (triton.cdiv(count // vector, pieces),)

    def rearrange(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        numbers = numbers_on(x.device, way.numbers)
        launch(_rows_kernel, grid, x, out, count // vector, numbers, **overlapping(), **settings)
        return out

    return rearrange


def _of_pieces(moves: Moves, vector: int) -> Moves:
    """The rearrangement of pieces of so many neighbouring elements of the last part."""
    *parts, last = moves.parts
    if last.size > vector:
        parts.append(Part(size=last.size // vector, read=vector, write=vector))
    return Moves(parts=tuple(parts), turns=moves.turns)


@triton.jit(do_not_specialize=["count"])
def _rows_kernel(
    x, out, count, numbers,
    DIGITS: tl.constexpr, TURNS: tl.constexpr, VECTOR: tl.constexpr, GATHER: tl.constexpr,
    PIECES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    inside = (piece < count)[:, None]
    lanes = tl.arange(0, VECTOR)[None, :]
    target = (piece.to(tl.int64) * VECTOR)[:, None] + lanes
    if GATHER:
        source, _ = walk(piece[:, None] * VECTOR + lanes, numbers, DIGITS, TURNS, False)
    else:
        start, _ = walk(piece, numbers, DIGITS, TURNS, False)
        source = (start.to(tl.int64) * VECTOR)[:, None] + lanes
    await_earlier(OVERLAP)
    tl.store(out + target, tl.load(x + source, mask=inside), mask=inside)
