"""Nodes of a graph as problems for kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tessella.core.dtype import Math
from tessella.graph.graph import Node, Value
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta


def problem_of(
    node: Node,
    meta: Callable[[Value], TensorMeta],
    constants: Collection[Value],
    math: Math = "ieee",
) -> Problem:
    """What kernels are asked to do for a node.

    Args:
        meta: the shape, element type and format of each value.
        constants: the values that are known when the plan is built.
    """
    return Problem(
        op=node.op,
        inputs=tuple(None if v is None else meta(v) for v in node.inputs),
        outputs=tuple(meta(v) for v in node.outputs),
        attrs=node.attrs,
        constant=tuple(i for i, v in enumerate(node.inputs) if v in constants),
        math=math,
    )
