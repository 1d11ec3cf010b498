"""Rewrites that run until none applies: a node is tried again only when something near it changed.

``until_done`` rewrites what a loop would that asks every node again, from the first one, after
every rewrite: of the first rewrite that applies anywhere, the first node in the graph's order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable

from tessella.graph.graph import Graph, Node, Value

# Changes the graph around a node, which it may also move; returns all values whose maker or readers
# are others now, and nothing where it does not apply. Whether it applies must be seen from the node
# and those that make or read what the node reads or makes.
Rewrite = Callable[[Graph, Node], Collection[Value]]


def until_done(graph: Graph, *rewrites: Rewrite) -> int:
    """Rewrite as long as something applies; returns how often."""
    waiting = [_Waiting(graph) for _ in rewrites]
    count = turn = 0
    while turn < len(rewrites):
        node = waiting[turn].pop()
        if node is None:
            turn += 1
        elif changed := rewrites[turn](graph, node):
            near = _near(graph, changed)
            for nodes in waiting:
                nodes.add(near)
            count, turn = count + 1, 0
    return count


def values_of(*nodes: Node) -> list[Value]:
    """What nodes read and make."""
    return [v for node in nodes for v in (*node.inputs, *node.outputs) if v is not None]


def _near(graph: Graph, changed: Iterable[Value]) -> set[Node]:
    """Who makes or reads a value. Constants do not count: a scale may have readers everywhere."""
    found: set[Node] = set()
    for value in set(changed):
        if value not in graph.constants:
            found.update(graph.users(value))
            if (maker := graph.producer(value)) is not None:
                found.add(maker)
    return found


class _Waiting:
    """The nodes that one rewrite is to be asked for, the first in the graph's order first."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._heap = list(graph.nodes)  # in order, which makes it a heap
        self._known = set(self._heap)

    def add(self, nodes: set[Node]) -> None:
        for node in nodes - self._known:
            heapq.heappush(self._heap, node)
        self._known |= nodes

    def pop(self) -> Node | None:
        while self._heap:
            node = heapq.heappop(self._heap)
            self._known.remove(node)
            if node in self._graph.nodes:
                return node
        return None
