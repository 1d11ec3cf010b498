"""Which kernels of a target would carry out a node, before there is a program to measure.

Passes ask before they make a layer that only some kernels know: one that rounds behind its
activation, or writes another type than it reads.
"""

from __future__ import annotations

from collections.abc import Collection

from tessella.compiler.precision import FEWEST_CHANNELS
from tessella.compiler.problems import problem_of
from tessella.core.architectures import has
from tessella.core.dtype import SIXTEEN_BIT
from tessella.graph.graph import Node, Value, shape_at
from tessella.graph.value import fixed
from tessella.kernels import catalog
from tessella.kernels.catalog import Kernel
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import Format, TensorMeta

# to ask with: more pixels than a kernel of few rows takes, and a size that few axes have; and one
MANY, ONE = 176, 1


def is_plain_sixteen_bit(layer: Node) -> bool:
    """Whether a layer writes 16 bits because it reads them, and adds nothing."""
    types = {layer["input"].dtype, layer.output.dtype}
    return (
        len(types) == 1
        and types <= set(SIXTEEN_BIT)
        and "dtype" not in layer.attrs
        and layer.has_only("input", "weight", "bias")
    )


def has_kernel(node: Node, target: str, constants: Collection[Value]) -> bool:
    """Whether a kernel that is not the last resort carries it out, in one of the formats."""
    return bool(_takers(node, target, constants, MANY))


def loses_none(before: Node, after: Node, target: str, constants: Collection[Value]) -> bool:
    """Whether a layer may become another: each kernel written for the target stays, and some do.

    What is written for a target is what a network's time is made of; libraries write no other type
    than they read. One image is asked for too: there are kernels for few rows only. A matrix
    product that none takes, as its rows are no multiple of 16 bytes, has portable kernels. So has a
    convolution whose filters read one channel each: on a Hopper GPU the portable one wins there
    (7×7, 56²: 119 µs, cuDNN 274).
    """
    if not has_kernel(after, target, constants):
        return False
    took, takes = (
        {
            (batch, row.id)
            for batch in (MANY, ONE)
            for row in _takers(node, target, constants, batch)
            if _written_for(row, node, target)
        }
        for node in (before, after)
    )
    by_channel = after.attrs.get("groups", 1) > 1 and fixed(after["weight"].shape[1]) == 1
    portable = after.op == "linear" or (by_channel and has(target, "wgmma"))
    return took <= takes and (bool(takes) or portable)


def _written_for(row: Kernel, node: Node, target: str) -> bool:
    """Whether a kernel is written for this target, and for such a layer.

    The direct convolution takes what fits its registers, but is meant for images of few channels.
    """
    if not row.id.endswith(f".{target.replace('_', '')}"):
        return False
    return row.algorithm != "direct" or fixed(node["weight"].shape[1]) < FEWEST_CHANNELS


def _takers(
    node: Node, target: str, constants: Collection[Value], batch: int
) -> tuple[Kernel, ...]:
    formats: tuple[Format, ...] = ("channels_last", "contiguous")
    if node.op == "linear":
        formats = ("contiguous",)
    problems = [_problem(node, format, constants, batch) for format in formats]
    return tuple(
        row
        for row in catalog.candidates(node.op, target)
        if not (row.last_resort or row.unproven or row.sparse)
        and any(row.refusal(problem) is None for problem in problems)
    )


def _problem(node: Node, format: Format, constants: Collection[Value], batch: int) -> Problem:
    def meta(value: Value) -> TensorMeta:
        shape = shape_at(value.shape, batch)
        kept = format if len(shape) == 4 and value not in constants else "contiguous"
        return TensorMeta(shape=shape, dtype=value.dtype, format=kept)

    return problem_of(node, meta, constants)
