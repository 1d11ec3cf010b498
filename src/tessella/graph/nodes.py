"""The nodes of a graph in the order in which they run, with who makes and who reads each value.

Rewrites ask for makers and readers all the time, and put nodes before and after others. So the
order is a chain of neighbours in which every node has a place, a number: whole numbers of any size
lie between two others. Assigning to ``inputs`` or ``outputs`` of a node keeps the index true.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tessella.graph.names import Names
from tessella.graph.value import Value
from tessella.operations.named import NamedOperands

# Between the places of neighbours: so many halvings before all places are given anew.
_GAP = 1 << 128


class Node(NamedOperands[Value]):
    """One operation.

    Attributes:
        op: a name of ``operations.table``, or ``fallback`` with the torch operator in
            ``attrs["target"]``.
        inputs: in the operation's order; None where an optional one is left out.
        outputs: the values that it makes.
        attrs: JSON values (tuples for lists); may contain ``Dim``.
        layer: the module path that it came from, ``layer1.0.conv1``.
        place: its place in the graph's order, while it is in a graph.
    """

    __slots__ = ("_after", "_before", "_home", "_inputs", "_outputs", "attrs", "layer", "op",
                 "place")  # fmt: skip

    def __init__(
        self,
        op: str,
        inputs: tuple[Value | None, ...],
        outputs: tuple[Value, ...],
        attrs: dict[str, Any] | None = None,
        layer: str = "",
    ) -> None:
        self.op, self.layer = op, layer
        self.attrs: dict[str, Any] = {} if attrs is None else attrs
        self._inputs, self._outputs = inputs, outputs
        self.place = 0
        self._home: Nodes | None = None
        self._before: Node | None = None
        self._after: Node | None = None

    @property
    def inputs(self) -> tuple[Value | None, ...]:
        return self._inputs

    @inputs.setter
    def inputs(self, values: tuple[Value | None, ...]) -> None:
        if self._home is None:
            self._inputs = values
        else:
            self._home._forget_inputs(self)
            self._inputs = values
            self._home._note_inputs(self)

    @property
    def outputs(self) -> tuple[Value, ...]:
        return self._outputs

    @outputs.setter
    def outputs(self, values: tuple[Value, ...]) -> None:
        if self._home is None:
            self._outputs = values
        else:
            self._home._forget_outputs(self)
            self._outputs = values
            self._home._note_outputs(self)

    @property
    def output(self) -> Value:
        """The only output."""
        (value,) = self._outputs
        return value

    def rebind(self, **operands: Value | None) -> None:
        """Let inputs be other values, by name; None leaves one out."""
        inputs = list(self._inputs)
        for name, value in operands.items():
            position = self.operation.position(name)
            inputs.extend([None] * (position + 1 - len(inputs)))
            inputs[position] = value
        self.inputs = tuple(inputs)

    def has_only(self, *operands: str) -> bool:
        """Whether no other operand is given than these."""
        named = zip(self.operation.operands, self._inputs, strict=False)
        return all(value is None or name in operands for name, value in named)

    def __lt__(self, other: Node) -> bool:
        """Whether the node stands before another one of the same graph."""
        return self.place < other.place

    def __repr__(self) -> str:
        return f"Node({self.op!r}, {self._inputs}, {self._outputs}, {self.attrs}, {self.layer!r})"


class Nodes(Sequence[Node]):
    """Nodes in order. One that is in here is in no other graph.

    Whoever changes the order while walking along it walks along a copy, ``list(nodes)``.
    """

    def __init__(self, names: Names, nodes: Iterable[Node] = ()) -> None:
        self._names = names
        self._first: Node | None = None
        self._last: Node | None = None
        self._count = 0
        self._makers: dict[Value, Node] = {}
        self._readers: dict[Value, dict[Node, int]] = {}  # with how often each reads the value
        for node in nodes:
            self.append(node)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Node]:
        node = self._first
        while node is not None:
            yield node
            node = node._after

    def __reversed__(self) -> Iterator[Node]:
        node = self._last
        while node is not None:
            yield node
            node = node._before

    def __contains__(self, node: object) -> bool:
        return isinstance(node, Node) and node._home is self

    def __getitem__(self, index: Any) -> Any:
        """By position, or a list of some; walks there."""
        return list(self)[index]

    # --- who makes and reads a value

    def maker(self, value: Value | None) -> Node | None:
        return None if value is None else self._makers.get(value)

    def readers(self, value: Value) -> list[Node]:
        """In order; a node that reads it twice is there twice."""
        counts = self._readers.get(value, {})
        if len(counts) == 1:
            ((node, count),) = counts.items()
            return [node] * count
        return [node for node in sorted(counts) for _ in range(counts[node])]

    def only_reader(self, value: Value) -> Node | None:
        """The node that reads a value, if there is one, and it reads the value once."""
        counts = self._readers.get(value, {})
        if len(counts) != 1:
            return None
        ((node, count),) = counts.items()
        return node if count == 1 else None

    # --- changes of the order

    def append(self, node: Node) -> None:
        self._link(node, None)

    def insert_first(self, *nodes: Node) -> None:
        first = self._first
        for node in nodes:
            self._link(node, first)

    def insert_before(self, node: Node, *nodes: Node) -> None:
        for new in nodes:
            self._link(new, node)

    def insert_after(self, node: Node, *nodes: Node) -> None:
        following = node._after
        for new in nodes:
            self._link(new, following)

    def replace(self, node: Node, *nodes: Node) -> None:
        """Put nodes in the place of one."""
        following = node._after
        self.remove(node)
        for new in nodes:
            self._link(new, following)

    def remove(self, node: Node) -> None:
        if node._home is not self:
            raise ValueError(f"{node.op} is not in this graph")
        if node._before is None:
            self._first = node._after
        else:
            node._before._after = node._after
        if node._after is None:
            self._last = node._before
        else:
            node._after._before = node._before
        self._forget_inputs(node)
        self._forget_outputs(node)
        node._home = node._before = node._after = None
        self._count -= 1

    def _link(self, node: Node, following: Node | None) -> None:
        """Put a node before another, or at the end."""
        if node._home is not None:
            raise ValueError(f"{node.op} is in a graph already")
        before = self._last if following is None else following._before
        node.place = self._place_between(before, following)
        node._home, node._before, node._after = self, before, following
        if before is None:
            self._first = node
        else:
            before._after = node
        if following is None:
            self._last = node
        else:
            following._before = node
        self._count += 1
        self._note_inputs(node)
        self._note_outputs(node)

    def _place_between(self, before: Node | None, following: Node | None) -> int:
        if before is None or following is None:
            if before is not None:
                return before.place + _GAP
            return 0 if following is None else following.place - _GAP
        if following.place - before.place < 2:
            for i, node in enumerate(self):
                node.place = i * _GAP
        return (before.place + following.place) // 2

    # --- the index

    def _note_inputs(self, node: Node) -> None:
        for value in node._inputs:
            if value is not None:
                counts = self._readers.setdefault(value, {})
                counts[node] = counts.get(node, 0) + 1

    def _forget_inputs(self, node: Node) -> None:
        for value in node._inputs:
            if value is not None and (counts := self._readers.get(value)):
                counts.pop(node, None)
                if not counts:
                    del self._readers[value]

    def _note_outputs(self, node: Node) -> None:
        for value in node._outputs:
            self._makers[value] = node
            self._names.take(value.name)

    def _forget_outputs(self, node: Node) -> None:
        for value in node._outputs:
            if self._makers.get(value) is node:
                del self._makers[value]
            self._names.free(value.name)
