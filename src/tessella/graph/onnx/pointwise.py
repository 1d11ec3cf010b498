"""ONNX's element-wise operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tessella.graph.graph import Value
from tessella.graph.onnx.call import Call, Result, Translator, table


def _unary(op: str, **attrs: Any) -> Translator:
    return lambda call: call.emit(op, call.value(0), **attrs)


def _torch(target: str) -> Translator:
    """An operator of torch that has no operation of ours."""
    return lambda call: call.aten(target, *call.values())


# torch stores these, and computes little with them: their sums, products and bits are int64's.
_WIDENED = ("uint16", "uint32", "uint64")


def _widened(target: str, *, compares: bool = False) -> Translator:
    """An operator of torch on two tensors, by way of int64 where torch does not have it."""

    def translator(call: Call) -> Result:
        left, right = call.values()
        dtype = left.dtype
        if dtype not in _WIDENED:
            return call.aten(target, left, right)
        exact = target.startswith(("add", "sub", "mul", "bitwise_and", "bitwise_or", "bitwise_xor"))
        if dtype == "uint64" and not exact and not compares:
            raise call.wrong("torch has no such arithmetic for uint64")
        left, right = (call.emit("to", v, dtype="int64") for v in (left, right))
        if dtype == "uint64" and compares:  # the order of int64, half the range up
            left, right = (call.emit("add", v, scalar=-(2**63), alpha=1) for v in (left, right))
        made = call.aten(target, left, right)
        return made if compares else call.emit("to", made, dtype=dtype)

    return translator


def _is_float(value: Value) -> bool:
    return value.dtype.startswith(("float", "bfloat"))


def _scalar(call: Call, index: int) -> int | float | None:
    """The number that an input is, where it is a finite constant that broadcasts like one."""
    tensor, other = call.constant(index), call.value(1 - index)
    if tensor is None or tensor.numel() != 1 or len(tensor.shape) > len(other.shape):
        return None
    number = tensor.item()
    return number if math.isfinite(number) else None


def _binary(op: str) -> Translator:
    def translator(call: Call) -> Result:
        left, right = call.value(0), call.value(1)
        attrs = {"alpha": 1} if op in ("add", "sub") else {}
        if left.dtype in _WIDENED and left.dtype == right.dtype and op in ("add", "sub", "mul"):
            return _widened(f"{op}.Tensor")(call)
        if op == "div" and not _is_float(left):
            return _divided(call, left, right)
        if op == "pow" and left.dtype != right.dtype:
            return _power(call, left, right)
        number = _scalar(call, 1)
        if number is not None:
            return call.emit(op, left, scalar=number, **attrs)
        if op in ("add", "mul") and (number := _scalar(call, 0)) is not None:
            return call.emit(op, right, scalar=number, **attrs)
        return call.emit(op, left, right, **attrs)

    return translator


def _divided(call: Call, left: Value, right: Value) -> Value:
    """Integers: towards zero."""
    dtype = left.dtype
    if dtype == "uint64":
        raise call.wrong("torch has no such arithmetic for uint64")
    if dtype in _WIDENED:
        left, right = (call.emit("to", v, dtype="int64") for v in (left, right))
    made = call.aten("div.Tensor_mode", left, right, rounding_mode="trunc")
    return made if made.dtype == dtype else call.emit("to", made, dtype=dtype)


def _power(call: Call, left: Value, right: Value) -> Value:
    """Base and exponent of two types: in the wider kind, then back to the base's."""
    if _is_float(left):
        return call.emit("pow", left, call.emit("to", right, dtype=left.dtype))
    wide = "float64" if _is_float(right) else "int64"
    made = call.emit("pow", *(call.emit("to", v, dtype=wide) for v in (left, right)))
    return call.emit("to", made, dtype=left.dtype)


def _variadic(op: str) -> Callable[[Call], Value]:
    """Max, Min, Sum of any number of tensors."""

    def translator(call: Call) -> Value:
        made, *rest = call.values()
        attrs = {"alpha": 1} if op == "add" else {}
        for other in rest:
            made = call.emit(op, made, other, **attrs)
        return made

    return translator


def _mean(call: Call) -> Result:
    total = _variadic("add")(call)
    return call.emit("mul", total, scalar=1 / len(call.inputs))


