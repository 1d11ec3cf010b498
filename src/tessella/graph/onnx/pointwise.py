"""ONNX's element-wise operators."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessella.graph.graph import Value
from tessella.graph.onnx.call import Call, Result, Translator, table


def _unary(op: str, **attrs: Any) -> Translator:
    return lambda call: call.emit(op, call.value(0), **attrs)


def _torch(target: str) -> Translator:
    """An operator of torch that has no operation of ours."""
    return lambda call: call.aten(target, *(call.value(i) for i in range(len(call.inputs))))


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
        if op == "div" and not _is_float(left):
            return call.aten("div.Tensor_mode", left, right, rounding_mode="trunc")
        if op == "pow" and left.dtype != right.dtype:
            right = call.emit("to", right, dtype=left.dtype)
            return call.emit(op, left, right)
        number = _scalar(call, 1)
        if number is not None:
            return call.emit(op, left, scalar=number, **attrs)
        if op in ("add", "mul") and (number := _scalar(call, 0)) is not None:
            return call.emit(op, right, scalar=number, **attrs)
        return call.emit(op, left, right, **attrs)

    return translator


def _variadic(op: str) -> Translator:
    """Max, Min, Sum of any number of tensors."""

    def translator(call: Call) -> Result:
        made, *rest = (call.value(i) for i in range(len(call.inputs)))
        attrs = {"alpha": 1} if op == "add" else {}
        for other in rest:
            made = call.emit(op, made, other, **attrs)
        return made

    return translator


def _mean(call: Call) -> Result:
    total = _variadic("add")(call)
    return call.emit("mul", total, scalar=1 / len(call.inputs))


def _clip(call: Call) -> Result:
    low, high = call.number(1, "min"), call.number(2, "max")
    low = low if low is not None and math.isfinite(low) else None
    high = high if high is not None and math.isfinite(high) else None
    x = call.value(0)
    if low is None and high is None:
        return x
    if (low, high) == (0.0, 6.0) and _is_float(x):
        return call.emit("relu6", x)
    return call.emit("clamp", x, min=low, max=high)


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
    return call.aten(target, call.value(0), call.value(1))


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
    ("Equal", _torch("eq.Tensor")),
    ("Greater", _torch("gt.Tensor")),
    ("GreaterOrEqual", _torch("ge.Tensor")),
    ("Less", _torch("lt.Tensor")),
    ("LessOrEqual", _torch("le.Tensor")),
    ("And", _torch("logical_and")),
    ("Or", _torch("logical_or")),
    ("Xor", _torch("logical_xor")),
    ("Not", _torch("logical_not")),
    ("IsNaN", _torch("isnan")),
    ("Floor", _torch("floor")),
    ("Ceil", _torch("ceil")),
    ("Round", _torch("round")),
    ("Sign", _torch("sign")),
    ("Sin", _torch("sin")),
    ("Cos", _torch("cos")),
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
