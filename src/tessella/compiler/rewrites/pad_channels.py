"""Codes between two layers get channels of zeros until Hopper's tiles of 16 bytes fit them.

The first layer makes them, from rows of zeros in its weight, and the others' weights have zeros
there: no step is added, and no sum changes.
"""

from __future__ import annotations

import torch

from tessella.compiler.rewrites.lower_quantization import CODES
from tessella.graph.graph import Graph, Node, Value

MULTIPLE = 16  # bytes, and so codes
CHANNELS = {"conv2d": 1, "linear": -1}  # the axis


def apply(graph: Graph) -> int:
    """Pad what only layers on codes read; returns how many values grew."""
    grown = 0
    for node in graph.nodes:
        if not _on_codes(node) or node.output.dtype not in CODES or node.inputs[3] is not None:
            continue
        value, readers = node.output, graph.users(node.output)
        missing = -node.inputs[1].shape[0] % MULTIPLE
        alone = all(_on_codes(r) and r.inputs[0] is value is not r.inputs[3] for r in readers)
        if not missing or not readers or not alone or value in graph.outputs:
            continue
        node.inputs = (
            node.inputs[0],
            *(_padded(graph, v, 0, missing) for v in node.inputs[1:3]),
            None,
            _padded(graph, node.inputs[4], 0, missing),
        )
        for reader in readers:
            weight = _padded(graph, reader.inputs[1], 1, missing)
            reader.inputs = (reader.inputs[0], weight, *reader.inputs[2:])
        axis = CHANNELS[node.op] % len(value.shape)
        value.shape = (
            *value.shape[:axis], value.shape[axis] + missing, *value.shape[axis + 1 :]
        )  # fmt: skip
        grown += 1
    return grown


def _on_codes(node: Node) -> bool:
    return node.op in CHANNELS and len(node.inputs) == 5 and node.attrs.get("groups", 1) == 1


def _padded(graph: Graph, value: Value | None, axis: int, missing: int) -> Value | None:
    """A constant with more zeros at the end of an axis."""
    if value is None:
        return None
    constant = graph.constants[value]
    shape = list(constant.shape)
    shape[axis] = missing
    zeros = torch.zeros(shape, dtype=constant.dtype)
    return graph.add_constant(f"{value.name}.padded", torch.cat([constant, zeros], axis))
