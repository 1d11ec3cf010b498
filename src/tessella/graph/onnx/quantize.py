"""ONNX's quantized operators, as what they mean in floating point and in integers.

A quantized tensor is ``q``; ``x ≈ (q − zero_point) · scale``. The scale and the zero point are one
number, one for each element of an axis, or one for each block along it.
"""

from __future__ import annotations

import math

import torch

from tessella.graph.graph import Value
from tessella.graph.onnx.call import Call, Result, Translator, table
from tessella.graph.onnx.layers import static, torch_pads, window


def _dequantize_linear(call: Call) -> Result:
    x, scale, zero = call.value(0), call.value(1), call.optional(2)
    block = call.attrs.get("block_size", 0)
    axis = call.attrs.get("axis", 1)
    wanted = call.attrs.get("output_dtype", None) or scale.dtype
    made = dequantized(call, x, scale, zero, axis=axis, block=block)
    return made if made.dtype == wanted else call.emit("to", made, dtype=wanted)


def dequantized(
    call: Call, x: Value, scale: Value, zero: Value | None, *, axis: int = 1, block: int = 0
) -> Value:
    """``(x − zero) · scale`` in the type of the scale."""
    if not block and _known(call, scale, zero):
        axis = call.from_front(axis, len(x.shape)) if scale.shape not in ((), (1,)) else 0
        return call.emit("dequantize", x, scale, zero, axis=axis, dtype="float32")
    wide = call.emit("to", x, dtype="float32")
    if zero is not None:
        zero = call.emit("to", zero, dtype="float32")
        wide = call.emit("sub", wide, _along(call, zero, x, axis, block), alpha=1)
    factor = scale if scale.dtype == "float32" else call.emit("to", scale, dtype="float32")
    made = call.emit("mul", wide, _along(call, factor, x, axis, block))
    return made if scale.dtype == "float32" else call.emit("to", made, dtype=scale.dtype)


def _quantize_linear(call: Call) -> Result:
    x, scale, zero = call.value(0), call.value(1), call.optional(2)
    block = call.attrs.get("block_size", 0)
    axis = call.attrs.get("axis", 1)
    dtype = call.attrs.get("output_dtype", None) or (zero.dtype if zero is not None else "uint8")
    exact = call.attrs.get("precision", None)
    if exact not in (None, scale.dtype, "float32"):
        raise call.wrong("it divides in another precision", seen=exact)
    return quantized(call, x, scale, zero, dtype, axis=axis, block=block)


def quantized(
    call: Call,
    x: Value,
    scale: Value,
    zero: Value | None,
    dtype: str,
    *,
    axis: int = 1,
    block: int = 0,
) -> Value:
    """``x / scale`` rounded to even, plus ``zero``, within what ``dtype`` holds."""
    if not dtype.startswith(("int", "uint")):
        raise call.wrong("it quantizes to a floating type", seen=dtype)
    if not block and x.dtype == "float32" and dtype in _CODES and _known(call, scale, zero):
        axis = call.from_front(axis, len(x.shape)) if scale.shape not in ((), (1,)) else 0
        return call.emit("quantize", x, scale, zero, axis=axis, dtype=dtype)
    scale = scale if scale.dtype == x.dtype else call.emit("to", scale, dtype=x.dtype)
    made = call.aten("round", call.emit("div", x, _along(call, scale, x, axis, block)))
    made = made if made.dtype == "float32" else call.emit("to", made, dtype="float32")
    if zero is not None:
        zero = call.emit("to", zero, dtype="float32")
        made = call.emit("add", made, _along(call, zero, x, axis, block), alpha=1)
    limits = torch.iinfo(getattr(torch, dtype))
    clamped = call.emit("clamp", made, min=float(limits.min), max=float(limits.max))
    return call.emit("to", clamped, dtype=dtype)


_CODES = ("int8", "uint8")  # what layers can work on


def _known(call: Call, scale: Value, zero: Value | None) -> bool:
    """Whether the numbers are constants, so that a layer between such nodes can take them in."""
    constants = call.build.graph.constants
    return scale.dtype == "float32" and scale in constants and (zero is None or zero in constants)


