"""Precision: every float32 value in a 16-bit type, with casts at the edges of the network.

Sums inside matrix products, norms and softmax stay in float32: torch's kernels accumulate so. Two
things keep float32 outside too: the statistics of batch norms that could not be folded (a float16
variance overflows at 65,504), and operators that we do not know (``fallback``, and a user's own
that do not say that they take the type).
"""

from __future__ import annotations

import torch

from tessella.graph.graph import Graph, Node, Value
from tessella.kernels.user.registry import named


def _keeps_float32(node: Node, dtype: str) -> bool:
    if node.op == "user":
        return dtype not in named(node.attrs["target"]).dtypes
    return node.op == "fallback"


def apply(graph: Graph, dtype: str) -> int:
    """Turn the graph to ``dtype`` (``float16`` or ``bfloat16``); returns how many casts it got."""
    caster = _Caster(graph, dtype)
    outputs = list(graph.outputs)
    for node in list(graph.nodes):
        wanted = "float32" if _keeps_float32(node, dtype) else dtype
        node.inputs = tuple(
            v
            if v is None or (node.op == "batch_norm" and position > 0)
            else caster.cast(v, wanted, before=node)
            for position, v in enumerate(node.inputs)
        )
        if wanted != "float32":
            _lower_attrs(node, dtype)
            for value in node.outputs:
                if value.dtype == "float32":
                    value.dtype = dtype
    graph.outputs = [_float32_output(graph, v, dtype) for v in outputs]
    return caster.count


class _Caster:
    """Casts a value once for each element type that somebody wants."""

    def __init__(self, graph: Graph, dtype: str) -> None:
        self.graph, self.dtype, self.count = graph, dtype, 0
        self._made: dict[tuple[Value, str], Value] = {}

    def cast(self, value: Value, wanted: str, *, before: Node) -> Value:
        floats = {"float32", self.dtype}
        if value.dtype == wanted or value.dtype not in floats:
            return value
        if (value, wanted) not in self._made:
            self._made[value, wanted] = self._make(value, wanted, before)
        return self._made[value, wanted]

    def _make(self, value: Value, wanted: str, before: Node) -> Value:
        name = f"{value.name}.{wanted}"
        constant = self.graph.constant(value)
        if constant is not None:
            return self.graph.add_constant(name, constant.to(getattr(torch, wanted)))
        made = Value(self.graph.fresh_name(name), wanted, value.shape)
        node = Node(op="to", inputs=(value,), outputs=(made,), attrs={"dtype": wanted})
        self.graph.nodes.insert(self.graph.nodes.index(before), node)
        self.count += 1
        return made


def _lower_attrs(node: Node, dtype: str) -> None:
    """``to``, ``softmax`` and reductions may name the element type of their result."""
    if node.attrs.get("dtype") == "float32":
        node.attrs["dtype"] = dtype


def _float32_output(graph: Graph, value: Value, dtype: str) -> Value:
    """The graph's output in float32 again, under its own name."""
    if value.dtype != dtype:
        return value
    name = value.name
    value.name = graph.fresh_name(f"{name}.{dtype}")
    made = Value(name, "float32", value.shape)
    graph.nodes.append(Node(op="to", inputs=(value,), outputs=(made,), attrs={"dtype": "float32"}))
    return made
