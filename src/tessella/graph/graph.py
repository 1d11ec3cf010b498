"""Graph: a network as data, between capture and the compiler.

A graph is a list of nodes in an order in which they can run. Every value is a graph input, a
constant, or the output of exactly one node. Operations carry torch.nn.functional's names
(``operations.operation``).
Shapes may depend on the batch: such a dimension is a ``Dim``.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tessella.core.dtype import dtype_name
from tessella.graph.names import Names
from tessella.graph.nodes import Node, Nodes
from tessella.graph.value import Dim, Shape, Value, attrs_at, shape_at

__all__ = ["Dim", "Graph", "Node", "Shape", "Value", "attrs_at", "shape_at"]


class Constants(UserDict[Value, torch.Tensor]):
    """Tensors by value; their names are taken."""

    def __init__(self, names: Names, tensors: Mapping[Value, torch.Tensor]) -> None:
        self._names = names
        super().__init__(tensors)

    def __setitem__(self, value: Value, tensor: torch.Tensor) -> None:
        if value not in self.data:
            self._names.take(value.name)
        self.data[value] = tensor

    def __delitem__(self, value: Value) -> None:
        del self.data[value]
        self._names.free(value.name)


class Graph:
    """A network: inputs, outputs, nodes in a runnable order, constants by value.

    What makes and what reads a value is known at any time: assignments to a node's ``inputs`` and
    ``outputs``, and the methods of ``nodes``, keep that true.
    """

    def __init__(
        self,
        name: str,
        inputs: Iterable[Value] = (),
        outputs: Iterable[Value] = (),
        nodes: Iterable[Node] = (),
        constants: Mapping[Value, torch.Tensor] | None = None,
    ) -> None:
        self.name = name
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self._names = Names()
        self._nodes = Nodes(self._names, nodes)
        self._constants = Constants(self._names, constants or {})

    @property
    def nodes(self) -> Nodes:
        return self._nodes

    @nodes.setter
    def nodes(self, nodes: Iterable[Node]) -> None:
        nodes = list(nodes)
        for node in list(self._nodes):
            self._nodes.remove(node)
        for node in nodes:
            self._nodes.append(node)

    @property
    def constants(self) -> Constants:
        return self._constants

    @constants.setter
    def constants(self, constants: Mapping[Value, torch.Tensor]) -> None:
        for value in self._constants:
            self._names.free(value.name)
        self._constants = Constants(self._names, constants)

    def copy(self) -> Graph:
        """A graph whose nodes and values can be changed; constants' tensors are shared."""
        return self._copied(
            {v: Value(v.name, v.dtype, v.shape) for v in self.values()},
            [dict(n.attrs) for n in self.nodes],
        )

    def at_batch(self, batch: int) -> Graph:
        """A copy with concrete shapes and attributes for one batch size; constants are shared."""
        return self._copied(
            {v: Value(v.name, v.dtype, shape_at(v.shape, batch)) for v in self.values()},
            [attrs_at(n.attrs, batch) for n in self.nodes],
        )

    def _copied(self, copies: Mapping[Value, Value], attrs: list[dict[str, Any]]) -> Graph:
        return Graph(
            name=self.name,
            inputs=[copies[v] for v in self.inputs],
            outputs=[copies[v] for v in self.outputs],
            nodes=[
                Node(
                    op=n.op,
                    inputs=tuple(None if v is None else copies[v] for v in n.inputs),
                    outputs=tuple(copies[v] for v in n.outputs),
                    attrs=attrs_of,
                    layer=n.layer,
                )
                for n, attrs_of in zip(self.nodes, attrs, strict=True)
            ],
            constants={copies[v]: t for v, t in self.constants.items()},
        )

    def become(self, other: Graph) -> None:
        """Take all of another graph, which is of no use any more."""
        self.__dict__.update(other.__dict__)

    def constant(self, value: Value | None) -> torch.Tensor | None:
        """The tensor behind a value, or None if it is computed (or left out)."""
        return None if value is None else self.constants.get(value)

    def add_constant(self, name: str, tensor: torch.Tensor) -> Value:
        """A new constant under a name like ``name`` that is not taken yet."""
        dtype = dtype_name(tensor.dtype)
        value = Value(self.fresh_name(name), dtype, tuple(tensor.shape))
        self.constants[value] = tensor
        return value

    def fresh_name(self, like: str) -> str:
        """``like``, or with the first number behind it that makes a name no value has."""
        return self._names.fresh(like, {v.name for v in self.inputs})

    def rename(self, value: Value, name: str) -> None:
        """Give another name to a value that a node makes."""
        self._names.free(value.name)
        value.name = name
        self._names.take(name)

    def values(self) -> Iterator[Value]:
        yield from self.inputs
        yield from self.constants
        for node in self.nodes:
            yield from node.outputs

    def producer(self, value: Value | None) -> Node | None:
        """The node that makes a value; None for inputs, constants, and what is left out."""
        return self._nodes.maker(value)

    def users(self, value: Value) -> list[Node]:
        """Which nodes read a value, in order (a node that reads it twice is there twice)."""
        return self._nodes.readers(value)

    def only_reader(self, value: Value) -> Node | None:
        """The node that reads a value once, if nothing else needs it, the graph's user neither."""
        reader = self._nodes.only_reader(value)
        return None if reader is None or value in self.outputs else reader

    def replace_uses(self, old: Value, new: Value) -> None:
        """Let everything that reads ``old`` read ``new``, the graph's outputs too."""
        for node in dict.fromkeys(self.users(old)):
            node.inputs = tuple(new if v is old else v for v in node.inputs)
        self.outputs = [new if v is old else v for v in self.outputs]
