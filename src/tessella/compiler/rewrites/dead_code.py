"""Dead code: nodes whose results nobody reads, and constants that no node reads any more."""

from __future__ import annotations

from tessella.graph.graph import Graph


def apply(graph: Graph) -> int:
    """Drop them; returns how many nodes went."""
    needed = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if needed & set(node.outputs):
            kept.append(node)
            needed |= {v for v in node.inputs if v is not None}
    dropped = len(graph.nodes) - len(kept)
    graph.nodes = kept[::-1]
    graph.constants = {v: t for v, t in graph.constants.items() if v in needed}
    return dropped
