"""What operators of torch, which have no operation of ours, become in ONNX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessella.core.dtype import dtype_name
from tessella.graph.graph import Node, Value
from tessella.graph.onnx.export import (
    Export,
    cast,
    first,
    names,
    padded,
    reduced,
    refused,
    same,
    static,
)
from tessella.graph.onnx.types import NUMBERS
from tessella.graph.onnx.writer import Writer

_WHOLE = ("int32", "int64")


def _arguments(node: Node) -> list[Any]:
    """The operator's arguments; tensors are values, numbers that JSON lacks are numbers again."""

    def filled(template: Any) -> Any:
        if isinstance(template, Mapping):
            ((kind, value),) = template.items()
            if kind == "input":
                return node.inputs[value]
            return float(value) if kind == "float" else value
        return [filled(t) for t in template] if isinstance(template, list | tuple) else template

    return [filled(a) for a in node.attrs["args"]]


def _or_defaults(given: Sequence[Any], *defaults: Any) -> list[Any]:
    """The arguments that are given, and the defaults of those behind them."""
    return [*given, *defaults[len(given) :]]


def _compared(op: str) -> Export:
    """Two tensors, or a tensor and a number, in the type that both fit into."""

    def export(w: Writer, node: Node) -> None:
        left, right = _arguments(node)[:2]
        if isinstance(right, Value):
            dtype = torch.promote_types(getattr(torch, left.dtype), getattr(torch, right.dtype))
            wide = dtype_name(dtype)
            inputs = [cast(w, v, wide) for v in (left, right)]
        else:
            inputs = [left.name, w.number(right, left)]
        w.add(op, inputs, out=node.output.name)

    return export


def _remainder(w: Writer, node: Node) -> None:
    """Of whole numbers: what is left has the divisor's sign, as in Python."""
    x, divisor = _arguments(node)
    if x.dtype not in _WHOLE or not isinstance(divisor, int):
        raise refused(node, "a remainder of other numbers than whole ones")
    w.add("Mod", [x.name, w.number(divisor, x)], out=node.output.name)


def _floor_division(w: Writer, node: Node) -> None:
    """Of whole numbers, by a number: ONNX's division rounds towards zero, so first what is left."""
    x, divisor = _arguments(node)
    known = node.attrs["kwargs"].get("rounding_mode") == "floor"
    if x.dtype not in _WHOLE or not isinstance(divisor, int) or not known:
        raise refused(node, "a division of other numbers than whole ones, or one not rounded down")
    by = w.number(divisor, x)
    w.add("Div", [w.add("Sub", [x.name, w.add("Mod", [x.name, by])]), by], out=node.output.name)


def _where(w: Writer, node: Node) -> None:
    condition, left, right = _arguments(node)
    inputs = [cast(w, v, node.output.dtype) for v in (left, right)]
    w.add("Where", [condition.name, *inputs], out=node.output.name)


def _masked_fill(w: Writer, node: Node) -> None:
    x, mask, number = _arguments(node)
    w.add("Where", [mask.name, w.number(number, x), x.name], out=node.output.name)


def _all(w: Writer, node: Node) -> None:
    """Whether all along an axis are true: the least of them is 1."""
    x, axis, *keep = _arguments(node)
    ones = cast(w, x, "int32")
    least = reduced(w, "ReduceMin", ones, [axis % len(x.shape)], keep=bool(keep and keep[0]))
    w.add("Cast", [least], out=node.output.name, to=NUMBERS["bool"])


def _roll(w: Writer, node: Node) -> None:
    x, shifts, *dims = _arguments(node)
    made, axes = x.name, dims[0] if dims else []
    if not axes:
        raise refused(node, "a roll of all elements together")
    for count, (shift, axis) in enumerate(zip(shifts, axes, strict=True), start=1):
        axis %= len(x.shape)
        place = -shift % static(node, x.shape[axis : axis + 1])[0]
        parts = [_cut(w, made, axis, place, 2**63 - 1), _cut(w, made, axis, 0, place)]
        w.add("Concat", parts, axis=axis, out=node.output.name if count == len(axes) else "")
        made = w.last


