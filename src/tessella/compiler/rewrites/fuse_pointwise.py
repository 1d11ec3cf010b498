"""Element-wise operations, and those along rows, as one step: each passes memory once.

What no layer's epilogue took: sums with broadcasts, activations, casts, batch norms after a
concatenation, softmax, layer norm and pooling with what leads to them and what follows, and on a
GPU the rounding to int8 and fp8 between them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from tessella.compiler.problems import problem_of
from tessella.graph.graph import Graph, Node, Value, shape_at
from tessella.kernels import catalog
from tessella.kernels.pointwise.walk import MAX_OUTPUTS, refusal
from tessella.operations.pointwise_program import (
    ELEMENTWISE,
    MAX_INPUTS,
    MAX_INSTRUCTIONS,
    POOLS,
    QUANTIZATION,
    ROWS,
    Instruction,
    has_pool,
)
from tessella.operations.tensor_meta import TensorMeta

POOLING = "pointwise.windows"  # the kernel of programs with a pooling
BATCH = 11  # to ask the kernel with: a size that few other axes have


# torch's norms and reductions make their own memory, and a step's result has its place already:
# on a CPU, add + layer norm (ViT, 8 images) as one step took 1.4 times as long as apart
ON_CPU = ELEMENTWISE | {"softmax", "log_softmax"}


def apply(graph: Graph, target: str = "sm_90") -> int:
    """Fuse what one kernel can carry out; returns how many nodes went into another one.

    A group grows backwards from its last node, as long as the generated kernel takes the whole, by
    nodes whose result the group reads and nobody else; or others too, after the last node: then it
    is another result (a sum that a norm reads, and the next residual). On a CPU a group has one.
    """
    finder = _Finder(graph, target)
    fused = 0
    for root in reversed(list(graph.nodes)):
        group = finder.group(root)
        if len(group) > 1:
            graph.nodes.replace(root, finder.as_node(group))
            for node in group[:-1]:
                graph.nodes.remove(node)
            fused += len(group) - 1
    read = {v for n in graph.nodes for v in n.inputs} | set(graph.outputs)
    graph.constants = {v: t for v, t in graph.constants.items() if v in read}
    return fused


class _Finder:
    """Groups of nodes of a graph as it was; a node is in one group at most."""

    def __init__(self, graph: Graph, target: str) -> None:
        self._graph = graph
        self._fusible = ON_CPU if target == "cpu" else ELEMENTWISE | ROWS | QUANTIZATION | POOLS
        self._most_results = 1 if target == "cpu" else MAX_OUTPUTS
        self._users = {value: graph.users(value) for value in graph.values()}
        self._producer = {value: node for node in graph.nodes for value in node.outputs}
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._taken: set[Node] = set()

    def group(self, root: Node) -> list[Node]:
        """What becomes one node with ``root`` as its last, in order; empty if root cannot."""
        if root in self._taken or not self._fits([root]):
            return []
        group = {root}
        rejected: set[Node] = set()
        while (node := self._next(group, rejected)) is not None:
            if self._fits(self._sorted(group | {node})):
                group.add(node)
                rejected.clear()  # with it, others may fit
            else:
                rejected.add(node)
        self._taken |= group
        return self._sorted(group)

    def _next(self, group: set[Node], rejected: set[Node]) -> Node | None:
        """The latest producer of what the group reads, and others only after the group."""
        last = max(map(self._order.__getitem__, group))
        found = {
            producer
            for node in group
            for value in node.inputs
            if value is not None
            and (producer := self._producer.get(value)) is not None
            and producer not in self._taken
            and self._readers_before(value, last) <= group
        }
        return max(found - group - rejected, key=self._order.__getitem__, default=None)

    def _readers_before(self, value: Value, last: int) -> set[Node]:
        """Those that read a value up to a place, but no more than a group could have."""
        first = self._users[value][: MAX_INSTRUCTIONS + 1]
        return {node for node in first if self._order[node] <= last}

    def _sorted(self, nodes: Collection[Node]) -> list[Node]:
        return sorted(nodes, key=self._order.__getitem__)

    def _fits(self, nodes: Sequence[Node]) -> bool:
        """Whether the generated kernel can carry out all nodes as one."""
        if any(n.op not in self._fusible for n in nodes):
            return False
        node = self.as_node(nodes)
        if len(node.inputs) > MAX_INPUTS or len(node.outputs) > self._most_results:
            return False
        pools = has_pool(node.attrs["program"])
        refuses = catalog.kernel(POOLING).refusal if pools else refusal
        return refuses(problem_of(node, _meta, self._graph.constants)) is None

    def as_node(self, group: Sequence[Node]) -> Node:
        """The nodes, in order, as one ``pointwise``; its first result is the last node's."""
        last = group[-1].output
        also = [
            node.output
            for node in group[:-1]
            if node.output in self._graph.outputs or set(self._users[node.output]) - set(group)
        ]
        return as_node(self._graph, group, (last, *also))


def _meta(value: Value) -> TensorMeta:
    return TensorMeta(shape=shape_at(value.shape, BATCH), dtype=value.dtype)


def as_node(graph: Graph, group: Sequence[Node], outputs: tuple[Value, ...]) -> Node:
    """The nodes as one ``pointwise`` that makes these of their results."""
    made = {node.output for node in group}
    parts = [_with_number(graph, node) for node in group]
    read = [v for reads, _ in parts for v in reads if v is not None and v not in made]
    inputs = tuple(dict.fromkeys(read))
    number = {v: i for i, v in enumerate((*inputs, *(n.output for n in group)))}
    program = tuple(
        Instruction(
            op=node.op,
            reads=tuple(None if v is None else number[v] for v in reads),
            attrs=attrs,
        ).data()
        for node, (reads, attrs) in zip(group, parts, strict=True)
    )
    return Node(
        op="pointwise",
        inputs=inputs,
        outputs=outputs,
        attrs={"program": program, "results": tuple(number[v] for v in outputs)},
        layer=group[-1].layer,
    )


def _with_number(graph: Graph, node: Node) -> tuple[tuple[Value | None, ...], dict[str, Any]]:
    """A node's inputs and attributes, with a constant number on the right as ``scalar``."""
    attrs = dict(node.attrs)
    constant = graph.constant(node.get("other")) if "scalar" in attrs else None
    if constant is None or constant.ndim or not constant.is_floating_point():
        return node.inputs, attrs
    number = float(constant)
    if not math.isfinite(number):
        return node.inputs, attrs
    return (node["input"], None), attrs | {"scalar": number}
