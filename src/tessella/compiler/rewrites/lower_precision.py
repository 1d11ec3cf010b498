"""Precision: float32 values in a 16-bit type, with casts where a node reads another type.

Sums inside matrix products, norms and softmax stay in float32: torch's kernels accumulate so. Two
things keep float32 outside too: the statistics of batch norms that could not be folded (a float16
variance overflows at 65,504), and operators that we do not know (``fallback``, but those of
``MOVES``; and a user's own that do not say that they take the type), and so do waves.
Scales of int8 and fp8 layers, and their biases, stay too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tessella.compiler.rewrites import dead_code
from tessella.core.errors import CompileError
from tessella.graph.graph import Graph, Node, Value
from tessella.operations.user_operators import named

# Operators of torch that only choose, move or compare numbers: no type rounds what they answer.
MOVES = frozenset((
    "aten::gather", "aten::index_select", "aten::embedding", "aten::topk", "aten::repeat",
    "aten::masked_fill.Scalar", "aten::gt.Scalar", "aten::flip", "aten::roll",
))  # fmt: skip

WAVES = frozenset(("sin", "cos"))  # of a large number, whose last bits are the whole answer


def _keeps_float32(node: Node, dtype: str) -> bool:
    if node.op == "user":
        return dtype not in named(node.attrs["target"]).dtypes
    if node.op in WAVES:
        return True
    if node.op != "fallback":
        return False
    most = torch.finfo(getattr(torch, dtype)).max
    numbers = [a for a in node.attrs["args"] if isinstance(a, int | float) and math.isfinite(a)]
    return node.attrs["target"] not in MOVES or any(abs(a) > most for a in numbers)


def apply(graph: Graph, dtype: str, layers: Mapping[str, str] | None = None) -> int:
    """Turn the graph to ``dtype``; returns how many casts it got.

    Args:
        dtype: ``float16``, ``bfloat16``, or ``float32`` where only ``layers`` change.
        layers: another element type for some nodes, by the name of their first output.
    """
    layers = layers or {}
    caster = _Caster(graph, {"float32", dtype, *layers.values()})
    outputs = [(v, v.dtype) for v in graph.outputs]
    for node in list(graph.nodes):
        kept = "float32" if _keeps_float32(node, dtype) else dtype
        own = layers.get(node.outputs[0].name, kept)
        node.inputs = tuple(
            v if v is None or _is_parameter(node, position) else caster.cast(v, own, before=node)
            for position, v in enumerate(node.inputs)
        )
        if own != "float32":
            _lower_attrs(node, own)
            for value in node.outputs:
                if value.dtype == "float32":
                    value.dtype = own
    graph.outputs = [_as_before(graph, value, was) for value, was in outputs]
    dead_code.apply(graph)  # the float32 weights are not read any more
    return caster.count


def _is_parameter(node: Node, position: int) -> bool:
    """Whether an input is statistics, or a quantized layer's scale or bias: these stay float32."""
    if node.op in ("batch_norm", "quantize", "dequantize"):
        return position > 0
    operands = node.operation.operands
    if "scale" not in operands or node.get("scale") is None:
        return False
    return operands[position] in ("bias", "scale")


class _Caster:
    """Casts a value once for each element type that a node reads."""

    def __init__(self, graph: Graph, floats: set[str]) -> None:
        self.graph, self.floats, self.count = graph, floats, 0
        self._made: dict[tuple[Value, str], Value] = {}

    def cast(self, value: Value, dtype: str, *, before: Node) -> Value:
        if value.dtype == dtype or value.dtype not in self.floats:
            return value
        if (value, dtype) not in self._made:
            self._made[value, dtype] = self._make(value, dtype, before)
        return self._made[value, dtype]

    def _make(self, value: Value, dtype: str, before: Node) -> Value:
        name = f"{value.name}.{dtype}"
        constant = self.graph.constant(value)
        if constant is not None:
            return self.graph.add_constant(name, _finite(value, constant, dtype))
        made = Value(self.graph.fresh_name(name), dtype, value.shape)
        node = Node(op="to", inputs=(value,), outputs=(made,), attrs={"dtype": dtype})
        self.graph.nodes.insert_before(before, node)
        self.count += 1
        return made


def _lower_attrs(node: Node, dtype: str) -> None:
    """``to``, ``softmax`` and reductions may name the element type of their result."""
    if node.attrs.get("dtype") == "float32":
        node.attrs["dtype"] = dtype


def _finite(value: Value, constant: torch.Tensor, dtype: str) -> torch.Tensor:
    """The constant in another type; refuses numbers that are too large for it.

    The largest number of its own type stands for no place at all, as in masks, and becomes the
    largest of the other.
    """
    made = constant.to(getattr(torch, dtype))
    if not _bounded(made) and _bounded(constant):
        most = torch.finfo(constant.dtype).max
        limit = torch.finfo(made.dtype).max
        made = torch.where(constant.abs() == most, constant.sign() * limit, constant).to(made.dtype)
    if not _bounded(made) and _bounded(constant):
        raise CompileError(
            f"the weights do not fit into {dtype}",
            seen=f"{float(constant.abs().max()):g} in {value.name}",
            fix="choose bf16, or fp32 for the layers that read it",
        )
    return made


def _bounded(tensor: torch.Tensor) -> bool:
    """No infinity, no NaN; forty times as fast as asking each number on a CPU."""
    return not tensor.numel() or all(map(math.isfinite, map(float, tensor.aminmax())))


def _as_before(graph: Graph, value: Value, dtype: str) -> Value:
    """The graph's output in the element type that it had, under its own name."""
    if value.dtype == dtype:
        return value
    name = value.name
    graph.rename(value, graph.fresh_name(f"{name}.{value.dtype}"))
    made = Value(name, dtype, value.shape)
    graph.nodes.append(Node(op="to", inputs=(value,), outputs=(made,), attrs={"dtype": dtype}))
    return made
