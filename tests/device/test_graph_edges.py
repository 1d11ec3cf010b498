"""Which edges of a captured graph become full ones, in a driver of our own making."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from tessella.device.driver import Driver
from tessella.device.graph_edges import let_libraries_wait

OURS, THEIRS = 11, 22  # functions
EARLY, FULL = (1, 1), (0, 0)  # an edge's port and type
Edges = dict[tuple[int, int], tuple[int, int]]


class Graph:
    """Kernels by node, and edges as a captured stream has them."""

    def __init__(self, kernels: dict[int, int], edges: Edges) -> None:
        self.kernels, self.edges = kernels, dict(edges)
        self._functions = {0: SimpleNamespace(handle=ctypes.c_void_p(OURS))}
        self.handles = lambda: Driver.handles(self)  # type: ignore[arg-type]

    def call(self, name: str, *args: Any) -> None:
        getattr(self, name)(*args)

    def cuGraphKernelNodeGetParams_v2(self, node: Any, made: Any) -> None:
        made._obj.function = self.kernels[node.value]

    def cuGraphGetEdges_v2(self, graph: Any, begin: Any, end: Any, data: Any, count: Any) -> None:
        if begin is None:
            count._obj.value = len(self.edges)
            return
        for i, ((a, b), (port, kind)) in enumerate(self.edges.items()):
            begin[i], end[i] = a, b
            data[i].from_port, data[i].type = port, kind

    def cuGraphRemoveDependencies_v2(self, graph: Any, a: Any, b: Any, data: Any, n: Any) -> None:
        removed = self.edges.pop((a._obj.value, b._obj.value))
        assert removed == (data._obj.from_port, data._obj.type)
        assert n.value == 1

    def cuGraphAddDependencies_v2(self, graph: Any, a: Any, b: Any, data: Any, n: Any) -> None:
        self.edges[a._obj.value, b._obj.value] = (data._obj.from_port, data._obj.type)


def test_only_kernels_that_are_not_ours_wait_for_the_end() -> None:
    kernels = {1: OURS, 2: OURS, 3: THEIRS, 4: THEIRS, 5: OURS}
    edges = {(1, 2): EARLY, (2, 3): EARLY, (3, 4): FULL, (4, 5): EARLY, (5, 6): FULL}
    graph = Graph(kernels, edges)
    assert let_libraries_wait(graph, 1) == 1  # type: ignore[arg-type]
    assert graph.edges == {**edges, (2, 3): FULL}


def test_a_graph_without_edges() -> None:
    assert let_libraries_wait(Graph({1: THEIRS}, {}), 1) == 0  # type: ignore[arg-type]
