"""A network without a batch axis as one that takes a batch of one: its plan sees it as a sample.

And samples for a network whose batch is of one size only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tessella.core.spec import DimRange
from tessella.graph.graph import Dim, Graph, Node, Value


def one_sample(graph: Graph, batch: DimRange) -> Graph:
    """``graph``, or the same with an axis of 1 before every input and output.

    It gets the axis where a batch of one is asked for, all its shapes are fixed, and some input or
    output does not begin with 1. Nodes and constants are shared with ``graph``.
    """
    edges = (*graph.inputs, *graph.outputs)
    fixed = not any(isinstance(d, Dim) for v in edges for d in v.shape)
    if batch.max > 1 or not fixed or all(v.shape[:1] == (1,) for v in edges):
        return graph
    inputs = [Value(v.name, v.dtype, (1, *v.shape)) for v in graph.inputs]
    outputs = [Value(v.name, v.dtype, (1, *v.shape)) for v in graph.outputs]
    taken = {v.name for v in graph.values()}
    inner = {v: Value(_fresh(v.name, taken), v.dtype, v.shape) for v in edges}

    def own(value: Value | None) -> Value | None:
        return value if value is None else inner.get(value, value)

    nodes = [_reshaped(wide, inner[v]) for wide, v in zip(inputs, graph.inputs, strict=True)]
    nodes += [
        Node(
            n.op,
            tuple(own(v) for v in n.inputs),
            tuple(inner.get(v, v) for v in n.outputs),
            dict(n.attrs),
            n.layer,
        )
        for n in graph.nodes
    ]
    nodes += [_reshaped(inner[v], wide) for wide, v in zip(outputs, graph.outputs, strict=True)]
    return Graph(graph.name, inputs, outputs, nodes, dict(graph.constants))


def in_its_size(
    graph: Graph, batches: Sequence[Mapping[str, torch.Tensor]]
) -> Sequence[Mapping[str, torch.Tensor]]:
    """Batches as the graph takes them: cut, where it has a fixed batch; a rest is left out."""
    first = graph.inputs[0]
    shape = first.shape
    if not shape or isinstance(shape[0], Dim) or not batches:
        return batches
    size = int(shape[0])
    if any(t.dim() != len(v.shape) for v in graph.inputs for t in [batches[0][v.name]]):
        return batches  # it is refused where it is run, with what it should be
    return [
        {name: t[at : at + size] for name, t in batch.items()}
        for batch in batches
        for at in range(0, len(batch[first.name]) - size + 1, size)
    ]


def _reshaped(source: Value, target: Value) -> Node:
    return Node("reshape", (source,), (target,), {"shape": target.shape})


def _fresh(name: str, taken: set[str]) -> str:
    count = 0
    while (fresh := f"{name}.sample" + (f".{count}" if count else "")) in taken:
        count += 1
    taken.add(fresh)
    return fresh
