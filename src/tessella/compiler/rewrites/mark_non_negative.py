"""Poolings and layers of int8 whose input has no number below zero say so.

Kernels for the CPU want to know: 16-bit floats are ordered as integers then, whose maximum is an
instruction, and int8 are the uint8 that oneDNN multiplies, without a shift by 128.
"""

from __future__ import annotations

from tessella.core.dtype import SIXTEEN_BIT
from tessella.graph.graph import Graph, Node, Value

ACTIVATIONS = frozenset(("relu", "relu6", "sigmoid", "hardsigmoid"))  # never below zero
# what is not below zero if nothing that it reads is; avg_pool2d may divide by a negative number
KEEPS = frozenset(("cat", "max_pool2d", "adaptive_avg_pool2d", "to", "permute"))
MARKED = {"max_pool2d": SIXTEEN_BIT, "conv2d": ("int8",), "linear": ("int8",)}  # element types


def apply(graph: Graph) -> int:
    """Mark what reads numbers from zero on; returns how many were marked."""
    found: set[Value] = set()
    marked = 0
    for node in graph.nodes:  # in order: what a node reads was made before
        if _is_non_negative(graph, node, found):
            found |= {*node.outputs}
        if node.op in MARKED and (x := node["input"]) in found and x.dtype in MARKED[node.op]:
            node.attrs = {**node.attrs, "non_negative": True}
            marked += 1
    return marked


def _is_non_negative(graph: Graph, node: Node, found: set[Value]) -> bool:
    if node.op in ACTIVATIONS or node.attrs.get("activation") in ACTIVATIONS:
        return bool(node.attrs.get("floor", 0.0) >= 0)
    if node.op == "quantize":
        scale = graph.constant(node["scale"])
        around_zero = (
            node.get("zero_point") is None and scale is not None and bool((scale > 0).all())
        )
        return around_zero and node["input"] in found
    return node.op in KEEPS and all(value in found for value in node.inputs if value is not None)
