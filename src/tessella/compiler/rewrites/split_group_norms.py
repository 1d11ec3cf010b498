"""A group norm becomes its statistics and what they do to each channel, a product and a sum.

Those join the activation, the residual and the rounding behind them in one pass over memory, and
write where a concatenation wants them.
"""

from __future__ import annotations

from tessella.compiler.problems import problem_of
from tessella.graph.graph import Graph, Node, Value, shape_at
from tessella.kernels import catalog
from tessella.operations.tensor_meta import TensorMeta

STATISTICS = "group_factors.moments"
BATCH = 11  # to ask the kernel with


def apply(graph: Graph) -> int:
    """Split what the kernel of statistics takes; returns how many."""
    row, split = catalog.kernel(STATISTICS), 0
    for norm in [n for n in graph.nodes if n.op == "group_norm"]:
        statistics = _statistics(graph, norm)
        if row.refusal(problem_of(statistics, _meta, graph.constants)) is None:
            graph.nodes.replace(norm, statistics, *_applied(graph, norm, *statistics.outputs))
            split += 1
    return split


def _meta(value: Value) -> TensorMeta:
    return TensorMeta(shape=shape_at(value.shape, BATCH), dtype=value.dtype)


def _statistics(graph: Graph, norm: Node) -> Node:
    x, made = norm["input"], norm.output
    one = (*x.shape[:2], *(1 for _ in x.shape[2:]))
    names = (graph.fresh_name(f"{made.name}.{name}") for name in ("factor", "shift"))
    factors = tuple(Value(name, "float32", one) for name in names)
    return Node("group_factors", norm.inputs, factors, dict(norm.attrs), norm.layer)


def _applied(graph: Graph, norm: Node, factor: Value, shift: Value) -> list[Node]:
    """``x · factor + shift`` in float32, then in the norm's own type."""
    made, layer = norm.output, norm.layer

    def value(name: str) -> Value:
        return Value(graph.fresh_name(f"{made.name}.{name}"), "float32", made.shape)

    scaled, is_narrow = value("scaled"), made.dtype != "float32"
    summed = value("sum") if is_narrow else made
    nodes = [
        Node("mul", (norm["input"], factor), (scaled,), {"scalar": None}, layer),
        Node("add", (scaled, shift), (summed,), {"scalar": None, "alpha": 1}, layer),
    ]
    if is_narrow:
        nodes.append(Node("to", (summed,), (made,), {"dtype": made.dtype}, layer))
    return nodes
