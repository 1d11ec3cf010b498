"""A residual that is added after a layer's result was permuted is turned back and added before.

``permute(layer) + x`` is ``permute(layer + permute⁻¹(x))``: then the sum is the layer's epilogue.
Permutes are views, and in channels_last the one of x meets its undoing or costs nothing.
"""

from __future__ import annotations

from tessella.compiler.layers import LAYERS
from tessella.graph.graph import Graph, Node, Value


def apply(graph: Graph) -> int:
    """Turn them; returns how many."""
    turned = 0
    for add in [n for n in graph.nodes if n.op == "add"]:
        left, right = add["input"], add.get("other")
        for value, other in ((left, right), (right, left)):
            permute = graph.producer(value)
            if other is None or permute is None or not _may_turn(graph, add, permute, other):
                continue
            _turn(graph, add, permute, other)
            turned += 1
            break
    return turned


def _may_turn(graph: Graph, add: Node, permute: Node, other: Value) -> bool:
    if permute.op != "permute" or add.attrs["alpha"] != 1 or other in graph.constants:
        return False
    layer = graph.producer(permute["input"])
    return (
        layer is not None
        and layer.op in LAYERS
        and layer.attrs.get("activation") is None
        and layer.has_only("input", "weight", "bias")
        and (other.shape, other.dtype) == (add.output.shape, add.output.dtype)
        and graph.only_reader(layer.output) is permute
        and graph.only_reader(permute.output) is add
    )


def _turn(graph: Graph, add: Node, permute: Node, other: Value) -> None:
    made, result = permute["input"], add.output
    dims = [d % len(result.shape) for d in permute.attrs["dims"]]
    back = Value(graph.fresh_name(f"{other.name}.turned"), other.dtype, made.shape)
    total = Value(graph.fresh_name(f"{result.name}.turned"), result.dtype, made.shape)
    undo = {"dims": tuple(dims.index(axis) for axis in range(len(dims)))}
    add.inputs, add.outputs = (made, back), (total,)
    permute.inputs, permute.outputs = (total,), (result,)
    graph.nodes.remove(permute)
    graph.nodes.insert_before(add, Node("permute", (other,), (back,), undo, add.layer))
    graph.nodes.insert_after(add, permute)