def _along(call: Call, numbers: Value, x: Value, axis: int, block: int) -> Value:
    """A scale or zero point in a shape that broadcasts with ``x``."""
    if math.prod(static(call, numbers.shape)) == 1:
        return call.emit("reshape", numbers, shape=())
    axis = call.from_front(axis, len(x.shape))
    if not block:
        shape = [x.shape[axis] if i == axis else 1 for i in range(len(x.shape))]
        return call.emit("reshape", numbers, shape=shape)
    count = static(call, numbers.shape)[axis]
    call.modest(count, block)
    place = call.tensor(torch.arange(count).repeat_interleave(block)[: x.shape[axis]])
    return call.aten("index_select", numbers, axis, place)


def _dynamic_quantize_linear(call: Call) -> Result:
    """To uint8, by the range of the data with zero in it."""
    x = call.value(0)
    every = tuple(range(len(x.shape)))
    low = call.emit("clamp", call.emit("amin", x, dim=every, keepdim=False), min=None, max=0.0)
    high = call.emit("clamp", call.emit("amax", x, dim=every, keepdim=False), min=0.0, max=None)
    scale = call.emit("div", call.emit("sub", high, low, alpha=1), scalar=255.0)
    zero = call.aten("round", call.emit("div", call.emit("neg", low), scale))
    zero = call.emit("to", call.emit("clamp", zero, min=0.0, max=255.0), dtype="uint8")
    return [quantized(call, x, scale, zero, "uint8"), scale, zero]


def _shifted(call: Call, x_at: int, zero_at: int, axis: int) -> Value:
    """An integer input minus its zero point, in float32, which holds such integers exactly."""
    x, zero = call.value(x_at), call.optional(zero_at)
    wide = call.emit("to", x, dtype="float32")
    if zero is None:
        return wide
    shift = call.emit("to", zero, dtype="float32")
    return call.emit("sub", wide, _along(call, shift, x, axis, 0), alpha=1)


def _matmul_integer(call: Call) -> Result:
    """Products in float64: exact up to 2⁵³."""
    a = call.emit("to", _shifted(call, 0, 2, -2), dtype="float64")
    b = call.emit("to", _shifted(call, 1, 3, -1), dtype="float64")
    return call.emit("to", call.emit("matmul", a, b), dtype="int32")


def _convolved(call: Call, x: Value, weight: Value) -> Value:
    kernel = static(call, weight.shape[2:])
    attrs, before, after = window(call, kernel)
    if before != after:
        pads = torch_pads(before, after)
        x = call.emit("pad", x, pad=pads, mode="constant", value=0.0)
        before = [0] * len(kernel)
    groups = call.attrs.get("group", 1)
    return call.emit(f"conv{len(kernel)}d", x, weight, padding=before, groups=groups, **attrs)


def _conv_integer(call: Call) -> Result:
    made = _convolved(call, _shifted(call, 0, 2, 0), _shifted(call, 1, 3, 0))
    return call.emit("to", made, dtype="int32")


def _q_linear_matmul(call: Call) -> Result:
    a = dequantized(call, call.value(0), call.value(1), call.value(2), axis=-2)
    b = dequantized(call, call.value(3), call.value(4), call.value(5), axis=-1)
    a, b = (v if v.dtype == "float32" else call.emit("to", v, dtype="float32") for v in (a, b))
    zero = call.value(7)
    scale = call.emit("to", call.value(6), dtype="float32")
    return quantized(call, call.emit("matmul", a, b), scale, zero, zero.dtype, axis=-1)


def _q_linear_conv(call: Call) -> Result:
    x = dequantized(call, call.value(0), call.value(1), call.value(2))
    weight_scale = call.value(4)
    weight = dequantized(call, call.value(3), weight_scale, call.value(5), axis=0)
    made = _convolved(call, x, weight)
    if call.has(8):
        bias = call.emit("to", call.value(8), dtype="float32")
        bias = call.emit("mul", bias, call.emit("mul", weight_scale, call.value(1)))
        line = (1, bias.shape[0], *[1] * (len(x.shape) - 2))
        made = call.emit("add", made, call.emit("reshape", bias, shape=line), alpha=1)
    zero = call.value(7)
    return quantized(call, made, call.value(6), zero, zero.dtype)


QUANTIZE: dict[str, Translator] = table(
    ("QuantizeLinear", _quantize_linear),
    ("DequantizeLinear", _dequantize_linear),
    ("DynamicQuantizeLinear", _dynamic_quantize_linear),
    ("MatMulInteger", _matmul_integer),
    ("ConvInteger", _conv_integer),
    ("QLinearMatMul", _q_linear_matmul),
    ("QLinearConv", _q_linear_conv),
)
