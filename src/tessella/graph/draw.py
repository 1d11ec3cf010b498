"""A graph as a picture."""

from __future__ import annotations

from tessella.graph.graph import Graph


def svg(graph: Graph) -> str:
    raise NotImplementedError
