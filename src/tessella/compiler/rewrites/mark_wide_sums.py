"""Layers of int8 whose products leave sums of 16 bits say so, where AVX2 adds in such.

Weights of 8 bits come from a calibration for another processor, from a file, or from a training
with its roundings. The mark is a part of what is measured: of two equal layers AVX2's machine code
may take the one and refuse the other.
"""

from __future__ import annotations

import torch

from tessella.device.x86 import code
from tessella.graph.graph import Graph
from tessella.kernels.shared.x86_int8 import sums_are_wide

LAYERS = ("conv2d", "linear")


def apply(graph: Graph) -> int:
    """Mark what AVX2 cannot add in 16 bits; returns how many layers were marked."""
    if code.refusal("avx2") is not None:
        return 0
    marked = 0
    for node in graph.nodes:
        weight = graph.constant(node["weight"]) if node.op in LAYERS else None
        if weight is None or weight.dtype != torch.int8 or node["input"].dtype != "int8":
            continue
        if sums_are_wide(weight, signed=not node.attrs.get("non_negative")):
            node.attrs = {**node.attrs, "wide_sums": True}
            marked += 1
    return marked
