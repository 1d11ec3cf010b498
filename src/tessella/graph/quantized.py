"""torch's ways to say that numbers are rounded: fake quantization, and ``quantized_decomposed``.

Both become ``quantize`` and ``dequantize``. torch multiplies by the reciprocal of the scale where
these divide: a number within float32's last bit of a tie may round the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tessella.graph.build import Builder
from tessella.graph.graph import Value
from tessella.graph.operator_call import OperatorCall

Translator = Callable[[OperatorCall, Builder], Value | None]


def _fake(call: OperatorCall, build: Builder) -> Value | None:
    """``fake_quantize_per_{tensor,channel}_affine``: rounded, and back."""
    a = call.arguments
    low, high = int(a["quant_min"]), int(a["quant_max"])
    dtype = next((d for d in ("int8", "uint8") if _holds(d, low, high)), None)
    if dtype is None:
        return None
    numbers = _numbers(a, build, dtype)
    axis = int(a.get("axis", 0))
    quantized = _quantized(a["self"], numbers, axis, dtype, low, high, build)
    return build.one("dequantize", [quantized, *numbers], axis=axis, dtype=a["self"].dtype)


def _quantize(call: OperatorCall, build: Builder) -> Value | None:
    a, dtype = call.arguments, str(call.dtypes[0])
    low, high = int(a["quant_min"]), int(a["quant_max"])
    if dtype not in ("int8", "uint8") or not _holds(dtype, low, high):
        return None
    numbers = _numbers(a, build, dtype)
    return _quantized(a["input"], numbers, int(a.get("axis", 0)), dtype, low, high, build)


def _dequantize(call: OperatorCall, build: Builder) -> Value | None:
    a = call.arguments
    numbers = _numbers(a, build, a["input"].dtype)
    axis = int(a.get("axis", 0))
    return build.one("dequantize", [a["input"], *numbers], axis=axis, dtype=str(call.dtypes[0]))


def _holds(dtype: str, low: int, high: int) -> bool:
    limits = torch.iinfo(getattr(torch, dtype))
    return limits.min <= low and high <= limits.max


def _quantized(
    x: Value,
    numbers: tuple[Value, Value | None],
    axis: int,
    dtype: str,
    low: int,
    high: int,
    build: Builder,
) -> Value:
    quantized = build.one("quantize", [x, *numbers], axis=axis, dtype=dtype)
    limits = torch.iinfo(getattr(torch, dtype))
    if (low, high) == (limits.min, limits.max):
        return quantized
    return build.one("clamp", [quantized], min=low, max=high)


def _numbers(a: Any, build: Builder, dtype: str) -> tuple[Value, Value | None]:
    """Scale and zero point, as constants where they are plain numbers."""
    scale = a.get("scale", a.get("scales"))
    zero = a.get("zero_point", a.get("zero_points"))
    if not isinstance(scale, Value):
        scale = build.constant("scale", torch.tensor(scale, dtype=torch.float32))
    if zero is not None and not isinstance(zero, Value):
        zero = build.constant("zero_point", torch.tensor(zero, dtype=getattr(torch, dtype)))
    return scale, zero


QUANTIZED: dict[str, Translator] = {
    "fake_quantize_per_tensor_affine.default": _fake,
    "fake_quantize_per_channel_affine.default": _fake,
    "quantize_per_tensor.default": _quantize,
    "quantize_per_channel.default": _quantize,
    "dequantize_per_tensor.default": _dequantize,
    "dequantize_per_channel.default": _dequantize,
}
