"""Dead code: nodes whose results nobody reads, and constants that no node reads any more."""

from __future__ import annotations

from tessella.graph.build import drop_unused
from tessella.graph.graph import Graph


def apply(graph: Graph) -> int:
    """Drop nodes whose results nobody reads; returns how many were dropped."""
    return drop_unused(graph)
