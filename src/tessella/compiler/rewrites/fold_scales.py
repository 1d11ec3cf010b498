"""Layer scale: a factor for each channel, before a sum, becomes a change of the layer's weights.

``x + γ · (W·y + b)`` is ``x + (γW)·y + γb``. Only before a sum, in which a weight that float16
cannot tell from zero is worth as little as it was.
"""

from __future__ import annotations

import torch

from tessella.compiler.rewrites.fold_batch_norm import FOLDS_INTO
from tessella.graph.graph import Graph, Node, Value


def apply(graph: Graph) -> int:
    """Fold each factor that follows a layer with constant weights; returns how many."""
    folded = 0
    for node in [n for n in graph.nodes if n.op == "mul" and n.attrs["scalar"] is None]:
        reader = graph.only_reader(node.output)
        if reader is None or reader.op != "add":
            continue
        result = node.output
        left, right = node["input"], node["other"]
        for value, other in ((left, right), (right, left)):
            alike = (value.shape, value.dtype) == (result.shape, result.dtype)
            found = _layer(graph, node, value) if alike and other in graph.constants else None
            factor = None if found is None else _factor(graph.constants[other], node, found[1])
            last = graph.producer(value)
            if found is not None and factor is not None and last is not None:
                scale(graph, found[0], factor)
                last.outputs = node.outputs
                graph.nodes.remove(node)
                folded += 1
                break
    return folded


def _layer(graph: Graph, node: Node, value: Value) -> tuple[Node, int] | None:
    """The layer that makes what ``node`` scales, behind permutes, and the axis of its channels."""
    turns = []
    while (maker := graph.producer(value)) is not None and graph.only_reader(value) is node:
        if maker.op == "permute":
            turns.append([d % len(maker.output.shape) for d in maker.attrs["dims"]])
            node, value = maker, maker["input"]
            continue
        if maker.op not in FOLDS_INTO or maker.attrs.get("activation") is not None:
            return None
        if not maker.has_only("input", "weight", "bias"):
            return None
        if not all(v is None or v in graph.constants for v in maker.inputs[1:]):
            return None
        axis = len(maker.output.shape) - 1 if maker.op == "linear" else 1
        for dims in reversed(turns):
            axis = dims.index(axis)
        return maker, axis
    return None


def _factor(constant: torch.Tensor, node: Node, axis: int) -> torch.Tensor | None:
    """The constant as one number for each place on the axis, or one for all; None if it varies
    along other axes.
    """
    rank = len(node.output.shape)
    if constant.ndim > rank or not constant.is_floating_point():
        return None
    shape = (1,) * (rank - constant.ndim) + tuple(constant.shape)
    if any(size != 1 for i, size in enumerate(shape) if i != axis):
        return None
    return constant.double().flatten()


def scale(graph: Graph, layer: Node, factor: torch.Tensor) -> None:
    """Multiply a layer's weight and bias, which are constants, by a factor, or one a channel."""
    weight, bias = graph.constants[layer["weight"]], graph.constant(layer.get("bias"))
    name = layer["weight"].name
    scaled = weight.double() * factor.reshape(-1, *[1] * (weight.ndim - 1))
    if bias is not None:
        made = (bias.double() * factor).to(bias.dtype)
        layer.rebind(bias=graph.add_constant(f"{name}.scaled_bias", made))
    layer.rebind(weight=graph.add_constant(f"{name}.scaled", scaled.to(weight.dtype)))
