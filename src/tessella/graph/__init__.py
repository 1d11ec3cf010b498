"""Networks as data: captured from torch or ONNX, checked, shown, interpreted."""

from tessella.graph.capture import capture
from tessella.graph.check import check
from tessella.graph.graph import Dim, Graph, Node, Value
from tessella.graph.interpret import interpret
from tessella.graph.show import svg, text

__all__ = [
    "Dim",
    "Graph",
    "Node",
    "Value",
    "capture",
    "check",
    "interpret",
    "svg",
    "text",
]
