"""A group norm becomes its statistics and what they do to each channel, a product and a sum.

Those join the activation, the residual and the rounding behind them in one pass over memory, and
write where a concatenation wants them. On a CPU it is done to what a convolution of volumes makes.
"""

from __future__ import annotations

from tessella.compiler.problems import problem_of
from tessella.core.architectures import is_gpu
from tessella.graph.graph import Graph, Node, Value, shape_at
from tessella.kernels import catalog
from tessella.operations.tensor_meta import Format, TensorMeta

STATISTICS = "group_factors"
BATCH = 11  # to ask the kernels with


def apply(graph: Graph, target: str) -> int:
    """Split what a kernel of statistics takes; returns how many."""
    rows, split = [k for k in catalog.candidates(STATISTICS, target) if k.op == STATISTICS], 0
    for norm in [n for n in graph.nodes if n.op == "group_norm"]:
        made_by = graph.producer(norm["input"])
        if not is_gpu(target) and (made_by is None or made_by.op != "conv3d"):
            continue  # its channels may not lie together, and images were not measured
        statistics = _statistics(graph, norm)
        problem = problem_of(statistics, _meta, graph.constants)
        if any(row.refusal(problem) is None for row in rows):
            graph.nodes.replace(norm, statistics, *_applied(graph, norm, *statistics.outputs))
            split += 1
    return split


def _meta(value: Value) -> TensorMeta:
    format: Format = "channels_last" if len(value.shape) == 5 else "contiguous"
    return TensorMeta(shape=shape_at(value.shape, BATCH), dtype=value.dtype, format=format)


def _statistics(graph: Graph, norm: Node) -> Node:
    x, made = norm["input"], norm.output
    one = (*x.shape[:2], *(1 for _ in x.shape[2:]))
    names = (graph.fresh_name(f"{made.name}.{name}") for name in ("factor", "shift"))
    factors = tuple(Value(name, "float32", one) for name in names)
    return Node(STATISTICS, norm.inputs, factors, dict(norm.attrs), norm.layer)


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
