"""Convolution or linear + bias + residual + activation as one step: each saves a trip to memory.

An activation behind views of a layer's result is the layer's, too: SegFormer has its GELU behind a
convolution whose pixels have become rows.
"""

from __future__ import annotations

from tessella.compiler.layers import LAYERS
from tessella.graph.graph import Graph, Node, Value
from tessella.operations.epilogue import ACTIVATIONS

VIEWS = frozenset(("permute", "reshape"))


def apply(graph: Graph) -> int:
    """Fuse what follows each layer, as long as something fits; returns how many nodes went.

    A node is fused only if it is the only reader of the layer's result, which is not an output of
    the graph. ``out = activation(layer + bias + residual)``: after an activation nothing more fits.
    """
    fused = 0
    for layer in [n for n in graph.nodes if n.op in LAYERS]:
        while (reader := graph.only_reader(layer.output)) is not None:
            if not (
                _fuse_bias(graph, layer, reader)
                or _fuse_residual(graph, layer, reader)
                or _fuse_activation(layer, reader)
            ):
                break
            # the layer moves to the reader's place, where a residual is there already
            layer.outputs = reader.outputs
            graph.nodes.remove(layer)
            graph.nodes.replace(reader, layer)
            fused += 1
        fused += _fuse_behind_views(graph, layer)
    return fused


def _fuse_behind_views(graph: Graph, layer: Node) -> int:
    """Take the activation that alone reads a view of the layer's result, if it has none yet."""
    value = layer.output
    while (reader := graph.only_reader(value)) is not None and reader.op in VIEWS:
        value = reader.output
    if reader is None or value is layer.output:
        return 0
    if any(made in graph.outputs for made in reader.outputs):
        return 0
    if not _fuse_activation(layer, reader):
        return 0
    graph.replace_uses(reader.output, value)
    graph.nodes.remove(reader)
    return 1


def _other_operand(layer: Node, reader: Node) -> Value | None:
    """What an ``add`` adds to the layer's result, in either order; None if it is no plain sum."""
    if reader.op != "add" or reader.attrs.get("alpha", 1) != 1:
        return None
    left, right = reader["input"], reader.get("other")
    return right if left is layer.output or right is None else left


def _free(layer: Node) -> bool:
    return layer.attrs.get("activation") is None and layer.get("residual") is None


def _fuse_bias(graph: Graph, layer: Node, reader: Node) -> bool:
    """``add`` of one constant a channel, as nn.Conv2d(bias=False) + nn.Parameter gives."""
    added = graph.constant(_other_operand(layer, reader))
    weight, bias = graph.constant(layer["weight"]), layer.get("bias")
    if added is None or weight is None or not _free(layer):
        return False
    channels, axes = weight.shape[0], 2 if layer.op == "conv2d" else 0
    shape = (channels, *[1] * axes)
    if tuple(added.shape) not in (shape, (1, *shape)) or added.dtype != weight.dtype:
        return False
    if len(layer.output.shape) < added.ndim or (bias is not None and bias not in graph.constants):
        return False
    total = added.reshape(channels)
    if bias is not None:
        total = (total.double() + graph.constants[bias].double()).to(total.dtype)
    layer.rebind(bias=graph.add_constant(f"{layer['weight'].name}.bias", total))
    return True


def _fuse_residual(graph: Graph, layer: Node, reader: Node) -> bool:
    other = _other_operand(layer, reader)
    if other is None or other in graph.constants or not _free(layer):
        return False
    if (other.shape, other.dtype) != (layer.output.shape, layer.output.dtype):
        return False  # a broadcast sum is no residual
    layer.rebind(residual=other)
    return True


def _fuse_activation(layer: Node, reader: Node) -> bool:
    name = reader.op
    if name == "gelu" and reader.attrs.get("approximate", "none") == "tanh":
        name = "gelu_tanh"
    if name not in ACTIVATIONS or layer.attrs.get("activation") is not None:
        return False
    layer.attrs["activation"] = name
    return True
