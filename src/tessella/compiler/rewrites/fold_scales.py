"""Layer scale: a factor for each channel, before a sum, becomes a change of the layer's weights.

``x + γ · (W·y + b)`` is ``x + (γW)·y + γb``. Only before a sum, in which a weight that float16
cannot tell from zero is worth as little as it was.
"""

from __future__ import annotations

import torch

from tessella.compiler.rewrites.fold_batch_norm import FOLDS_INTO
from tessella.graph.graph import Graph, Node


def apply(graph: Graph) -> int:
    """Fold each factor that follows a layer with constant weights; returns how many."""
    folded = 0
    for node in [n for n in graph.nodes if n.op == "mul" and n.attrs["scalar"] is None]:
        reader = graph.only_reader(node.output)
        if reader is None or reader.op != "add":
            continue
        result = node.output
        for value, other in (node.inputs, node.inputs[::-1]):
            alike = (value.shape, value.dtype) == (result.shape, result.dtype)
            found = _layer(graph, node, value) if alike and other in graph.constants else None
            factor = None if found is None else _factor(graph.constants[other], node, found[1])
            if found is not None and factor is not None:
                _scale(graph, found[0], factor)
                graph.producer(value).outputs = node.outputs
                graph.nodes.remove(node)
                folded += 1
                break
    return folded


def _layer(graph: Graph, node: Node, value: object) -> tuple[Node, int] | None:
    """The layer that makes what ``node`` scales, behind permutes, and the axis of its channels."""
    turns = []
    while (maker := graph.producer(value)) is not None and graph.only_reader(value) is node:
        if maker.op == "permute":
            turns.append([d % len(maker.output.shape) for d in maker.attrs["dims"]])
            node, value = maker, maker.inputs[0]
            continue
        plain = maker.op in FOLDS_INTO and maker.attrs.get("activation") is None
        needed = [v for v in maker.inputs[1:3] if v is not None]
        if not plain or any(v is not None for v in maker.inputs[3:]):
            return None
        if not all(v in graph.constants for v in needed):
            return None
        axis = len(maker.output.shape) - 1 if maker.op == "linear" else 1
        for dims in reversed(turns):
            axis = dims.index(axis)
        return maker, axis
    return None


def _factor(constant: torch.Tensor, node: Node, axis: int) -> torch.Tensor | None:
    """A number for each place on the axis, or one for all; None if others differ too."""
    rank = len(node.output.shape)
    if constant.ndim > rank or not constant.is_floating_point():
        return None
    shape = (1,) * (rank - constant.ndim) + tuple(constant.shape)
    if any(size != 1 for i, size in enumerate(shape) if i != axis):
        return None
    return constant.double().flatten()


def _scale(graph: Graph, layer: Node, factor: torch.Tensor) -> None:
    weight, bias = (graph.constant(v) for v in layer.inputs[1:3])
    name = layer.inputs[1].name
    scaled = weight.double() * factor.reshape(-1, *[1] * (weight.ndim - 1))
    scaled_bias = None
    if bias is not None:
        made = (bias.double() * factor).to(bias.dtype)
        scaled_bias = graph.add_constant(f"{name}.scaled_bias", made)
    layer.inputs = (
        layer.inputs[0],
        graph.add_constant(f"{name}.scaled", scaled.to(weight.dtype)),
        scaled_bias,
        *layer.inputs[3:],
    )
