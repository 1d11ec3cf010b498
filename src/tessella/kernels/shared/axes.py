"""How a kernel walks tensors that broadcast together: axes in memory order, as few as can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tessella.operations.tensor_meta import TensorMeta

Strides = tuple[int, ...]

NARROW, OVERHANG = 64, 1.1  # a tile of more columns has at most so many times what is there


def tile_width(columns: int, most: int) -> int:
    """How many columns a tile has, a power of two: as many as can be while few hang over the edge.

    >>> [tile_width(columns, 2048) for columns in (64, 96, 1024, 3136)]
    [64, 64, 1024, 256]
    """
    width = min(most, 1 << max(0, columns - 1).bit_length())
    while width > NARROW and -(-columns // width) * width > OVERHANG * columns:
        width //= 2
    return width


@dataclass(frozen=True, kw_only=True)
class Axes:
    """A walk over rows of columns.

    Attributes:
        sizes: the axes, the slowest first; all but the last one together are the rows.
        strides: of each tensor along them, in elements; 0 where it is broadcast.
    """

    sizes: tuple[int, ...]
    strides: tuple[Strides, ...]

    @property
    def rows(self) -> int:
        return math.prod(self.sizes[:-1])

    @property
    def columns(self) -> int:
        return self.sizes[-1]


def common_axes(
    shape: Sequence[int], tensors: Sequence[TensorMeta], *, lead: int = 0, keep_last: bool = False
) -> Axes:
    """The axes of ``shape`` in the memory order of ``tensors[lead]``, joined where all can be.

    Args:
        tensors: dense or slices with known strides, of shapes that broadcast to ``shape``.
        lead: the tensor that decides the order, usually the result.
        keep_last: the last axis of ``shape`` stays an axis of its own, and the last.
    """
    all_strides = [along(meta, shape) for meta in tensors]
    axes = [a for a in range(len(shape)) if shape[a] != 1]
    order = sorted(axes, key=lambda a: -all_strides[lead][a])
    if keep_last:
        order = [a for a in order if a != len(shape) - 1] + [len(shape) - 1]
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in tensors]
    for axis in order or [len(shape) - 1]:
        size, steps = shape[axis] if shape else 1, [s[axis] if s else 0 for s in all_strides]
        alone = not sizes or (keep_last and axis == len(shape) - 1)
        if not alone and all(s[-1] == step * size for s, step in zip(strides, steps, strict=True)):
            sizes[-1] *= size
            for known, step in zip(strides, steps, strict=True):
                known[-1] = step
        else:
            sizes.append(size)
            for known, step in zip(strides, steps, strict=True):
                known.append(step)
    return Axes(sizes=tuple(sizes), strides=tuple(map(tuple, strides)))


def along(meta: TensorMeta, shape: Sequence[int]) -> Strides:
    """The strides of a tensor along the axes of ``shape``; 0 where it is broadcast."""
    own = meta.dense_strides if meta.strides is None else meta.strides
    missing = (0,) * (len(shape) - len(meta.shape))
    return missing + tuple(0 if d == 1 else s for d, s in zip(meta.shape, own, strict=True))
