"""``rearrange`` by torch: one copy between two views; what rolls is taken row by row.

torch rolls an axis at a time, each a pass over memory; rows whose numbers are known before are one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem
from tessella.operations.rearrangement import Moves, moves
from tessella.operations.reference import transform as reference
from tessella.operations.tensor_meta import TensorMeta


def fits(problem: Problem) -> str | None:
    if problem.constant:
        return "takes no constants"
    return "makes dense tensors" if problem.output.format == "strided" else None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    a = problem.attrs
    sizes, dims = tuple(a["sizes"]), tuple(a["dims"])
    if not any(shift for _, shift in a["rolls"]):
        return _copy(sizes, dims)
    made = moves(problem) if problem["input"].format != "strided" else Moves(parts=())
    width = row_width(made)
    if width == 1:
        return lambda x, *, out: out.copy_(reference.rearrange(x, **a))
    rows = read_at(made, 1) // width
    before, after = (_in_memory(meta) for meta in (problem["input"], problem.output))
    on_device: dict[torch.device, torch.Tensor] = {}

    def select(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if x.device not in on_device:  # in the run before a graph is captured
            on_device[x.device] = rows.to(x.device)
        table, made = (
            (t.view(torch.uint8) if t.itemsize == 1 else t).permute(order).view(-1, width)
            for t, order in ((x, before), (out, after))
        )
        torch.index_select(table, 0, on_device[x.device], out=made)
        return out

    return select


def _copy(sizes: tuple[int, ...], dims: tuple[int, ...]) -> Call:
    parts = tuple(sizes[d] for d in dims)

    def copy(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        out.view(parts).copy_(x.reshape(sizes).permute(dims))
        return out

    return copy


def row_width(moves: Moves) -> int:
    """Elements that lie together on both sides, in the result and in the input; 1 if there are none
    that do not turn.
    """
    if not moves.parts or len(moves.parts) - 1 in moves.turning or moves.parts[-1].read != 1:
        return 1
    width = moves.parts[-1].size
    return width if all(p.read % width == 0 for p in moves.parts[:-1]) else 1


def read_at(moves: Moves, inner: int) -> torch.Tensor:
    """Where in the input each row of the result is read, in elements.

    Args:
        inner: how many of the last parts, none of which turns, are one row.
    """
    parts = moves.parts[: len(moves.parts) - inner]
    shape = [p.size for p in parts]
    places = [
        torch.arange(p.size).reshape([-1 if i == at else 1 for i in range(len(shape))])
        for at, p in enumerate(parts)
    ]
    for turn in moves.turns:
        whole = math.prod(parts[p].size for p in turn.parts)
        place = torch.zeros((), dtype=torch.int64)
        for p in turn.parts:
            place = place * parts[p].size + places[p]
        place = (place + turn.back) % whole
        for p in reversed(turn.parts):
            places[p], place = place % parts[p].size, place // parts[p].size
    begins = sum(place * p.read for place, p in zip(places, parts, strict=True))
    return torch.as_tensor(begins).expand(shape).reshape(-1)


def _in_memory(meta: TensorMeta) -> list[int]:
    """The axes, the one whose places lie farthest apart first."""
    return sorted(range(len(meta.shape)), key=lambda d: -meta.dense_strides[d])
