"""Constant folding: what depends on constants only is computed once, here."""

from __future__ import annotations

import torch

from tessella.graph.graph import Dim, Graph, Node, attrs_at
from tessella.operations.table import operation

MAX_GROWTH_BYTES = 1 << 20  # an expanded constant larger than this stays an operation


def apply(graph: Graph) -> int:
    """Replace foldable nodes by constants; returns how many."""
    folded = 0
    for node in list(graph.nodes):
        if not _foldable(graph, node):
            continue
        inputs = [graph.constant(v) for v in node.inputs]
        with torch.no_grad():
            made = operation(node.op).call(inputs, node.attrs)
        size = sum(t.nbytes for t in made)
        if size > sum(t.nbytes for t in inputs if t is not None) + MAX_GROWTH_BYTES:
            continue
        for value, tensor in zip(node.outputs, made, strict=True):
            graph.constants[value] = tensor.contiguous().clone()
        graph.nodes.remove(node)
        folded += 1
    return folded


def _foldable(graph: Graph, node: Node) -> bool:
    constant = all(v is None or v in graph.constants for v in node.inputs)
    fixed = attrs_at(node.attrs, 1) == attrs_at(node.attrs, 2)
    fixed = fixed and not any(isinstance(d, Dim) for v in node.outputs for d in v.shape)
    if node.op == "dequantize" and len(node.output.shape) > 1:
        return False  # a quantized weight: a layer on int8 reads it as it is
    random = "rand" in str(node.attrs.get("target", "")) or "dropout" in node.op
    return constant and fixed and not random and not set(node.outputs) & set(graph.outputs)
