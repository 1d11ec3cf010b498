"""Layers that read one value become one layer with all their channels, whose result is split.

One large product fills a machine better than several small ones (GoogLeNet's 1×1 branches, separate
Q, K and V), but the parts are views with gaps, which some readers must copy. So this is no rewrite
that always pays: the pipeline measures the network with and without it.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from tessella.compiler.layers import LAYERS
from tessella.graph.graph import Graph, Node, Value


def apply(graph: Graph, *, joined: bool = True) -> int:
    """Fuse every group of siblings; returns how many layers went into another one.

    Siblings read the same value with constant weights of the same shape but for their channels,
    the same geometry and the same activation, and add no residual; on int8 or fp8 each channel
    keeps its factor, so their results may have scales of their own. A weight that some other node
    reads too stays where it is: it would be stored twice.

    Args:
        joined: also layers whose results only go into a concatenation, which some kernels can
            write right there (``join_in_place``), and a split of a common result must copy.
    """
    groups: dict[Hashable, list[Node]] = {}
    for node in graph.nodes:
        if not joined and {user.op for v in node.outputs for user in graph.users(v)} == {"cat"}:
            continue
        if (kind := _kind(graph, node)) is not None:
            groups.setdefault(kind, []).append(node)
    fused = 0
    for group in groups.values():
        group = _without_shared_weights(graph, group)
        if len(group) > 1:
            _fuse(graph, group)
            fused += len(group) - 1
    return fused


def _kind(graph: Graph, node: Node) -> Hashable | None:
    """What siblings have in common; None if the node cannot be one."""
    if node.op not in LAYERS or node.get("residual") or node.attrs.get("groups", 1) != 1:
        return None
    x, weight, bias, scale = node["input"], node["weight"], node.get("bias"), node.get("scale")
    if x in graph.constants or weight not in graph.constants or len(weight.shape) < 2:
        return None
    if scale is not None and (scale not in graph.constants or scale.shape != weight.shape[:1]):
        return None
    dtype = (scale or weight).dtype
    if bias is not None and (bias not in graph.constants or bias.dtype != dtype):
        return None
    attrs = tuple(sorted((name, _hashable(value)) for name, value in node.attrs.items()))
    return (node.op, x, weight.shape[1:], weight.dtype, dtype, node.output.dtype, attrs)


def _hashable(value: object) -> Hashable:
    return tuple(value) if isinstance(value, list) else value


def _without_shared_weights(graph: Graph, group: list[Node]) -> list[Node]:
    together = set(group)
    return [n for n in group if together.issuperset(graph.users(n["weight"]))]


def _fuse(graph: Graph, group: list[Node]) -> None:
    """The layer takes the first one's place, where their input is there; nothing else is read."""
    first = group[0]
    weights = [graph.constants[n["weight"]] for n in group]
    sizes = tuple(len(w) for w in weights)
    # with their number: programs that are raced share constants by name, and their groups differ
    name = f"{first['weight'].name}.{len(group)}_siblings"
    weight = graph.add_constant(name, torch.cat(weights))
    old, like = first.output, weights[0]
    dim = 1 if first.op == "conv2d" else len(old.shape) - 1
    shape = (*old.shape[:dim], sum(sizes), *old.shape[dim + 1 :])
    made = Value(graph.fresh_name(f"{old.name}.siblings"), old.dtype, shape)
    layer = Node(first.op, first.inputs, (made,), dict(first.attrs), first.layer)
    layer.rebind(weight=weight)
    if first.get("scale") is not None:  # quantized: a factor for each channel
        scales = [graph.constants[n["scale"]] for n in group]
        layer.rebind(scale=graph.add_constant(f"{weight.name}.factor", torch.cat(scales)))
        like = scales[0]
    biases = [graph.constant(n.get("bias")) for n in group]
    if any(bias is not None for bias in biases):
        parts = [like.new_zeros(s) if b is None else b for b, s in zip(biases, sizes, strict=True)]
        layer.rebind(bias=graph.add_constant(f"{weight.name}.bias", torch.cat(parts)))
    split = Node(
        op="split",
        inputs=(made,),
        outputs=tuple(n.output for n in group),
        attrs={"sizes": sizes, "dim": dim},
        layer=first.layer,
    )
    for node in group[1:]:
        graph.nodes.remove(node)
    graph.nodes.replace(first, layer, split)