def _cut(w: Writer, x: str, axis: int, start: int, end: int) -> str:
    return w.add("Slice", [x, w.ints(start), w.ints(end), w.ints(axis)])


def _flip(w: Writer, node: Node) -> None:
    x, axes = _arguments(node)
    count = len(axes)
    bounds = [[-1] * count, [-(2**63)] * count, list(axes), [-1] * count]
    w.add("Slice", [x.name, *[w.ints(*b) for b in bounds]], out=node.output.name)


def _index_select(w: Writer, node: Node) -> None:
    x, axis, index = _arguments(node)
    w.add("Gather", [x.name, index.name], out=node.output.name, axis=axis)


def _index(w: Writer, node: Node) -> None:
    """Indices on one axis."""
    x, indices = _arguments(node)
    given = [(axis, v) for axis, v in enumerate(indices) if v is not None]
    if len(given) != 1 or given[0][1].dtype == "bool":
        raise refused(node, "indices on several axes, or a mask")
    axis, index = given[0]
    w.add("Gather", [x.name, index.name], out=node.output.name, axis=axis)


def _gather(w: Writer, node: Node) -> None:
    x, axis, index, *_ = _arguments(node)
    w.add("GatherElements", [x.name, index.name], out=node.output.name, axis=axis)


def _top_k(w: Writer, node: Node) -> None:
    x, count, *more = _arguments(node)
    axis, largest, in_order = _or_defaults(more, -1, True, True)
    settings = {"axis": axis, "largest": int(largest), "sorted": int(in_order)}
    w.add("TopK", [x.name, w.ints(count)], out=[v.name for v in node.outputs], **settings)


def _repeat(w: Writer, node: Node) -> None:
    x, counts = _arguments(node)
    made = x.name
    if len(counts) > len(x.shape):
        wide = (*[1] * (len(counts) - len(x.shape)), *x.shape)
        made = w.add("Reshape", [made, w.sizes(wide)])
    w.add("Tile", [made, w.sizes(tuple(counts))], out=node.output.name)


def _cumsum(w: Writer, node: Node) -> None:
    x, axis = _arguments(node)[:2]
    place = w.constant(torch.tensor(axis))
    w.add("CumSum", [cast(w, x, node.output.dtype), place], out=node.output.name)


def _arg(op: str) -> Export:
    def export(w: Writer, node: Node) -> None:
        x, *more = _arguments(node)
        axis, keep = _or_defaults(more, None, False)
        if axis is None:
            raise refused(node, "a place in all axes together")
        w.add(op, [x.name], out=node.output.name, axis=axis, keepdims=int(keep))

    return export


def _triangle(upper: int) -> Export:
    def export(w: Writer, node: Node) -> None:
        x, *more = _arguments(node)
        (diagonal,) = more or [0]
        place = w.constant(torch.tensor(diagonal))
        w.add("Trilu", [x.name, place], out=node.output.name, upper=upper)

    return export


def _constant_pad(w: Writer, node: Node) -> None:
    _, pad, *value = _arguments(node)
    padded(w, node, pad, "constant", value[0] if value else 0.0)


def _pad(w: Writer, node: Node) -> None:
    _, pad, *more = _arguments(node)
    mode, value = _or_defaults(more, "constant", None)
    padded(w, node, pad, mode, value or 0.0)


def _einsum(w: Writer, node: Node) -> None:
    equation, tensors, *_ = _arguments(node)
    w.add("Einsum", [v.name for v in tensors], out=node.output.name, equation=equation)


def _pool3d(op: str) -> Export:
    def export(w: Writer, node: Node) -> None:
        x, kernel, *more = _arguments(node)
        if len(more) > 2:
            raise refused(node, "dilation, or windows that reach over the edge")
        stride, padding = _or_defaults(more, [], [])
        pads = [*(padding or [0] * 3)] * 2
        attrs = {"kernel_shape": kernel, "strides": stride or kernel, "pads": pads}
        w.add(op, [x.name], out=node.output.name, **attrs)

    return export


