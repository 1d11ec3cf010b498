"""Operands by name: what a problem and a node of a graph have in common."""

from __future__ import annotations

from typing import Generic, TypeVar

from tessella.operations.operation import Operation
from tessella.operations.table import operation

T = TypeVar("T")  # a value of a graph, or the description of a tensor


class NamedOperands(Generic[T]):
    """An operation with its inputs, which are found by the names of the operation's row.

    Attributes:
        op: the operation's name.
        inputs: in the operation's order; None where an optional one is left out.
    """

    __slots__ = ()

    op: str
    inputs: tuple[T | None, ...]

    @property
    def operation(self) -> Operation:
        """The operation's row; raises ``CompileError`` if there is none."""
        return operation(self.op)

    @property
    def first(self) -> T | None:
        """The first input, whatever the operation calls it; None if there is none."""
        return self.inputs[0] if self.inputs else None

    def get(self, operand: str) -> T | None:
        """The input of this name; None where it is left out."""
        position = self.operation.position(operand)
        return self.inputs[position] if position < len(self.inputs) else None

    def __getitem__(self, operand: str) -> T:
        """The input of this name.

        Raises:
            KeyError: it is left out, or the operation has no such operand.
        """
        found = self.get(operand)
        if found is None:
            raise KeyError(f"{self.op} is without {operand} here: ask with get() for what may be")
        return found
