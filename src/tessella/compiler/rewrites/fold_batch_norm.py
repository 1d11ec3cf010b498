"""Batch norm folded into the convolution or linear layer before it: a pass over memory less."""

from __future__ import annotations

import torch

from tessella.graph.graph import Graph, Node, Value

FOLDS_INTO = ("conv1d", "conv2d", "conv3d", "linear")


def apply(graph: Graph) -> int:
    """Fold each batch norm that directly follows a layer with constant weights; returns how many.

    ``γ · (W·x + b − μ) / σ + β`` is ``(γ/σ · W) · x + (γ/σ · (b − μ) + β)``. The constants are new
    ones: the old weight may have other users.
    """
    folded = 0
    for norm in [n for n in graph.nodes if n.op == "batch_norm"]:
        layer = graph.producer(norm["input"])
        if layer is None or not _foldable(graph, layer, norm):
            continue
        weight, bias = _folded(graph, layer, norm)
        name = layer["weight"].name
        layer.rebind(
            weight=graph.add_constant(f"{name}.folded", weight),
            bias=graph.add_constant(f"{name}.folded_bias", bias),
        )
        layer.outputs = norm.outputs
        graph.nodes.remove(norm)
        folded += 1
    return folded


def _foldable(graph: Graph, layer: Node, norm: Node) -> bool:
    if layer.op not in FOLDS_INTO or graph.only_reader(layer.output) is not norm:
        return False
    if layer.op == "linear" and len(layer.output.shape) != 2:
        return False  # batch norm works on axis 1, which is not the features here
    needed = [layer["weight"], layer.get("bias"), *norm.inputs[1:]]
    plain = layer.attrs.get("activation") is None and layer.has_only("input", "weight", "bias")
    return plain and all(v is None or v in graph.constants for v in needed)


def _folded(graph: Graph, layer: Node, norm: Node) -> tuple[torch.Tensor, torch.Tensor]:
    """The new weight and bias, computed in float64, in the weight's element type."""
    weight = graph.constants[layer["weight"]]
    channels = weight.shape[0]

    def constant(value: Value | None, otherwise: float) -> torch.Tensor:
        tensor = graph.constant(value)
        return torch.full((channels,), otherwise).double() if tensor is None else tensor.double()

    mean, variance = constant(norm["running_mean"], 0.0), constant(norm["running_var"], 1.0)
    gamma, beta = constant(norm.get("weight"), 1.0), constant(norm.get("bias"), 0.0)
    bias = constant(layer.get("bias"), 0.0)
    scale = gamma / torch.sqrt(variance + norm.attrs["eps"])
    scaled = weight.double() * scale.reshape(-1, *[1] * (weight.ndim - 1))
    return scaled.to(weight.dtype), ((bias - mean) * scale + beta).to(weight.dtype)
