"""Element-wise operations as ONNX, and what changes an element type."""

from __future__ import annotations

import math

import torch

from tessella.graph.graph import Node
from tessella.graph.onnx.export import (
    Export,
    cast,
    dtype_of,
    first,
    names,
    same,
    static,
)
from tessella.graph.onnx.types import NUMBERS
from tessella.graph.onnx.writer import Writer


def _silu(w: Writer, node: Node) -> None:
    (x,) = names(node)
    w.add("Mul", [x, w.add("Sigmoid", [x])], out=node.output.name)


def _gelu(w: Writer, node: Node) -> None:
    (x,), like = names(node), first(node)
    if node.attrs["approximate"] == "tanh":
        cube = w.add("Mul", [w.add("Mul", [x, x]), x])
        inner = w.add("Add", [x, w.add("Mul", [cube, w.number(0.044715, like)])])
        inner = w.add("Mul", [inner, w.number(math.sqrt(2 / math.pi), like)])
        shape = w.add("Tanh", [inner])
    else:
        shape = w.add("Erf", [w.add("Mul", [x, w.number(math.sqrt(0.5), like)])])
    twice = w.add("Mul", [x, w.add("Add", [shape, w.number(1.0, like)])])
    w.add("Mul", [twice, w.number(0.5, like)], out=node.output.name)


def _mish(w: Writer, node: Node) -> None:
    (x,) = names(node)
    w.add("Mul", [x, w.add("Tanh", [w.add("Softplus", [x])])], out=node.output.name)


def _elu(w: Writer, node: Node) -> None:
    """``scale · (max(x, 0) + min(0, alpha · (exp(input_scale · x) − 1)))``."""
    (x,), like, a = names(node), first(node), node.attrs
    if (a["scale"], a["input_scale"]) == (1.0, 1.0):
        w.add("Elu", [x], out=node.output.name, alpha=float(a["alpha"]))
        return
    power = w.add("Exp", [w.add("Mul", [x, w.number(a["input_scale"], like)])])
    below = w.add("Sub", [power, w.number(1.0, like)])
    below = w.add("Min", [w.add("Mul", [below, w.number(a["alpha"], like)]), w.number(0.0, like)])
    made = w.add("Add", [w.add("Relu", [x]), below])
    w.add("Mul", [made, w.number(a["scale"], like)], out=node.output.name)


def _softplus(w: Writer, node: Node) -> None:
    (x,), like, beta = names(node), first(node), float(node.attrs["beta"])
    if beta == 1.0:
        w.add("Softplus", [x], out=node.output.name)
        return
    made = w.add("Softplus", [w.add("Mul", [x, w.number(beta, like)])])
    w.add("Div", [made, w.number(beta, like)], out=node.output.name)


def _clamp(w: Writer, node: Node) -> None:
    bounds = [node.attrs[k] for k in ("min", "max")]
    x = cast(w, first(node), node.output.dtype)
    inputs = [x, *["" if b is None else w.number(b, node.output) for b in bounds]]
    w.add("Clip", inputs[:2] if bounds[1] is None else inputs, out=node.output.name)


def _relu6(w: Writer, node: Node) -> None:
    (x,), like = names(node), first(node)
    w.add("Clip", [x, w.number(0, like), w.number(6, like)], out=node.output.name)


def _rsqrt(w: Writer, node: Node) -> None:
    w.add("Reciprocal", [w.add("Sqrt", names(node))], out=node.output.name)


def _prelu(w: Writer, node: Node) -> None:
    x, slope = names(node)
    along = w.ints(-1, *[1] * max(0, len(first(node).shape) - 2))
    w.add("PRelu", [x, w.add("Reshape", [slope, along])], out=node.output.name)


def _to(w: Writer, node: Node) -> None:
    w.add("Cast", names(node), out=node.output.name, to=NUMBERS[node.attrs["dtype"]])


def _binary(op: str) -> Export:
    def export(w: Writer, node: Node) -> None:
        like, left, right = node.output, node["input"], node.get("other")
        alpha = node.attrs.get("alpha", 1)
        other = (
            w.number(node.attrs["scalar"], like) if right is None else cast(w, right, like.dtype)
        )
        if alpha != 1:
            other = w.add("Mul", [other, w.number(alpha, like)])
        w.add(op, [cast(w, left, like.dtype), other], out=like.name)

    return export


# ── int8 and bytes ────────────────────────────────────────────────────────────────────────────────


def _quantize(w: Writer, node: Node) -> None:
    x, scale, zero = names(node)
    zero = zero or _zeros(w, node, node.attrs["dtype"])
    w.add("QuantizeLinear", [x, scale, zero], out=node.output.name, axis=node.attrs["axis"])


def _dequantize(w: Writer, node: Node) -> None:
    x, scale, zero = names(node)
    made = [x, scale, zero] if zero else [x, scale]
    w.add("DequantizeLinear", made, out=node.output.name, axis=node.attrs["axis"])


def _zeros(w: Writer, node: Node, dtype: str) -> str:
    shape = static(node, node["scale"].shape)
    return w.constant(torch.zeros(shape, dtype=getattr(torch, dtype)))


def _image_to_tensor(w: Writer, node: Node) -> None:
    a, like = node.attrs, node.output
    x = w.add("Transpose", [cast(w, first(node), like.dtype)], perm=[0, 3, 1, 2])
    gain, offset = (
        w.constant(torch.tensor(a[k], dtype=dtype_of(like)).reshape(-1, 1, 1))
        for k in ("gain", "offset")
    )
    w.add("Add", [w.add("Mul", [x, gain]), offset], out=like.name)


ELEMENTS: dict[str, Export] = {
    "relu": same("Relu"),
    "relu6": _relu6,
    "sigmoid": same("Sigmoid"),
    "tanh": same("Tanh"),
    "silu": _silu,
    "gelu": _gelu,
    "hardswish": same("HardSwish"),
    "hardsigmoid": same("HardSigmoid", alpha=1 / 6, beta=0.5),
    "mish": _mish,
    "leaky_relu": lambda w, n: same("LeakyRelu", alpha=float(n.attrs["negative_slope"]))(w, n),
    "elu": _elu,
    "softplus": _softplus,
    "clamp": _clamp,
    "exp": same("Exp"),
    "log": same("Log"),
    "sqrt": same("Sqrt"),
    "rsqrt": _rsqrt,
    "reciprocal": same("Reciprocal"),
    "neg": same("Neg"),
    "abs": same("Abs"),
    "erf": same("Erf"),
    "sin": same("Sin"),
    "cos": same("Cos"),
    "to": _to,
    "prelu": _prelu,
    "add": _binary("Add"),
    "sub": _binary("Sub"),
    "mul": _binary("Mul"),
    "div": _binary("Div"),
    "pow": _binary("Pow"),
    "maximum": _binary("Max"),
    "minimum": _binary("Min"),
    "quantize": _quantize,
    "dequantize": _dequantize,
    "image_to_tensor": _image_to_tensor,
}
