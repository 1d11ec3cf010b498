"""Pixels as rows, and rows as pixels, in an order that channels_last has already.

Transformers of pictures flatten a map and then turn it, or turn rows and then cut them::

    [N, C, H, W] → reshape [N, C, H·W] → permute [N, H·W, C]
    [N, H·W, C] → permute [N, C, H·W] → reshape [N, C, H, W]

Turned first and flattened then, cut first and turned then, a channels_last map is a view: nothing
is copied, and what follows knows how its numbers lie.
"""

from __future__ import annotations

from typing import Any

from tessella.graph.graph import Graph, Node, Value


def apply(graph: Graph) -> int:
    """Swap each pair of which nobody else reads what is between; returns how many."""
    swapped = 0
    for node in list(graph.nodes):
        if node not in graph.nodes:
            continue  # it went with the pair before
        reader = graph.only_reader(node.output) if node.op in ("reshape", "permute") else None
        if reader is None or {node.op, reader.op} != {"reshape", "permute"}:
            continue
        turned, x = node if node.op == "permute" else reader, node["input"]
        if tuple(turned.attrs["dims"]) != (0, 2, 1):
            continue
        if node.op == "reshape":
            if not _flattens(x, node.output):
                continue
            n, c, h, w = x.shape
            dims, between = (0, 2, 3, 1), (n, h, w, c)
        else:
            if not _flattens(reader.output, node.output):
                continue
            n, c, h, w = reader.output.shape
            dims, between = (0, 3, 1, 2), (n, h, w, c)
        result = reader.output
        made = Value(graph.fresh_name(f"{x.name}.pixels"), x.dtype, between)
        first, then = ("permute", "reshape") if node.op == "reshape" else ("reshape", "permute")
        shape = result.shape if node.op == "reshape" else between
        attrs: dict[str, dict[str, Any]] = {"permute": {"dims": dims}, "reshape": {"shape": shape}}
        graph.nodes.insert_before(reader, Node(first, (x,), (made,), attrs[first], node.layer))
        graph.nodes.replace(reader, Node(then, (made,), (result,), attrs[then], reader.layer))
        graph.nodes.remove(node)
        swapped += 1
    return swapped


def _flattens(map: Value, flat: Value) -> bool:
    """Whether a value is a map of pixels with its two last axes as one."""
    if len(map.shape) != 4 or len(flat.shape) != 3 or map.shape[:2] != flat.shape[:2]:
        return False
    h, w = map.shape[2:]
    return isinstance(h, int) and isinstance(w, int) and flat.shape[2] == h * w