def _clip(call: Call) -> Result:
    x, dtype = call.value(0), call.value(0).dtype
    for i, op in ((1, "maximum"), (2, "minimum")):  # bounds that are computed
        if call.has(i) and call.constant(i) is None:
            x = call.emit(op, x, call.value(i))
    bounds = [
        None if call.has(i) and call.constant(i) is None else call.number(i, name)
        for i, name in ((1, "min"), (2, "max"))
    ]
    low, high = (b if b is not None and math.isfinite(b) else None for b in bounds)
    if low is None and high is None:
        return x
    if (low, high) == (0.0, 6.0) and _is_float(x):
        return call.emit("relu6", x)
    if low is not None and high is not None and low > high:
        low = high
    made = call.emit("clamp", x, min=low, max=high)
    return made if made.dtype == dtype else call.emit("to", made, dtype=dtype)


def _leaky_relu(call: Call) -> Result:
    return call.emit("leaky_relu", call.value(0), negative_slope=call.attrs.get("alpha", 0.01))


def _elu(call: Call) -> Result:
    alpha = call.attrs.get("alpha", 1.0)
    return call.emit("elu", call.value(0), alpha=alpha, scale=1.0, input_scale=1.0)


def _selu(call: Call) -> Result:
    alpha = call.attrs.get("alpha", 1.6732632423543772)
    gamma = call.attrs.get("gamma", 1.0507009873554805)
    return call.emit("elu", call.value(0), alpha=alpha, scale=gamma, input_scale=1.0)


def _celu(call: Call) -> Result:
    alpha = call.attrs.get("alpha", 1.0)
    return call.emit("elu", call.value(0), alpha=alpha, scale=1.0, input_scale=1 / alpha)


def _hard_sigmoid(call: Call) -> Result:
    alpha, beta = call.attrs.get("alpha", 0.2), call.attrs.get("beta", 0.5)
    x = call.value(0)
    if np.float32(alpha) == np.float32(1 / 6) and beta == 0.5:
        return call.emit("hardsigmoid", x)
    line = call.emit("add", call.emit("mul", x, scalar=alpha), scalar=beta, alpha=1)
    return call.emit("clamp", line, min=0.0, max=1.0)


def _softplus(call: Call) -> Result:
    return call.emit("softplus", call.value(0), beta=1.0, threshold=20.0)


def _softsign(call: Call) -> Result:
    x = call.value(0)
    below = call.emit("add", call.emit("abs", x), scalar=1, alpha=1)
    return call.emit("div", x, below)


def _gelu(call: Call) -> Result:
    return call.emit("gelu", call.value(0), approximate=call.attrs.get("approximate", "none"))


def _prelu(call: Call) -> Result:
    x, slope = call.value(0), call.value(1)
    channels = x.shape[1] if len(x.shape) > 1 else 1
    along = (channels, *[1] * (len(x.shape) - 2))
    if slope.shape in (along, (1, *along)):
        return call.emit("prelu", x, call.emit("reshape", slope, shape=(channels,)))
    if math.prod(d for d in slope.shape if isinstance(d, int)) == 1:
        return call.emit("prelu", x, call.emit("reshape", slope, shape=(1,)))
    positive, negative = call.emit("relu", x), call.emit("clamp", x, min=None, max=0.0)
    return call.emit("add", positive, call.emit("mul", negative, slope), alpha=1)


def _cast(call: Call) -> Result:
    dtype = call.attrs["to"] if call.op == "Cast" else call.value(1).dtype
    x = call.value(0)
    return x if x.dtype == dtype else call.emit("to", x, dtype=dtype)


def _mod(call: Call) -> Result:
    target = "fmod.Tensor" if call.attrs.get("fmod", 0) else "remainder.Tensor"
    return _widened(target)(call)


def _bit_shift(call: Call) -> Result:
    left = call.attrs["direction"] == "LEFT"
    target = "bitwise_left_shift.Tensor" if left else "bitwise_right_shift.Tensor"
    if left and call.value(0).dtype == "uint64":  # the bits that stay are int64's
        return _via_int64(call, target)
    return _widened(target)(call)


