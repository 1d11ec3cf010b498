"""The parts that all exports of operations to ONNX share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tessella.core.errors import CompileError
from tessella.graph.graph import Dim, Node, Value
from tessella.graph.onnx.types import NUMBERS
from tessella.graph.onnx.writer import Writer
from tessella.graph.value import fixed

Export = Callable[[Writer, Node], object]


def names(node: Node) -> list[str]:
    """What a node reads, empty where an input is left out."""
    return ["" if v is None else v.name for v in node.inputs]


def first(node: Node) -> Value:
    value = node.first
    assert value is not None
    return value


def cast(w: Writer, value: Value | str, dtype: str, have: str = "") -> str:
    """A tensor in an element type; as it is if it has that already."""
    if isinstance(value, Value):
        have, value = value.dtype, value.name
    return value if have == dtype else w.add("Cast", [value], to=NUMBERS[dtype])


def refused(node: Node, why: str) -> CompileError:
    where = f" (layer {node.layer})" if node.layer else ""
    return CompileError(f"{node.op} cannot be written as ONNX: {why}", seen=f"{node.output}{where}")


def static(node: Node, sizes: Sequence[int | Dim]) -> list[int]:
    if any(isinstance(d, Dim) for d in sizes):
        raise refused(node, "a size that ONNX wants as a constant follows the batch")
    return list(map(fixed, sizes))


def dtype_of(value: Value) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, value.dtype)
    return dtype


def same(op: str, **attrs: Any) -> Export:
    """One operator of the same inputs."""
    return lambda w, node: w.add(op, names(node), out=node.output.name, **attrs)


def reduced(w: Writer, op: str, x: str, axes: Sequence[int], keep: bool, out: str = "") -> str:
    """A reduction; its axes are an input in new versions, and of ReduceSum in all."""
    if op == "ReduceSum" or w.opset >= 18:
        return w.add(op, [x, w.ints(*axes)], out=out, keepdims=int(keep))
    return w.add(op, [x], out=out, axes=list(axes), keepdims=int(keep))


_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def padded(w: Writer, node: Node, pad: Sequence[int], mode: str, value: float) -> None:
    x = first(node)
    if mode == "circular" and w.opset < 19:
        raise refused(node, "circular padding needs opset 19")
    rank, pairs = len(x.shape), len(pad) // 2
    before, after = [0] * rank, [0] * rank
    for i in range(pairs):
        before[rank - 1 - i], after[rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    inputs = [x.name, w.ints(*before, *after)]
    inputs += [w.number(value, x)] if mode == "constant" else []
    w.add("Pad", inputs, out=node.output.name, mode=_MODES[mode])
