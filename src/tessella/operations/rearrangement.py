"""``rearrange`` as arithmetic: axes cut into parts, which turn, change places and are joined.

What its kernels know before there is a tensor, and what must be refused of a stranger's plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

from tessella.operations.tensor_meta import TensorMeta

MOST_PARTS = 16
MOST = 1 << 40  # of a size: more elements than any memory holds


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of an axis: how many places it has, and how many elements lie between two.

    Attributes:
        read: in the input; ``write``: in the result.
    """

    size: int
    read: int
    write: int


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Parts that are counted as one axis, the first outermost, and rolled.

    Attributes:
        parts: their positions.
        back: what the result has at a place, the input has so many places further on.
    """

    parts: tuple[int, ...]
    back: int


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Where every element goes.

    Attributes:
        parts: in the order of the result's memory, outermost first; none has one place only, and no
            two could be one.
    """

    parts: tuple[Part, ...]
    turns: tuple[Turn, ...] = ()

    @property
    def turning(self) -> frozenset[int]:
        """The positions of all parts that turn."""
        return frozenset(p for turn in self.turns for p in turn.parts)


def cut(shape: Sequence[int], sizes: Sequence[int]) -> list[range]:
    """The positions of each axis's parts.

    >>> cut((2, 56, 1, 96), (2, 8, 7, 96))
    [range(0, 1), range(1, 3), range(3, 3), range(3, 4)]

    Raises:
        ValueError: these are not the axes' parts.
    """
    axes, at = [], 0
    for size in shape:
        first, whole = at, 1
        while whole < size and at < len(sizes):
            whole *= sizes[at]
            at += 1
        if whole != size:
            break
        axes.append(range(first, at))
    if len(axes) < len(shape) or any(size != 1 for size in sizes[at:]):
        raise ValueError(f"{list(sizes)} are no parts of the axes {list(shape)}")
    return axes


def require(shape: Sequence[int], sizes: Any, rolls: Any, dims: Any, made: Any) -> None:
    """Refuse what ``rearrange`` cannot mean; the attributes may be a stranger's.

    Args:
        shape: the input's; ``made``: the result's.

    Raises:
        ValueError: says what is wrong.
    """
    for name, values in (("sizes", sizes), ("dims", dims), ("shape", made)):
        if not _integers(values) or len(values) > MOST_PARTS:
            raise ValueError(f"{name}: up to {MOST_PARTS} integers, not {str(values)[:120]}")
    if not all(0 < size <= MOST for size in (*sizes, *made)):
        raise ValueError(f"sizes are 1 to {MOST}, not {list(sizes)}, {list(made)}")
    if sorted(dims) != list(range(len(sizes))):
        raise ValueError(f"{list(dims)} is no order of {len(sizes)} parts")
    cut(shape, sizes)
    cut(made, [sizes[d] for d in dims])
    if not isinstance(rolls, list | tuple):
        raise ValueError(f"rolls: a list, not {str(rolls)[:120]}")
    rolled: list[int] = []
    for roll in rolls:
        if not isinstance(roll, list | tuple) or len(roll) != 2 or not _integers(roll[0]):
            raise ValueError(f"a roll is parts and a shift, not {str(roll)[:120]}")
        rolled += roll[0]
        if not roll[0] or not set(roll[0]) <= set(dims) or len(set(rolled)) < len(rolled):
            raise ValueError(f"parts that are not there, or turn twice: {str(rolls)[:120]}")
        if not _integers(roll[1:]) or not 0 <= roll[1] < math.prod(sizes[p] for p in roll[0]):
            raise ValueError(f"no shift of such parts: {str(roll)[:120]}")


def _integers(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(type(v) is int for v in values)


class Rearranged(Protocol):
    """A problem ``rearrange``."""

    @property
    def attrs(self) -> dict[str, Any]: ...

    def __getitem__(self, operand: str) -> TensorMeta: ...

    @property
    def output(self) -> TensorMeta: ...


def moves(problem: Rearranged) -> Moves:
    """What a dense problem moves; its attributes are right (``require``)."""
    a = problem.attrs
    sizes, dims = a["sizes"], a["dims"]
    reads = _strides(problem["input"], sizes)
    writes = dict(zip(dims, _strides(problem.output, [sizes[d] for d in dims]), strict=True))
    order = sorted((p for p, n in enumerate(sizes) if n > 1), key=lambda p: -writes[p])
    parts = tuple(Part(size=sizes[p], read=reads[p], write=writes[p]) for p in order)
    turns = []
    for axes, shift in a["rolls"]:
        places = tuple(order.index(p) for p in axes if sizes[p] > 1)
        if shift:
            size = math.prod(parts[p].size for p in places)
            turns.append(Turn(parts=places, back=size - shift))
    return _joined(Moves(parts=parts, turns=tuple(turns)))


def _strides(meta: TensorMeta, sizes: Sequence[int]) -> list[int]:
    """The distance in elements from one place of each part to its next place."""
    strides = [0] * len(sizes)
    for axis, step in zip(cut(meta.shape, sizes), meta.dense_strides, strict=True):
        for position in reversed(axis):
            strides[position] = step
            step *= sizes[position]
    return strides


def _joined(moves: Moves) -> Moves:
    """The rearrangement with neighbouring parts joined where they lie and roll together on both
    sides.
    """
    parts = moves.parts
    for outer, (p, q) in enumerate(pairwise(parts)):
        followers = {a: b for t in moves.turns for a, b in pairwise(t.parts)}
        stay = not {outer, outer + 1} & moves.turning
        if p.read != q.read * q.size or not (stay or followers.get(outer) == outer + 1):
            continue
        both = replace(q, size=p.size * q.size)
        turns = tuple(
            replace(t, parts=tuple(i - (i > outer) for i in t.parts if i != outer + 1))
            for t in moves.turns
        )
        return _joined(Moves(parts=(*parts[:outer], both, *parts[outer + 2 :]), turns=turns))
    return moves


def innermost(input: TensorMeta, attrs: Mapping[str, Any]) -> int | None:
    """The result's axis that gets what lies together in a dense input; None if that has one place.

    >>> x = TensorMeta(shape=(2, 6, 4, 5), dtype="float16", format="channels_last")
    >>> innermost(x, {"sizes": (2, 2, 3, 4, 5), "dims": (0, 2, 1, 3, 4), "shape": (2, 6, 20)})
    1
    """
    sizes, dims = tuple(attrs["sizes"]), tuple(attrs["dims"])
    steps = {step: p for p, step in enumerate(_strides(input, sizes)) if sizes[p] > 1}
    axes = cut(attrs["shape"], [sizes[d] for d in dims])
    at = dims.index(steps[1]) if steps else -1
    return next((i for i, axis in enumerate(axes) if at in axis), None)
