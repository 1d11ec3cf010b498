"""A graph for people: as text, one line a node, and as a drawing."""

from __future__ import annotations

from typing import Any

from tessella.graph.draw import svg
from tessella.graph.graph import Graph, Node, Value
from tessella.operations import pointwise_program as program

__all__ = ["svg", "text"]


def text(graph: Graph) -> str:
    """One line an input, node and output.

    ``%conv2d: float32[N, 64, 56, 56] = conv2d(%image, conv1.weight[64, 3, 7, 7]) stride=(2, 2)``.
    ``%`` marks what is computed; a constant shows its shape; attributes that are None are left out.
    """
    lines = [f"graph {graph.name}({', '.join(repr(v) for v in graph.inputs)})"]
    lines += [f"  {_line(graph, node)}" for node in graph.nodes]
    lines.append(f"  return {', '.join(f'%{v.name}' for v in graph.outputs)}")
    return "\n".join(lines) + "\n"


def _line(graph: Graph, node: Node) -> str:
    made = ", ".join(repr(v) for v in node.outputs)
    read = list(node.inputs)
    while read and read[-1] is None:
        read.pop()
    layer = f"  # layer {node.layer}" if node.layer else ""
    if node.op == "pointwise":
        operands = [_operand(graph, v) for v in read]
        shown = program.text(node.attrs["program"], node.attrs["results"], operands)
        return f"{made} = pointwise: {shown}{layer}"
    op = node.op
    attrs = {k: a for k, a in node.attrs.items() if a is not None}
    if op in ("fallback", "user"):
        op = f"{op} {attrs.pop('target')}"
    words = [f"{made} = {op}({', '.join(_operand(graph, v) for v in read)})"]
    words += [f"{name}={_attr(attr)}" for name, attr in attrs.items()]
    return " ".join(words) + layer


def _operand(graph: Graph, value: Value | None) -> str:
    if value is None:
        return "None"
    if value in graph.constants:
        return f"{value.name}[{', '.join(str(d) for d in value.shape)}]"
    return f"%{value.name}"


def _attr(attr: Any) -> str:
    """An attribute with ``Dim`` as ``N``."""
    if isinstance(attr, tuple | list):
        inner = ", ".join(_attr(a) for a in attr)
        return f"({inner},)" if len(attr) == 1 else f"({inner})"
    if isinstance(attr, dict):
        return "{" + ", ".join(f"{k}: {_attr(a)}" for k, a in attr.items()) + "}"
    return str(attr)
