"""Values of a graph: tensors with a name, a type, and a shape that may depend on the batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Dim:
    """A dimension that follows the batch: ``factor · batch + offset``.

    Arithmetic stays on the line: a result that would leave it raises ``ArithmeticError``.
    """

    factor: int = 1
    offset: int = 0

    def at(self, batch: int) -> int:
        return self.factor * batch + self.offset

    def __add__(self, other: int | Dim) -> int | Dim:
        right = other if isinstance(other, Dim) else Dim(0, other)
        factor, offset = self.factor + right.factor, self.offset + right.offset
        return Dim(factor, offset) if factor else offset

    def __mul__(self, other: int | Dim) -> int | Dim:
        if isinstance(other, Dim):
            raise ArithmeticError(f"({self}) · ({other}) is not a multiple of the batch")
        return Dim(self.factor * other, self.offset * other) if other else 0

    def __sub__(self, other: int | Dim) -> int | Dim:
        return self + other * -1

    def __rsub__(self, other: int) -> int | Dim:
        return self * -1 + other

    def __floordiv__(self, other: int | Dim) -> int | Dim:
        if isinstance(other, Dim) or self.factor % other or self.offset % other:
            raise ArithmeticError(f"({self}) / ({other}) is not whole for every batch")
        return Dim(self.factor // other, self.offset // other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __str__(self) -> str:
        scaled = "N" if self.factor == 1 else f"{self.factor}N"
        return scaled if self.offset == 0 else f"{scaled}{self.offset:+d}"


Shape = tuple[int | Dim, ...]


def fixed(size: int | Dim) -> int:
    """A size that does not follow the batch; raises ``ArithmeticError`` if it does."""
    if isinstance(size, Dim):
        raise ArithmeticError(f"({size}) follows the batch")
    return size


def product(sizes: Iterable[int | Dim]) -> int | Dim:
    """Sizes multiplied; raises ``ArithmeticError`` if two of them follow the batch."""
    total: int | Dim = 1
    for size in sizes:
        total = size * total
    return total


def shape_at(shape: Shape, batch: int) -> tuple[int, ...]:
    """The concrete shape for one batch size."""
    return tuple(d.at(batch) if isinstance(d, Dim) else d for d in shape)


def attrs_at(attr: Any, batch: int) -> Any:
    """An attribute with every ``Dim`` in it made concrete."""
    if isinstance(attr, Dim):
        return attr.at(batch)
    if isinstance(attr, tuple | list):
        return tuple(attrs_at(a, batch) for a in attr)
    if isinstance(attr, dict):
        return {k: attrs_at(a, batch) for k, a in attr.items()}
    return attr


@dataclass(eq=False)
class Value:
    """A tensor of the graph: its name is unique, its identity is the object."""

    name: str
    dtype: str
    shape: Shape

    def __repr__(self) -> str:
        return f"%{self.name}: {self.dtype}[{', '.join(str(d) for d in self.shape)}]"
