"""A factor and a sum behind a ReLU become a change of the layer's weights, and the ReLU's floor.

``s · relu(W·y + b) + t`` is ``max(sW·y + sb + t, t)`` for a factor above zero. D-FINE's backbone
has them behind every convolution, each a step that read and wrote the whole map. Done in float32,
for convolutions whose kernels know a floor.
"""

from __future__ import annotations

import torch

from tessella.compiler.fitting import has_kernel
from tessella.compiler.rewrites.fold_scales import scale
from tessella.graph.graph import Graph, Node, Value

LARGEST = 2.0**32  # factor, 1 / factor and term: weights stay far from float32's ends


def apply(graph: Graph, target: str) -> int:
    """Fold each factor and sum that alone read an activated layer; returns how many layers."""
    return sum(_fold(graph, layer, target) for layer in graph.nodes if _is_plain(graph, layer))


def _is_plain(graph: Graph, layer: Node) -> bool:
    """Whether a layer in float32 ends with a ReLU, and adds nothing but a bias."""
    return (
        layer.op == "conv2d"
        and layer.attrs.get("activation") == "relu"
        and not {"alpha", "beta", "gamma", "floor", "dtype"} & {*layer.attrs}
        and layer.has_only("input", "weight", "bias")
        and all(v is None or v in graph.constants for v in layer.inputs[1:])
        and {v.dtype for v in (*layer.inputs, layer.output) if v is not None} == {"float32"}
    )


def _fold(graph: Graph, layer: Node, target: str) -> bool:
    times = graph.only_reader(layer.output)
    if times is None or times.op != "mul":
        return False
    plus = graph.only_reader(times.output)
    if plus is None or plus.op != "add":
        return False
    factor, term = _number(graph, times, layer.output), _number(graph, plus, times.output)
    if factor is None or term is None or plus.attrs.get("alpha", 1) != 1:
        return False
    if not 1 / LARGEST <= factor <= LARGEST or not abs(term) <= LARGEST:
        return False
    floored = Node(layer.op, layer.inputs, plus.outputs, {**layer.attrs, "floor": term})
    if not has_kernel(floored, target, graph.constants):
        return False
    scale(graph, layer, torch.tensor(factor, dtype=torch.float64))
    name, bias = layer["weight"].name, graph.constant(layer.get("bias"))
    channels = graph.constants[layer["weight"]].shape[0]
    bias = torch.zeros(channels) if bias is None else bias
    layer.rebind(bias=graph.add_constant(f"{name}.risen_bias", (bias.double() + term).float()))
    layer.attrs["floor"] = term
    layer.outputs = plus.outputs
    graph.nodes.remove(times)
    graph.nodes.remove(plus)
    return True


def _number(graph: Graph, node: Node, value: Value) -> float | None:
    """What ``node`` combines a value with, where that is one number and the shape stays."""
    if node.output.shape != value.shape or node.output.dtype != value.dtype:
        return None
    if (scalar := node.attrs.get("scalar")) is not None:
        return float(scalar)
    left, right = node["input"], node.get("other")
    constant = graph.constant(right if left is value else left)
    return float(constant) if constant is not None and constant.numel() == 1 else None
