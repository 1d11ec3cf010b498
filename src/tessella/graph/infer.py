"""Shapes without numbers: the references run on torch's meta device.

A shape that follows the batch is found by running at several batch sizes and reading off the line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessella.core.dtype import dtype_name
from tessella.core.errors import CompileError, TessellaError, first_line
from tessella.graph.graph import Dim, Graph, Shape, Value, attrs_at, shape_at
from tessella.operations.shapes import ShapeRules
from tessella.operations.table import operation

# Two sizes give the line, the third shows that it is one. Not 1, where broadcasting hides mistakes.
_BATCHES = (2, 3, 7)

Kind = tuple[str, tuple[int, ...]]  # element type, concrete shape

# What was inferred before: passes ask the same of every node again and again. An operator of a
# user's own may be defined anew.
_known: dict[tuple[Any, ...], tuple[Kind, ...]] = {}
_MOST_KNOWN = 1 << 15


def at_batch(
    op: str, inputs: Sequence[Value | None], attrs: Mapping[str, Any], batch: int
) -> tuple[Kind, ...]:
    """Element type and shape of each output of one operation, for one batch size.

    Raises:
        CompileError: the operation does not accept these inputs; the message has torch's reason.
    """
    kinds = tuple(None if v is None else (v.dtype, shape_at(v.shape, batch)) for v in inputs)
    attrs = attrs_at(dict(attrs), batch)
    key = (op, kinds, repr(attrs))
    if key not in _known or op == "user":
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = _inferred(op, inputs, kinds, attrs, batch)
    return _known[key]


def _inferred(
    op: str,
    inputs: Sequence[Value | None],
    kinds: Sequence[Kind | None],
    attrs: Mapping[str, Any],
    batch: int,
) -> tuple[Kind, ...]:
    try:
        tensors = [
            None if k is None else torch.empty(k[1], dtype=getattr(torch, k[0]), device="meta")
            for k in kinds
        ]
        with ShapeRules():  # torch's own rules take five times as long
            made = operation(op).call(tensors, attrs)
    except TessellaError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        shown = ", ".join("None" if v is None else repr(v) for v in inputs)
        raise CompileError(
            f"{op} does not accept its inputs at batch {batch}",
            seen=f"{op}({shown}), {dict(attrs)}: {first_line(error)}",
            fix="correct these shapes or attributes in the network or its file",
        ) from error
    return tuple((dtype_name(t.dtype), tuple(t.shape)) for t in made)


def outputs(
    op: str, inputs: Sequence[Value | None], attrs: Mapping[str, Any]
) -> tuple[tuple[str, Shape], ...]:
    """Element type and shape of each output, with a ``Dim`` where it follows the batch."""
    if not follows_batch(inputs, attrs):
        return at_batch(op, inputs, attrs, 1)
    runs = [at_batch(op, inputs, attrs, b) for b in _BATCHES]
    if len({tuple((dtype, len(shape)) for dtype, shape in run) for run in runs}) != 1:
        raise CompileError(f"the results of {op} change in kind with the batch size", seen=runs)
    return tuple(
        (kinds[0][0], tuple(_line(op, sizes) for sizes in zip(*(s for _, s in kinds), strict=True)))
        for kinds in zip(*runs, strict=True)
    )


def _line(op: str, sizes: tuple[int, ...]) -> int | Dim:
    """The dimension that has ``sizes`` at ``_BATCHES``."""
    if len(set(sizes)) == 1:
        return sizes[0]
    factor, rest = divmod(sizes[1] - sizes[0], _BATCHES[1] - _BATCHES[0])
    dim = Dim(factor, sizes[0] - factor * _BATCHES[0])
    if rest or tuple(dim.at(b) for b in _BATCHES) != sizes:
        raise CompileError(
            f"a shape made by {op} is not a multiple of the batch plus a constant",
            seen=", ".join(f"{s} at batch {b}" for s, b in zip(sizes, _BATCHES, strict=True)),
            fix="compile for one fixed batch size",
        )
    return dim


def follows_batch(inputs: Sequence[Value | None], attrs: Any) -> bool:
    """Whether a shape or an attribute changes with the batch."""
    if any(isinstance(d, Dim) for v in inputs if v is not None for d in v.shape):
        return True
    return _holds_dim(attrs)


def _holds_dim(attr: Any) -> bool:
    if isinstance(attr, Dim):
        return True
    if isinstance(attr, Mapping):
        return any(_holds_dim(a) for a in attr.values())
    return isinstance(attr, tuple | list) and any(_holds_dim(a) for a in attr)


def infer(graph: Graph, batch: int) -> dict[str, Kind]:
    """Element type and shape of every value by name, for one batch size, from the inputs on.

    Reads the graph's inputs and constants only: what the nodes' outputs claim is not looked at.
    """
    known = {v: Value(v.name, v.dtype, shape_at(v.shape, batch)) for v in graph.inputs}
    known |= {v: v for v in graph.constants}
    for node in graph.nodes:
        inputs = [None if v is None else known[v] for v in node.inputs]
        made = at_batch(node.op, inputs, node.attrs, batch)
        for value, (dtype, shape) in zip(node.outputs, made, strict=True):
            known[value] = Value(value.name, dtype, shape)
    return {v.name: (k.dtype, shape_at(k.shape, batch)) for v, k in known.items()}
