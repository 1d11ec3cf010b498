"""Layers whose constant weight is 2:4 sparse say so: kernels for such weights may then compete.

The mark is a part of what is measured, so that times of dense weights are never taken for theirs.
"""

from __future__ import annotations

from tessella.graph.graph import Graph
from tessella.kernels.sparse.two_four import LAYERS, TWO_FOUR, is_two_four


def apply(graph: Graph) -> int:
    """Mark what a sparse matrix product can carry out; returns how many layers were marked."""
    marked = 0
    for node in graph.nodes:
        weight = graph.constant(node["weight"]) if node.op in LAYERS else None
        if weight is None or set(weight.shape[2:]) - {1} or node.attrs.get("groups", 1) != 1:
            continue
        if is_two_four(weight):
            node.attrs = {**node.attrs, "sparsity": TWO_FOUR}
            marked += 1
    return marked
