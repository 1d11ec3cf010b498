"""Quantized values between two layers get channels of zeros, to fit Hopper's tiles of 16 bytes.

The first layer makes them, from rows of zeros in its weight, and the others' weights have zeros
there: no step is added, and no sum changes.
"""

from __future__ import annotations

import torch

from tessella.core.dtype import QUANTIZED
from tessella.graph.graph import Graph, Node, Value
from tessella.graph.value import fixed

MULTIPLE = 16  # bytes, and so quantized values
CHANNELS = {"conv2d": 1, "linear": -1}  # the axis


def apply(graph: Graph) -> int:
    """Pad what only layers on quantized values read; returns how many values grew."""
    grown = 0
    for node in graph.nodes:
        if not _is_quantized(node) or node.output.dtype not in QUANTIZED or node.get("residual"):
            continue
        value, readers = node.output, graph.users(node.output)
        missing = -fixed(node["weight"].shape[0]) % MULTIPLE
        alone = all(
            _is_quantized(r) and r["input"] is value is not r.get("residual") for r in readers
        )
        if not missing or not readers or not alone or value in graph.outputs:
            continue
        own = {name: node.get(name) for name in ("weight", "bias", "scale")}
        node.rebind(**{name: _padded(graph, v, 0, missing) for name, v in own.items()})
        for reader in readers:
            reader.rebind(weight=_padded(graph, reader["weight"], 1, missing))
        axis = CHANNELS[node.op] % len(value.shape)
        value.shape = (
            *value.shape[:axis], value.shape[axis] + missing, *value.shape[axis + 1 :]
        )  # fmt: skip
        grown += 1
    return grown


def _is_quantized(node: Node) -> bool:
    """Whether a node is a layer on quantized values, of one group."""
    if node.op not in CHANNELS or node.get("scale") is None:
        return False
    return bool(node.attrs.get("groups", 1) == 1)


def _padded(graph: Graph, value: Value | None, axis: int, missing: int) -> Value | None:
    """A constant with more zeros at the end of an axis."""
    if value is None:
        return None
    constant = graph.constants[value]
    shape = list(constant.shape)
    shape[axis] = missing
    zeros = torch.zeros(shape, dtype=constant.dtype)
    return graph.add_constant(f"{value.name}.padded", torch.cat([constant, zeros], axis))
