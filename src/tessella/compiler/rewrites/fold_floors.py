"""A factor and a sum behind a ReLU become a change of the layer's weights, and the ReLU's floor.

``s · relu(W·y + b) + t`` is ``max(sW·y + sb + t, t)`` for a factor above zero. D-FINE's backbone
has them behind every convolution, each a step that read and wrote the whole map. Done for
convolutions whose kernels know a floor: on a CPU in float32; on a GPU with Hopper's products in
16 bits, and on quantized values, where the layer's own factors take it and
``fuse_requantization`` then finds a layer whose result is only rounded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from tessella.compiler.fitting import has_kernel
from tessella.core.architectures import has
from tessella.core.dtype import QUANTIZED, SIXTEEN_BIT
from tessella.graph.graph import Graph, Node, Value

LARGEST = 2.0**32  # factor, 1 / factor and term: weights stay far from float32's ends


def apply(graph: Graph, target: str) -> int:
    """Fold each factor and sum that alone read an activated layer; returns how many layers."""
    floats = {"cpu": ("float32",)}.get(target, SIXTEEN_BIT if has(target, "wgmma") else ())
    layers = [node for node in graph.nodes if _is_plain(graph, node, floats)]
    return sum(_fold(graph, layer, target) for layer in layers)


def _is_plain(graph: Graph, layer: Node, floats: Collection[str]) -> bool:
    """Whether a layer that makes such numbers ends with a ReLU, and adds nothing but a bias."""
    return (
        layer.op == "conv2d"
        and not {"alpha", "beta", "gamma", "floor"} & {*layer.attrs}
        and layer.has_only("input", "weight", "bias", "scale")
        and all(v is None or v in graph.constants for v in layer.inputs[1:])
        and layer.output.dtype in floats
        and layer["input"].dtype in (QUANTIZED if layer.get("scale") else (layer.output.dtype,))
    )


@dataclass(frozen=True)
class Behind:
    """What stands behind a layer's ReLU: ``plus`` adds ``term`` to ``factor`` times its result."""

    times: Node
    plus: Node
    factor: float
    term: float


def behind(graph: Graph, layer: Node) -> Behind | None:
    """A factor above zero and a sum that alone read a layer's result, if there are."""
    times = graph.only_reader(layer.output) if layer.attrs.get("activation") == "relu" else None
    plus = graph.only_reader(times.output) if times is not None and times.op == "mul" else None
    if times is None or plus is None or plus.op != "add" or plus.attrs.get("alpha", 1) != 1:
        return None
    factor, term = _number(graph, times, layer.output), _number(graph, plus, times.output)
    if factor is None or term is None:
        return None
    fits = 1 / LARGEST <= factor <= LARGEST and abs(term) <= LARGEST
    return Behind(times, plus, factor, term) if fits else None


def _fold(graph: Graph, layer: Node, target: str) -> bool:
    if (found := behind(graph, layer)) is None:
        return False
    factor, term, plus = found.factor, found.term, found.plus
    floored = Node(layer.op, layer.inputs, plus.outputs, {**layer.attrs, "floor": term})
    if not has_kernel(floored, target, graph.constants):
        return False
    bears = "weight" if layer.get("scale") is None else "scale"
    weight, bias = graph.constants[layer[bears]], graph.constant(layer.get("bias"))
    bias = torch.zeros(len(weight), dtype=weight.dtype) if bias is None else bias
    name, scaled = layer[bears].name, (weight.double() * factor).to(weight.dtype)
    risen = (bias.double() * factor + term).to(bias.dtype)
    layer.rebind(bias=graph.add_constant(f"{name}.risen_bias", risen))
    layer.rebind(**{bears: graph.add_constant(f"{name}.scaled", scaled)})
    layer.attrs["floor"] = term
    layer.outputs = plus.outputs
    graph.nodes.remove(found.times)
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
