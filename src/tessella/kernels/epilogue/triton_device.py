"""The epilogue in plain Triton: what our portable kernels do to a product before they store it.

``out = cast(gamma · activation(alpha · scale · product + bias + beta · residual))``, in float32. It
runs in the interpreter as well as on a GPU, so it uses neither libdevice nor inline assembly.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

# 1.5 · 2²³: adding it to a float32 of magnitude below 2²² rounds to an integer, half to even
_ROUND = tl.constexpr(12582912.0)
_FAR = tl.constexpr(1e6)
_E4M3_MAX = tl.constexpr(448.0)
_E5M2_MAX = tl.constexpr(57344.0)


@triton.jit
def finish(product, scale, bias, residual, alpha, beta, gamma, ACTIVATION: tl.constexpr):
    """``gamma · activation(alpha · scale · product + bias + beta · residual)`` of a tile: float32.

    Args:
        product: the accumulator: float32 or int32.
        scale, bias, residual: tiles that broadcast to it, of any element type, or None.
        alpha, beta: numbers.
        gamma: a number, or None for 1, which costs nothing.
        ACTIVATION: a name of ``epilogue.ACTIVATIONS``, or None; or ``floor``, as
            ``Epilogue.on_device`` says, and then there is no residual.
    """
    x = product.to(tl.float32) * alpha
    if scale is not None:
        x = x * scale.to(tl.float32)
    if bias is not None:
        x = x + bias.to(tl.float32)
    if residual is not None:
        x = x + residual.to(tl.float32) * beta
    if ACTIVATION == "floor":
        x = tl.where(x < beta, beta, x)
    else:
        x = activate(x, ACTIVATION)
    if gamma is not None:
        x = x * gamma
    return x


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """One of ``epilogue.ACTIVATIONS`` of float32 numbers; NaN stays NaN."""
    if ACTIVATION is None:
        y = x
    elif ACTIVATION == "relu":
        y = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "relu6":
        y = _clamp(x, 0.0, 6.0)
    elif ACTIVATION == "sigmoid":
        y = _sigmoid(x)
    elif ACTIVATION == "tanh":
        y = _tanh(x)
    elif ACTIVATION == "silu":
        y = x * _sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # ½(1 + tanh u) is the sigmoid of 2u, u = √(2/π)(x + 0.044715 x³)
        y = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "hardswish":
        y = x * _clamp(x + 3.0, 0.0, 6.0) * 0.16666666666666666
    elif ACTIVATION == "hardsigmoid":
        y = _clamp(x + 3.0, 0.0, 6.0) * 0.16666666666666666
    else:
        tl.static_assert(False, "unknown activation")
    return y


@triton.jit
def cast(x, dtype: tl.constexpr):
    """float32 numbers as ``dtype``: int8 rounds half to even; int8 and fp8 saturate."""
    if dtype == tl.int8:
        y = ((_clamp(x, -128.0, 127.0) + _ROUND) - _ROUND).to(tl.int8)
    elif dtype == tl.float8e4nv:
        y = _clamp(x, -_E4M3_MAX, _E4M3_MAX)
        if not cuda_capability_geq(9, 0):
            y = rounded(y, 3, -6)
        y = y.to(dtype)
    elif dtype == tl.float8e5:
        y = _clamp(x, -_E5M2_MAX, _E5M2_MAX)
        if not cuda_capability_geq(9, 0):
            y = rounded(y, 2, -14)
        y = y.to(dtype)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def rounded(x, BITS: tl.constexpr, LEAST: tl.constexpr):
    """float32 numbers with so many bits behind the first, half to even; below ``2 ** LEAST`` all
    are as far apart as there. NaN stays NaN; infinity becomes NaN.

    Before Hopper, Triton makes fp8 of float16: a number that rounds to the middle between two of
    fp8 was rounded twice. After this, both conversions are exact.
    """
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, (127 + LEAST) << 23)
    far = (
        exponent + ((23 - BITS) << 23)
    ) | 0x400000  # 1.5 · 2ⁿ: its last bit is worth the last kept
    far = far.to(tl.float32, bitcast=True)
    return (x + far) - far


@triton.jit
def quotient(x, y):
    """``x / y`` rounded as torch does it, so that ties fall alike; y: finite, few, not subnormal.

    A division that is rounded right branches for each element, some 20 instructions. Here is one
    reciprocal for many, and what it leaves is added twice (exact: it is less than x); once is
    enough but for a divisor just below a power of two. Quotients over a million, which no
    quantized value has, are not corrected.
    """
    inverse = tl.div_rn(1.0, y)
    y, inverse, x = tl.broadcast(-y, x)[0], tl.broadcast(inverse, x)[0], tl.broadcast(x, y)[0]
    near = x * inverse
    made = tl.fma(tl.fma(near, y, x), inverse, near)
    made = tl.fma(tl.fma(made, y, x), inverse, made)
    return tl.where(tl.abs(near) < _FAR, made, near)  # what infinity leaves is no number


@triton.jit
def _clamp(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    return tl.where(x < LOW, LOW, tl.where(x > HIGH, HIGH, x))


@triton.jit
def _sigmoid(x):
    e = tl.exp(-tl.abs(x))  # of a number ≤ 0: it cannot overflow
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _tanh(x):
    # near zero 1 − e cancels: three terms of the series are right to 2e-10 below 0.1
    square = x * x
    series = x * (1.0 + square * (-0.3333333333 + square * (0.1333333333 - square * 0.0539682540)))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.1, series, tl.where(x < 0, -far, far))
