"""Layers that read one value become one layer with all their channels, whose result is split.

One large product fills a machine better than several small ones (GoogLeNet's 1×1 branches, separate
Q, K and V), but the parts are views with gaps, which some readers must copy. So this is no rewrite
that always pays: the pipeline measures the network with and without it.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from tessella.compiler.rewrites.fuse_epilogue import LAYERS
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
    if node.op not in LAYERS or node.inputs[3] is not None or node.attrs.get("groups", 1) != 1:
        return None
    x, weight, bias, _, *scale = node.inputs
    if x in graph.constants or weight not in graph.constants or len(weight.shape) < 2:
        return None
    if any(v not in graph.constants or v.shape != weight.shape[:1] for v in scale):
        return None
    (dtype,) = {v.dtype for v in scale} or {weight.dtype}
    if bias is not None and (bias not in graph.constants or bias.dtype != dtype):
        return None
    attrs = tuple(sorted((name, _hashable(value)) for name, value in node.attrs.items()))
    return (node.op, x, weight.shape[1:], weight.dtype, dtype, node.output.dtype, attrs)


def _hashable(value: object) -> Hashable:
    return tuple(value) if isinstance(value, list) else value


def _without_shared_weights(graph: Graph, group: list[Node]) -> list[Node]:
    together = set(group)
    return [n for n in group if together.issuperset(graph.users(n.inputs[1]))]


def _fuse(graph: Graph, group: list[Node]) -> None:
    """The layer takes the first one's place, where their input is there; nothing else is read."""
    first = group[0]
    weights = [graph.constants[n.inputs[1]] for n in group]
    sizes = tuple(len(w) for w in weights)
    # with their number: programs that are raced share constants by name, and their groups differ
    name = f"{first.inputs[1].name}.{len(group)}_siblings"
    weight = graph.add_constant(name, torch.cat(weights))
    bias, scale = None, ()
    like = weights[0]
    if len(first.inputs) > 4:  # codes: a factor for each channel
        scales = [graph.constants[n.inputs[4]] for n in group]
        like, scale = scales[0], (graph.add_constant(f"{weight.name}.factor", torch.cat(scales)),)
    if any(n.inputs[2] is not None for n in group):
        parts = [
            like.new_zeros(size) if n.inputs[2] is None else graph.constants[n.inputs[2]]
            for n, size in zip(group, sizes, strict=True)
        ]
        bias = graph.add_constant(f"{weight.name}.bias", torch.cat(parts))
    old = first.output
    dim = 1 if first.op == "conv2d" else len(old.shape) - 1
    shape = (*old.shape[:dim], sum(sizes), *old.shape[dim + 1 :])
    made = Value(graph.fresh_name(f"{old.name}.siblings"), old.dtype, shape)
    layer = Node(
        op=first.op,
        inputs=(first.inputs[0], weight, bias, None, *scale),
        outputs=(made,),
        attrs=dict(first.attrs),
        layer=first.layer,
    )
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
