"""Weights that tensor cores multiply as TF32 are rounded to it, once, here.

They read the upper 19 bits of a float32 and cut the rest off, where libraries round: every product
is a little too small, and the error of a deep network grows with its depth. On an H200 results of
our convolutions are too small by 7.0e-4 of themselves with both operands cut, by 3.6e-4 with
rounded weights (torch's: 1e-5).
"""

from __future__ import annotations

import torch

from tessella.compiler.layers import LAYERS
from tessella.graph.graph import Graph

LOST_BITS = 13  # of float32's 23 behind the point, TF32 has 10


def apply(graph: Graph) -> int:
    """Round the constant weights of layers in float32; returns how many were rounded."""
    weights = {
        node["weight"]
        for node in graph.nodes
        if node.op in LAYERS and node["weight"].dtype == "float32"
    }
    read_else = {
        value
        for node in graph.nodes
        for value in node.inputs
        if value in weights and not (node.op in LAYERS and value is node["weight"])
    }
    rounded = 0
    for value in weights - read_else - set(graph.outputs):
        constant = graph.constant(value)
        if constant is not None:
            graph.constants[value] = to_tf32(constant)
            rounded += 1
    return rounded


def to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """The nearest numbers that TF32 has; of two, that further from zero, as ``cvt.rna`` takes."""
    bits = tensor.view(torch.int32)
    finite = tensor.isfinite() & (tensor.abs() < torch.finfo(torch.float32).max * (1 - 2**-11))
    nearest = ((bits + (1 << (LOST_BITS - 1))) >> LOST_BITS) << LOST_BITS
    return torch.where(finite, nearest.view(torch.float32), tensor)