def _via_int64(call: Call, target: str) -> Value:
    wide = [call.emit("to", v, dtype="int64") for v in call.values()]
    return call.emit("to", call.aten(target, *wide), dtype="uint64")


def _bitwise_not(call: Call) -> Result:
    x = call.value(0)
    if x.dtype not in _WIDENED:
        return call.aten("bitwise_not", x)
    made = call.aten("bitwise_not", call.emit("to", x, dtype="int64"))
    return call.emit("to", made, dtype=x.dtype)


def _is_inf(call: Call) -> Result:
    x = call.value(0)
    above, below = (call.attrs.get(f"detect_{s}", 1) for s in ("positive", "negative"))
    if above and below:
        return call.aten("isinf", x)
    if not above and not below:
        return call.aten("zeros_like", x, dtype=torch.bool)
    return call.aten("isposinf" if above else "isneginf", x)


def _swish(call: Call) -> Result:
    x, alpha = call.value(0), call.attrs.get("alpha", 1.0)
    if alpha == 1.0:
        return call.emit("silu", x)
    return call.emit("mul", x, call.emit("sigmoid", call.emit("mul", x, scalar=alpha)))


POINTWISE: dict[str, Translator] = table(
    ("Relu", _unary("relu")),
    ("Sigmoid", _unary("sigmoid")),
    ("Tanh", _unary("tanh")),
    ("HardSwish", _unary("hardswish")),
    ("Mish", _unary("mish")),
    ("Exp", _unary("exp")),
    ("Log", _unary("log")),
    ("Sqrt", _unary("sqrt")),
    ("Reciprocal", _unary("reciprocal")),
    ("Neg", _unary("neg")),
    ("Abs", _unary("abs")),
    ("Erf", _unary("erf")),
    ("Sin", _unary("sin")),
    ("Cos", _unary("cos")),
    ("Gelu", _gelu),
    ("LeakyRelu", _leaky_relu),
    ("Elu", _elu),
    ("Selu", _selu),
    ("Celu", _celu),
    ("HardSigmoid", _hard_sigmoid),
    ("Softplus", _softplus),
    ("Softsign", _softsign),
    ("PRelu", _prelu),
    ("Clip", _clip),
    ("Cast CastLike", _cast),
    ("Add", _binary("add")),
    ("Sub", _binary("sub")),
    ("Mul", _binary("mul")),
    ("Div", _binary("div")),
    ("Pow", _binary("pow")),
    ("Max", _variadic("maximum")),
    ("Min", _variadic("minimum")),
    ("Sum", _variadic("add")),
    ("Mean", _mean),
    ("Mod", _mod),
    ("Where", _torch("where.self")),
    ("Equal", _widened("eq.Tensor", compares=True)),
    ("Greater", _widened("gt.Tensor", compares=True)),
    ("GreaterOrEqual", _widened("ge.Tensor", compares=True)),
    ("Less", _widened("lt.Tensor", compares=True)),
    ("LessOrEqual", _widened("le.Tensor", compares=True)),
    ("And", _torch("logical_and")),
    ("Or", _torch("logical_or")),
    ("Xor", _torch("logical_xor")),
    ("Not", _torch("logical_not")),
    ("BitwiseAnd", _widened("bitwise_and.Tensor")),
    ("BitwiseOr", _widened("bitwise_or.Tensor")),
    ("BitwiseXor", _widened("bitwise_xor.Tensor")),
    ("BitwiseNot", _bitwise_not),
    ("BitShift", _bit_shift),
    ("IsNaN", _torch("isnan")),
    ("IsInf", _is_inf),
    ("Swish", _swish),
    ("Det", _torch("linalg_det")),
    ("Floor", _torch("floor")),
    ("Ceil", _torch("ceil")),
    ("Round", _torch("round")),
    ("Sign", _torch("sign")),
    ("Tan", _torch("tan")),
    ("Asin", _torch("asin")),
    ("Acos", _torch("acos")),
    ("Atan", _torch("atan")),
    ("Sinh", _torch("sinh")),
    ("Cosh", _torch("cosh")),
    ("Asinh", _torch("asinh")),
    ("Acosh", _torch("acosh")),
    ("Atanh", _torch("atanh")),
)
