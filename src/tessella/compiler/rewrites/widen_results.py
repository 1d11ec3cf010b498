"""A 16-bit layer whose result is only widened writes float32 itself: its sums are float32 anyway.

A network in float16 ends with a cast of its scores, which rounds them for nothing and costs a GPU
a launch. Only there: a CPU's libraries write the type that they read, and a cast costs them next
to nothing. A residual stays with its cast, as kernels add one of the result's own type.
"""

from __future__ import annotations

from tessella.compiler.fitting import is_plain_sixteen_bit, loses_none
from tessella.compiler.layers import LAYERS
from tessella.graph.graph import Graph, Node


def apply(graph: Graph, target: str) -> int:
    """Take casts into the layers before them; returns how many went.

    It comes after chains were fused: a cast that is a part of a longer step costs nothing.
    """
    widened = 0
    for layer in [n for n in graph.nodes if n.op in LAYERS and is_plain_sixteen_bit(n)]:
        cast = graph.only_reader(layer.output)
        if cast is None or cast.op != "to" or cast.output.dtype != "float32":
            continue
        wide = Node(
            op=layer.op,
            inputs=layer.inputs,
            outputs=cast.outputs,
            attrs={**layer.attrs, "dtype": "float32"},
            layer=layer.layer,
        )
        if loses_none(layer, wide, target, graph.constants):
            graph.nodes.remove(cast)
            graph.nodes.replace(layer, wide)
            widened += 1
    return widened
