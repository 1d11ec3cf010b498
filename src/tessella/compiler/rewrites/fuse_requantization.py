"""Layers whose activated result is only rounded write the quantized values themselves.

``lower_quantization`` takes the result's scale into a quantized layer's own factors, which a
ReLU lets through. Behind a GELU or a SiLU, and for a layer on 16 bits, which has none, it is a
factor of its own, ``gamma``, and only some kernels know it: where none does, as on a CPU, the layer
writes floating numbers and a step rounds them.

A network's first layer has too few channels for int8, and a pooling often stands before the
rounding. As rounding keeps the order, the largest of quantized values is the quantized largest: the
layer writes quantized values, and the pooling reads them, half of the bytes each, or a quarter on a
CPU with AVX2, where the layer is in float32::

    quantize(max_pool2d(conv2d(x))) → max_pool2d(conv2d(x, gamma=1 / scale, dtype="int8"))

So does attention on 16 bits, whose heads are rows behind a permute and a reshape that move nothing.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from tessella.compiler.fitting import has_kernel, is_plain_sixteen_bit, loses_none
from tessella.compiler.layers import LAYERS
from tessella.compiler.precision import PICTURE_CHANNELS
from tessella.compiler.rewrites import pad_channels
from tessella.compiler.rewrites.lower_quantization import Scheme, scheme_of
from tessella.core.architectures import is_gpu
from tessella.core.dtype import QUANTIZED
from tessella.graph.graph import Graph, Node, Value
from tessella.graph.value import fixed
from tessella.kernels.shared import onednn
from tessella.operations.epilogue import is_gamma

ATTENTION = "scaled_dot_product_attention"


def apply(graph: Graph, target: str) -> int:
    """Move quantization into the layers before it; returns how many layers quantize their result
    now.
    """
    fused = 0
    for node in [n for n in graph.nodes if n.op in (*LAYERS, ATTENTION)]:
        between, rounds = _until_rounded(graph, node)
        scheme = scheme_of(graph, rounds, "quantize")
        if rounds is None or scheme is None or not _takes(node, scheme):
            continue
        if scheme.dtype != "int8" and "max_pool2d" in {n.op for n in between}:
            continue  # there is no maximum of fp8
        if not is_gamma(gamma := 1.0 / scheme.factor):
            continue
        wide = [n.output for n in (node, *between)][:-1]
        names = [graph.fresh_name(f"{v.name}.{scheme.dtype}") for v in wide]
        made = [Value(n, scheme.dtype, v.shape) for n, v in zip(names, wide, strict=True)]
        made.append(rounds.output)
        rounding = Node(
            op=node.op,
            inputs=node.inputs,
            outputs=(made[0],),
            attrs={**node.attrs, "dtype": scheme.dtype, "gamma": gamma},
            layer=node.layer,
        )
        if _has_kernel(graph, node, rounding, target):
            graph.nodes.replace(node, rounding)
            for move, (read, written) in zip(between, pairwise(made), strict=True):
                move.inputs, move.outputs = (read,), (written,)
            graph.nodes.remove(rounds)
            fused += 1
    if fused and is_gpu(target):
        pad_channels.apply(graph)  # what lies between two of these layers is quantized only now
    return fused


def _until_rounded(graph: Graph, node: Node) -> tuple[list[Node], Node | None]:
    """The moves or poolings that alone read a result, in order; and what reads the last one."""
    moves = ("permute", "reshape") if node.op == ATTENTION else ("max_pool2d",)
    between: list[Node] = []
    reader = graph.only_reader(node.output)
    while reader is not None and reader.op in moves:
        between.append(reader)
        reader = graph.only_reader(reader.output)
    return between, reader


def _takes(node: Node, scheme: Scheme) -> bool:
    """Whether one factor behind the layer's activation quantizes so: zero must stay zero.

    Fast kernels read no residual in floating numbers beside quantized values.
    """
    return (
        (
            node.op == ATTENTION
            or _reads(node, scheme)
            or is_plain_sixteen_bit(node)
            or _reads_an_image(node)
        )
        and scheme.scale.numel() == 1
        and scheme.zero == 0
        and scheme.dtype in QUANTIZED
        and node.attrs.get("gamma", 1.0) == 1.0
    )


def _reads(node: Node, scheme: Scheme) -> bool:
    """Whether a layer multiplies values of the same quantized type, and adds no residual."""
    if node.get("scale") is None or node.get("residual") is not None:
        return False
    return node["input"].dtype == scheme.dtype


def _reads_an_image(node: Node) -> bool:
    """Whether a layer in float32 has too few channels for int8, and for other kernels than a CPU's
    one that rounds its result.
    """
    types = {node["input"].dtype, node.output.dtype}
    return (
        node.op == "conv2d"
        and types == {"float32"}
        and node.attrs.get("groups", 1) == 1
        and fixed(node["weight"].shape[1]) < PICTURE_CHANNELS
        and "dtype" not in node.attrs
        and node.has_only("input", "weight", "bias")
    )


def _has_kernel(graph: Graph, node: Node, rounding: Node, target: str) -> bool:
    """Whether a layer that quantizes has kernels, and, if it had 16 bits, loses none of those it
    had.
    """
    if node.op == ATTENTION or is_plain_sixteen_bit(node):
        return loses_none(node, rounding, target, graph.constants)
    weight = graph.constant(node["weight"])
    if target == "cpu" and weight is not None and weight.dtype == torch.int8:
        # beyond it sums of two products leave 16 bits: oneDNN alone multiplies, and does not round
        is_safe = not onednn.narrow_sums() or int(weight.int().abs().max()) <= onednn.NARROW
        return is_safe and has_kernel(rounding, target, graph.constants)
    return has_kernel(rounding, target, graph.constants)
