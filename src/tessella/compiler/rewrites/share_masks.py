"""An attention mask that is the same for every query, or head, is read as one row.

Exporters spell a padding mask [N, 1, 1, S] out to [N, 1, L, S]: an ``expand``, or an ``and`` with
all that a query may see, which for an encoder is everything. Kernels broadcast the short one, and
read L times less.
"""

from __future__ import annotations

from tessella.graph.graph import Graph, Node, Value

OP = "scaled_dot_product_attention"


def apply(graph: Graph) -> int:
    """Shorten them; returns how many attentions read a shorter mask."""
    shortened = 0
    for node in graph.nodes:
        mask = node.get("attn_mask") if node.op == OP else None
        short = None if mask is None else _without_repeats(graph, mask)
        if short is not mask:
            node.rebind(attn_mask=short)
            shortened += 1
    return shortened


def _without_repeats(graph: Graph, mask: Value) -> Value:
    """What the mask repeats, as far as steps that only repeat made it."""
    while (node := graph.producer(mask)) is not None:
        if node.op == "expand":
            source: Value | None = node["input"]
        elif node.op == "fallback" and node.attrs["target"] == "aten::bitwise_and.Tensor":
            source = _beside_all_true(graph, node)
        else:
            return mask
        if source is None or len(source.shape) != len(mask.shape):
            return mask
        mask = source
    return mask


def _beside_all_true(graph: Graph, node: Node) -> Value | None:
    """The other operand of an ``and`` with a constant that is true everywhere."""
    for one, other in (node.inputs, node.inputs[::-1]):
        constant = graph.constant(one)
        if constant is not None and other is not None and other.dtype == "bool" and constant.all():
            return other
    return None
