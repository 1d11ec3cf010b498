"""A group norm becomes its statistics and what they do to each channel, a product and a sum.

Those join the activation, the residual and the rounding behind them in one pass over memory, and
write where a concatenation wants them.
"""

from __future__ import annotations

from tessella.core.dtype import FLOATS
from tessella.graph.graph import Graph, Node, Value
from tessella.kernels.norm.group import LARGEST_GROUP


def apply(graph: Graph) -> int:
    """Split what a kernel of statistics takes; returns how many."""
    norms = [n for n in graph.nodes if n.op == "group_norm" and _runs(n)]
    for norm in norms:
        _split(graph, norm)
    return len(norms)


def _runs(norm: Node) -> bool:
    channels = norm["input"].shape[1]
    if norm["input"].dtype not in FLOATS or not isinstance(channels, int):
        return False
    return channels // norm.attrs["num_groups"] <= LARGEST_GROUP


def _split(graph: Graph, norm: Node) -> None:
    x, made, layer = norm["input"], norm.output, norm.layer
    one = (*x.shape[:2], *(1 for _ in x.shape[2:]))
    factor, shift = (
        Value(graph.fresh_name(f"{made.name}.{name}"), "float32", one)
        for name in ("factor", "shift")
    )
    scaled = Value(graph.fresh_name(f"{made.name}.scaled"), "float32", made.shape)
    narrow = made.dtype != "float32"
    summed = Value(graph.fresh_name(f"{made.name}.sum"), "float32", made.shape) if narrow else made
    nodes = [
        Node("group_factors", norm.inputs, (factor, shift), dict(norm.attrs), layer),
        Node("mul", (x, factor), (scaled,), {"scalar": None}, layer),
        Node("add", (scaled, shift), (summed,), {"scalar": None, "alpha": 1}, layer),
    ]
    if narrow:
        nodes.append(Node("to", (summed,), (made,), {"dtype": made.dtype}, layer))
    for node in nodes:
        graph.nodes.insert_before(norm, node)
    graph.nodes.remove(norm)
