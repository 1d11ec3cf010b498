"""Chosen layers keep the two largest of each four weights; nothing is trained again."""

from __future__ import annotations

from collections.abc import Collection

from tessella.graph.graph import Graph, Value
from tessella.kernels.sparse.two_four import is_two_four, prune_two_four


def apply(graph: Graph, layers: Collection[str]) -> int:
    """Prune the weights of these layers; returns how many were not 2:4 yet.

    A weight that other layers read as well stays for them.

    Args:
        layers: by the name of their result.
    """
    pruned: dict[Value, Value] = {}
    for node in graph.nodes:
        if node.outputs[0].name not in layers or is_two_four(graph.constants[node["weight"]]):
            continue
        dense = node["weight"]
        if dense not in pruned:
            weight = prune_two_four(graph.constants[dense])
            pruned[dense] = graph.add_constant(f"{dense.name}.two_four", weight)
        node.rebind(weight=pruned[dense])
    return len(pruned)
