"""Graph, Node, Value: a network as data, between capture and the compiler.

A graph is a list of nodes in an order in which they can run. Every value is a graph input, a
constant, or the output of exactly one node. Operations carry torch.nn.functional's names
(``operations.operation``).
Shapes may depend on the batch: such a dimension is a ``Dim``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch


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

    def __mul__(self, other: int) -> int | Dim:
        if isinstance(other, Dim):
            raise ArithmeticError(f"({self}) · ({other}) is not a multiple of the batch")
        return Dim(self.factor * other, self.offset * other) if other else 0

    def __sub__(self, other: int | Dim) -> int | Dim:
        return self + other * -1

    def __rsub__(self, other: int) -> int | Dim:
        return self * -1 + other

    def __floordiv__(self, other: int) -> int | Dim:
        if isinstance(other, Dim) or self.factor % other or self.offset % other:
            raise ArithmeticError(f"({self}) / ({other}) is not whole for every batch")
        return Dim(self.factor // other, self.offset // other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __str__(self) -> str:
        scaled = "N" if self.factor == 1 else f"{self.factor}N"
        return scaled if self.offset == 0 else f"{scaled}{self.offset:+d}"


Shape = tuple[int | Dim, ...]


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


@dataclass(eq=False)
class Node:
    """One operation.

    Attributes:
        op: a name of ``operations.operation``, or ``fallback`` with the torch operator in
            ``attrs["target"]``.
        inputs: in the operation's order; None where an optional one is left out.
        outputs: the values that it makes.
        attrs: JSON values (tuples for lists); may contain ``Dim``.
        layer: the module path that it came from, ``layer1.0.conv1``.
    """

    op: str
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    layer: str = ""

    @property
    def output(self) -> Value:
        """The only output."""
        (value,) = self.outputs
        return value


@dataclass
class Graph:
    """A network: inputs, outputs, nodes in a runnable order, constants by value."""

    name: str
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    constants: dict[Value, torch.Tensor] = field(default_factory=dict)

    def copy(self) -> Graph:
        """A graph whose nodes and values can be changed; constants' tensors are shared."""
        copies = {v: Value(v.name, v.dtype, v.shape) for v in self.values()}
        return Graph(
            name=self.name,
            inputs=[copies[v] for v in self.inputs],
            outputs=[copies[v] for v in self.outputs],
            nodes=[
                replace(
                    n,
                    inputs=tuple(None if v is None else copies[v] for v in n.inputs),
                    outputs=tuple(copies[v] for v in n.outputs),
                    attrs=dict(n.attrs),
                )
                for n in self.nodes
            ],
            constants={copies[v]: t for v, t in self.constants.items()},
        )

    def constant(self, value: Value | None) -> torch.Tensor | None:
        """The tensor behind a value, or None if it is computed (or left out)."""
        return None if value is None else self.constants.get(value)

    def add_constant(self, name: str, tensor: torch.Tensor) -> Value:
        """A new constant under a name like ``name`` that is not taken yet."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        value = Value(self.fresh_name(name), dtype, tuple(tensor.shape))
        self.constants[value] = tensor
        return value

    def fresh_name(self, like: str) -> str:
        taken = {v.name for v in self.values()}
        if like not in taken:
            return like
        return next(n for i in range(1, len(taken) + 2) if (n := f"{like}.{i}") not in taken)

    def values(self) -> Iterator[Value]:
        yield from self.inputs
        yield from self.constants
        for node in self.nodes:
            yield from node.outputs

    def producer(self) -> dict[Value, Node]:
        """Which node makes each computed value."""
        return {v: node for node in self.nodes for v in node.outputs}

    def users(self) -> dict[Value, list[Node]]:
        """Which nodes read each value (a node that reads it twice is there twice)."""
        found: dict[Value, list[Node]] = {v: [] for v in self.values()}
        for node in self.nodes:
            for value in node.inputs:
                if value is not None:
                    found[value].append(node)
        return found

    def replace_uses(self, old: Value, new: Value) -> None:
        """Let everything that reads ``old`` read ``new``, the graph's outputs too."""
        for node in self.nodes:
            if old in node.inputs:
                node.inputs = tuple(new if v is old else v for v in node.inputs)
        self.outputs = [new if v is old else v for v in self.outputs]

    def at_batch(self, batch: int) -> Graph:
        """A copy with concrete shapes and attributes for one batch size; constants are shared."""
        copies = {v: Value(v.name, v.dtype, shape_at(v.shape, batch)) for v in self.values()}

        def copy(value: Value | None) -> Value | None:
            return None if value is None else copies[value]

        return Graph(
            name=self.name,
            inputs=[copies[v] for v in self.inputs],
            outputs=[copies[v] for v in self.outputs],
            nodes=[
                Node(
                    op=n.op,
                    inputs=tuple(copy(v) for v in n.inputs),
                    outputs=tuple(copies[v] for v in n.outputs),
                    attrs=attrs_at(n.attrs, batch),
                    layer=n.layer,
                )
                for n in self.nodes
            ],
            constants={copies[v]: t for v, t in self.constants.items()},
        )
