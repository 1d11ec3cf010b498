"""Instructions of programs in Triton: what a kernel computes of values that it has loaded.

Values are float32 tiles of rows and columns; a value that is the same in all rows, or in all
columns, stays one row or one column. No inline assembly: Triton's interpreter runs it too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tessella.kernels.epilogue.triton_device import activate, quotient

_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def steps(values, STEPS: tl.constexpr):
    """What the steps make of values."""
    OPS: tl.constexpr = STEPS.OPS
    READS: tl.constexpr = STEPS.READS
    NUMBERS: tl.constexpr = STEPS.NUMBERS
    for i in tl.static_range(len(OPS)):
        x = instruction(values, None, 0, OPS, READS, NUMBERS, i)
        values = values + (x,)  # noqa: RUF005
    return values[STEPS.RESULT]


@triton.jit
def instruction(
    values,
    columns_in,
    n_columns,
    OPS: tl.constexpr,
    READS: tl.constexpr,
    NUMBERS: tl.constexpr,
    I: tl.constexpr,
):
    """The result of one instruction; NaN stays NaN."""
    OP: tl.constexpr = OPS[I]
    PAIR: tl.constexpr = READS[I]
    N: tl.constexpr = NUMBERS[I]
    x = values[PAIR[0]]
    if OP == "add":
        y = x + values[PAIR[1]]
    elif OP == "sub":
        y = x - values[PAIR[1]]
    elif OP == "mul":
        y = x * values[PAIR[1]]
    elif OP == "div":
        y = x / values[PAIR[1]]
    elif OP == "quotient":
        y = quotient(x, values[PAIR[1]])
    elif OP == "maximum":
        y = _maximum(x, values[PAIR[1]])
    elif OP == "minimum":
        y = -_maximum(-x, -values[PAIR[1]])
    elif OP == "plus":
        y = x + N[0]
    elif OP == "times":
        y = x * N[0]
    elif OP == "over":
        y = x / N[0]
    elif OP == "at_least":
        y = tl.where(x < N[0], N[0], x)
    elif OP == "at_most":
        y = tl.where(x > N[0], N[0], x)
    elif OP == "power":
        y = _power(x, N[0])
    elif OP == "round":
        y = _rounded(x, N[0])
    elif OP == "whole":  # half to even, up to 2²²
        y = (x + 12582912.0) - 12582912.0
    elif (
        OP == "softmax"
        or OP == "log_softmax"
        or OP == "standardize"
        or OP == "normalize"
        or OP == "mean"
        or OP == "sum"
        or OP == "amax"
        or OP == "amin"
    ):
        y = _along_row(x, columns_in, n_columns, OP, N[0])
    else:
        y = _function(x, OP, N)
    return y


@triton.jit
def _function(x, OP: tl.constexpr, N: tl.constexpr):
    """A function of one number."""
    if OP == "exp":
        y = tl.exp(x)
    elif OP == "log":
        y = tl.log(x)
    elif OP == "sqrt":
        y = tl.sqrt(x)
    elif OP == "rsqrt":
        y = 1.0 / tl.sqrt(x)
    elif OP == "reciprocal":
        y = 1.0 / x
    elif OP == "neg":
        y = -x
    elif OP == "abs":
        y = tl.abs(x)
    elif OP == "erf":
        y = tl.erf(x)
    elif OP == "sin":
        y = tl.sin(x)
    elif OP == "cos":
        y = tl.cos(x)
    elif OP == "leaky_relu":
        y = tl.where(x < 0, x * N[0], x)
    elif OP == "elu":
        y = tl.where(x > 0, x * N[1], _expm1(x * N[2]) * (N[0] * N[1]))
    elif OP == "softplus":
        y = tl.where(x * N[0] > N[1], x, _softplus(x * N[0]) / N[0])
    elif OP == "gelu":
        y = _gelu(x)
    elif OP == "mish":
        y = x * activate(_softplus(x), "tanh")
    else:
        y = activate(x, OP)
    return y


@triton.jit
def _along_row(x, columns_in, n_columns, OP: tl.constexpr, EPSILON: tl.constexpr):
    """What needs the whole row [rows, columns]; a reduction makes [rows, 1]."""
    if OP == "softmax" or OP == "log_softmax" or OP == "amax":
        x = tl.where(columns_in, x, -_INFINITY)
    elif OP == "amin":
        x = tl.where(columns_in, x, _INFINITY)
    else:
        x = tl.where(columns_in, x, 0.0)
    if OP == "softmax":
        e = tl.exp(x - tl.max(x, 1)[:, None])
        y = e / tl.sum(e, 1)[:, None]
    elif OP == "log_softmax":
        x = x - tl.max(x, 1)[:, None]
        y = x - tl.log(tl.sum(tl.exp(x), 1))[:, None]
    elif OP == "standardize":
        x = tl.where(columns_in, x - (tl.sum(x, 1) / n_columns)[:, None], 0.0)
        y = x / tl.sqrt(tl.sum(x * x, 1) / n_columns + EPSILON)[:, None]
    elif OP == "normalize":
        y = x / tl.sqrt(tl.sum(x * x, 1) / n_columns + EPSILON)[:, None]
    elif OP == "mean":
        y = (tl.sum(x, 1) / n_columns)[:, None]
    elif OP == "sum":
        y = tl.sum(x, 1)[:, None]
    else:
        nan = tl.max((x != x).to(tl.int32), 1)
        extreme = tl.max(x, 1) if OP == "amax" else tl.min(x, 1)
        y = tl.where(nan != 0, float("nan"), extreme)[:, None]
    return y


@triton.jit
def _maximum(x, y):
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def _power(x, EXPONENT: tl.constexpr):
    """The exponents that ``generated.POWERS`` lists."""
    if EXPONENT == 2:
        y = x * x
    elif EXPONENT == 3:
        y = x * x * x
    elif EXPONENT == 4:
        y = (x * x) * (x * x)
    elif EXPONENT == 0.5:
        y = tl.sqrt(x)
    elif EXPONENT == -0.5:
        y = 1.0 / tl.sqrt(x)
    else:
        tl.static_assert(EXPONENT == -1)
        y = 1.0 / x
    return y


@triton.jit
def _rounded(x, BITS: tl.constexpr):
    """To float16 (11 bits) or bfloat16 (8 bits), and back."""
    if BITS == 11:
        y = x.to(tl.float16)
    else:
        y = x.to(tl.bfloat16)
    return y.to(tl.float32)


@triton.jit
def _gelu(x):
    """½x(1 + erf(x/√2)), where 1 − erf is Abramowitz and Stegun's 7.1.26, right to 1.5e-7."""
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    series = t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    half = 0.5 * x * t * (0.254829592 + series) * tl.exp(-z * z)
    return tl.where(x < 0, half, x - half)


@triton.jit
def _expm1(x):
    # near zero exp(x) − 1 cancels: the series is right to 3e-8 below 0.1
    series = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666667 + x * 0.008333333))))
    return tl.where(tl.abs(x) < 0.1, series, tl.exp(x) - 1.0)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), from a number ≤ 1 whose logarithm is taken of what is left."""
    e = tl.exp(-tl.abs(x))
    small = e * (1.0 - e * (0.5 - e * (0.33333333 - e * 0.25)))
    return tl.where(x > 0, x, 0.0) + tl.where(e < 0.01, small, tl.log(1.0 + e))
