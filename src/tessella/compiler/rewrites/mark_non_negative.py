"""Poolings whose input has no number below zero say so: then 16-bit floats are ordered as integers.

Kernels for the CPU want to know: the maximum of int16 is an instruction, that of bfloat16 is not.
"""

from __future__ import annotations

from tessella.core.dtype import SIXTEEN_BIT
from tessella.graph.graph import Graph, Node, Value

ACTIVATIONS = frozenset(("relu", "relu6", "sigmoid", "hardsigmoid"))  # never below zero
# what is not below zero if nothing that it reads is; avg_pool2d may divide by a negative number
KEEPS = frozenset(("cat", "max_pool2d", "adaptive_avg_pool2d", "to", "permute"))


def apply(graph: Graph) -> int:
    """Mark ``max_pool2d`` of 16-bit numbers from zero on; returns how many were marked."""
    found: set[Value] = set()
    marked = 0
    for node in graph.nodes:  # in order: what a node reads was made before
        if _is_non_negative(node, found):
            found |= {*node.outputs}
        if node.op == "max_pool2d" and node["input"] in found and node.output.dtype in SIXTEEN_BIT:
            node.attrs = {**node.attrs, "non_negative": True}
            marked += 1
    return marked


def _is_non_negative(node: Node, found: set[Value]) -> bool:
    if node.op in ACTIVATIONS or node.attrs.get("activation") in ACTIVATIONS:
        return True
    return node.op in KEEPS and all(value in found for value in node.inputs if value is not None)
