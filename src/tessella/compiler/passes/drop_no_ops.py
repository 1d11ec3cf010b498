"""Reshapes, permutes, pads, casts and copies that change nothing, and pairs that are one."""

from __future__ import annotations

from tessella.graph.graph import Graph, Node, Value


def apply(graph: Graph) -> int:
    """Drop them; returns how many. One that makes an output of the graph stays, for its name."""
    dropped = 0
    producer = graph.producer()
    for node in list(graph.nodes):
        _merge_pair(node, producer)
        if _changes_nothing(node) and node.output not in graph.outputs:
            graph.replace_uses(node.output, node.inputs[0])
            graph.nodes.remove(node)
            dropped += 1
    return dropped


def _merge_pair(node: Node, producer: dict[Value, Node]) -> None:
    """A reshape of a reshape reads the first one's input, a permute of a permute too."""
    before = producer.get(node.inputs[0]) if node.inputs else None
    if before is None or before.op != node.op:
        return
    if node.op == "reshape":
        node.inputs = before.inputs
    elif node.op == "permute":
        node.attrs["dims"] = tuple(before.attrs["dims"][d] for d in node.attrs["dims"])
        node.inputs = before.inputs


def _changes_nothing(node: Node) -> bool:
    if node.op == "clone":
        return True
    if node.op == "permute":
        return tuple(node.attrs["dims"]) == tuple(range(len(node.attrs["dims"])))
    if node.op == "pad":
        return not any(node.attrs["pad"])
    if node.op in ("reshape", "expand"):
        return node.inputs[0].shape == node.output.shape
    return node.op == "to" and node.inputs[0].dtype == node.output.dtype