def _adaptive_avg_pool1d(w: Writer, node: Node) -> None:
    x, (size,) = _arguments(node)
    (have,) = static(node, x.shape[-1:])
    dtype = getattr(torch, x.dtype)
    share = torch.nn.functional.adaptive_avg_pool1d(torch.eye(have, dtype=dtype)[None], size)[0]
    w.add("MatMul", [x.name, w.constant(share)], out=node.output.name)


def _power_of_number(w: Writer, node: Node) -> None:
    number, exponent = _arguments(node)
    base = w.number(number, node.output)
    w.add("Pow", [base, cast(w, exponent, node.output.dtype)], out=node.output.name)


def _norm(w: Writer, node: Node) -> None:
    """Vectors' 2-norm."""
    x, *more = _arguments(node)
    order, axes, keep = [*more, *[2, None, False][len(more) :]][:3]
    if order != 2 or axes is None:
        raise refused(node, "a norm other than the second, along axes")
    rank = len(first(node).shape)
    attrs = {"keepdims": int(bool(keep))}
    dims = [a % rank for a in axes]
    if w.opset >= 18:
        w.add("ReduceL2", [x.name, w.ints(*dims)], out=node.output.name, **attrs)
    else:
        w.add("ReduceL2", [x.name], out=node.output.name, axes=dims, **attrs)


def _expm1(w: Writer, node: Node) -> None:
    power = w.add("Exp", names(node))
    w.add("Sub", [power, w.number(1.0, node.output)], out=node.output.name)


def _bits(op: str) -> Export:
    """Of truth values."""

    def export(w: Writer, node: Node) -> None:
        if node.output.dtype != "bool":
            raise refused(node, "bits of integers")
        w.add(op, names(node), out=node.output.name)

    return export


_BY_NAME = {
    "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan",
    "sinh": "Sinh", "cosh": "Cosh", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh",
    "floor": "Floor", "ceil": "Ceil", "round": "Round", "sign": "Sign", "isnan": "IsNaN",
    "isinf": "IsInf", "logical_and": "And", "logical_or": "Or", "logical_xor": "Xor",
    "logical_not": "Not", "linalg_det": "Det",
}  # fmt: skip
_COMPARED = {
    "eq": "Equal", "gt": "Greater", "ge": "GreaterOrEqual", "lt": "Less", "le": "LessOrEqual",
}  # fmt: skip

FALLBACKS: dict[str, Export] = {
    **{f"aten::{torch_name}": same(name) for torch_name, name in _BY_NAME.items()},
    **{
        f"aten::{torch_name}.{kind}": _compared(name)
        for torch_name, name in _COMPARED.items()
        for kind in ("Tensor", "Scalar")
    },
    "aten::where.self": _where,
    "aten::masked_fill.Scalar": _masked_fill,
    "aten::all.dim": _all,
    "aten::remainder.Scalar": _remainder,
    "aten::div.Tensor_mode": _floor_division,
    "aten::div.Scalar_mode": _floor_division,
    "aten::roll": _roll,
    "aten::flip": _flip,
    "aten::index_select": _index_select,
    "aten::index.Tensor": _index,
    "aten::gather": _gather,
    "aten::topk": _top_k,
    "aten::repeat": _repeat,
    "aten::cumsum": _cumsum,
    "aten::argmax": _arg("ArgMax"),
    "aten::argmin": _arg("ArgMin"),
    "aten::triu": _triangle(1),
    "aten::tril": _triangle(0),
    "aten::constant_pad_nd": _constant_pad,
    "aten::pad": _pad,
    "aten::einsum": _einsum,
    "aten::max_pool3d": _pool3d("MaxPool"),
    "aten::avg_pool3d": _pool3d("AveragePool"),
    "aten::adaptive_avg_pool1d": _adaptive_avg_pool1d,
    "aten::pow.Scalar": _power_of_number,
    "aten::linalg_vector_norm": _norm,
    "aten::expm1": _expm1,
    "aten::bitwise_and.Tensor": _bits("And"),
    "aten::bitwise_or.Tensor": _bits("Or"),
    "aten::bitwise_not": _bits("Not"),
}
