"""Device code of gradients with the sums of their columns in one pass: of a GELU and of the bias
before it, and of attention's queries, keys and values side by side. For products of 8-bit numbers
the same as such, and a GELU itself."""

from __future__ import annotations

import triton
import triton.language as tl

from tessella.kernels.epilogue.triton_device import activate, cast, quotient

_SMALLEST: tl.constexpr = tl.constexpr(2.0**-100)  # as nn.fp8 has it


@triton.jit
def _gelu_slope(x):
    """Of ``x · Φ(x)``, with Φ after Abramowitz and Stegun, 7.1.26: within 1.5e-7, by the one
    exponential that the density needs anyway.
    """
    z = tl.abs(x) * 0.7071067811865476
    density = tl.exp2(z * z * -1.4426950408889634)
    t = 1 / (1 + 0.3275911 * z)
    tail = t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))
    tail = 0.5 * density * t * (0.254829592 + t * (-0.284496736 + tail))
    return tl.where(x < 0, tail, 1 - tail) + x * density * 0.3989422804014327


@triton.jit
def _gelu_tanh_slope(x):
    """Of ``x / 2 · (1 + tanh u)`` with ``u = √(2/π) (x + 0.044715 x³)``."""
    squared = x * x
    u = 0.7978845608028654 * x * (1 + 0.044715 * squared)
    small = tl.exp2(tl.abs(u) * -2.8853900817779268)  # which does not overflow
    share = tl.where(u < 0, small, 1.0) / (1 + small)  # (1 + tanh u) / 2
    inner = 0.7978845608028654 * (1 + 3 * 0.044715 * squared)
    return share + 2 * x * share * (1 - share) * inner


@triton.jit
def gelu_gradient_kernel(
    x_pointer, bias_pointer, gradient_pointer, out_pointer, sums_pointer, rows, width,
    codes_pointer, scales_pointer, factors_pointer, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TANH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Gradients of rows [rows, width] of ``gelu(x + bias)``, and the block's sums of their columns,
    [programs, width].

    With ``codes_pointer`` also as 8-bit numbers, each column times its factor before, and the scale
    of each row; a tile then has whole rows.
    """
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    bias = tl.load(bias_pointer + columns, mask=inside, other=0.0)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        offsets = row.to(tl.int64)[:, None] * width + columns[None, :]
        there = (row < rows)[:, None] & inside[None, :]
        x = tl.load(x_pointer + offsets, mask=there, other=0.0).to(tl.float32) + bias
        gradient = tl.load(gradient_pointer + offsets, mask=there, other=0.0).to(tl.float32)
        if TANH:
            made = gradient * _gelu_tanh_slope(x)
        else:
            made = gradient * _gelu_slope(x)
        tl.store(out_pointer + offsets, cast(made, out_pointer.dtype.element_ty), mask=there)
        total += made
        if codes_pointer is not None:
            factors = tl.load(factors_pointer + columns, mask=inside, other=0.0)[None, :]
            made = tl.where(there, made * factors, 0.0)
            scale = _scale(tl.max(tl.abs(made), 1), MOST)
            tl.store(scales_pointer + row, scale, mask=row < rows)
            codes = cast(quotient(made, scale[:, None]), codes_pointer.dtype.element_ty)
            tl.store(codes_pointer + offsets, codes, mask=there)
    own = sums_pointer + tl.program_id(0) * width + columns
    tl.store(own, tl.sum(total, 0), mask=inside)


@triton.jit
def _scale(largest, MOST: tl.constexpr):
    """By what numbers are divided of which the largest becomes ``MOST``."""
    return tl.div_rn(tl.maximum(largest, _SMALLEST), MOST)


@triton.jit
def rounded_gelu_kernel(
    x_pointer, bias_pointer, out_pointer, codes_pointer, scales_pointer, width,
    COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """A row of ``gelu(x + bias)``, and the same as 8-bit numbers with their scale."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    inside = columns < width
    x = tl.load(x_pointer + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    made = activate(x + tl.load(bias_pointer + columns, mask=inside, other=0.0), ACTIVATION)
    made = cast(tl.where(inside, made, 0.0), out_pointer.dtype.element_ty)
    tl.store(out_pointer + row * width + columns, made, mask=inside)
    made = made.to(tl.float32)
    scale = _scale(tl.max(tl.abs(made), 0), MOST)
    tl.store(scales_pointer + row, scale)
    codes = cast(quotient(made, scale), codes_pointer.dtype.element_ty)
    tl.store(codes_pointer + row * width + columns, codes, mask=inside)


@triton.jit
def rounded_join_kernel(
    first_pointer, second_pointer, third_pointer, out_pointer, sums_pointer, codes_pointer,
    scales_pointer, factors_pointer, rows, width, COLUMNS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """As ``joined_kernel``, whole rows; also as 8-bit numbers, each column times its factor before,
    and the scale of each row."""
    columns = tl.arange(0, COLUMNS)
    inside = columns < width
    one = tl.load(factors_pointer + columns, mask=inside, other=0.0)
    two = tl.load(factors_pointer + width + columns, mask=inside, other=0.0)
    three = tl.load(factors_pointer + 2 * width + columns, mask=inside, other=0.0)
    first_sum = tl.zeros([COLUMNS], tl.float32)
    second_sum = tl.zeros([COLUMNS], tl.float32)
    third_sum = tl.zeros([COLUMNS], tl.float32)
    for start in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.zeros([1], tl.int64) + start
        first = tl.load(first_pointer + row * width + columns, mask=inside, other=0.0)
        second = tl.load(second_pointer + row * width + columns, mask=inside, other=0.0)
        third = tl.load(third_pointer + row * width + columns, mask=inside, other=0.0)
        to = row * 3 * width + columns
        tl.store(out_pointer + to, first, mask=inside)
        tl.store(out_pointer + to + width, second, mask=inside)
        tl.store(out_pointer + to + 2 * width, third, mask=inside)
        first_sum += first.to(tl.float32)
        second_sum += second.to(tl.float32)
        third_sum += third.to(tl.float32)
        a, b, c = (
            first.to(tl.float32) * one,
            second.to(tl.float32) * two,
            third.to(tl.float32) * three,
        )
        largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.abs(c))
        scale = _scale(tl.max(largest, 0), MOST)
        tl.store(scales_pointer + start, scale)
        dtype: tl.constexpr = codes_pointer.dtype.element_ty
        tl.store(codes_pointer + to, cast(quotient(a, scale), dtype), mask=inside)
        tl.store(codes_pointer + to + width, cast(quotient(b, scale), dtype), mask=inside)
        tl.store(codes_pointer + to + 2 * width, cast(quotient(c, scale), dtype), mask=inside)
    own = sums_pointer + tl.program_id(0) * 3 * width + columns
    tl.store(own, first_sum, mask=inside)
    tl.store(own + width, second_sum, mask=inside)
    tl.store(own + 2 * width, third_sum, mask=inside)


@triton.jit
def joined_kernel(
    first_pointer, second_pointer, third_pointer, out_pointer, sums_pointer, rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Three matrices [rows, width] as one [rows, 3, width], and the block's sums of its columns,
    [programs, 3, width]."""
    which = tl.program_id(2)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    pointer = first_pointer
    if which == 1:
        pointer = second_pointer
    if which == 2:
        pointer = third_pointer
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        offsets = row.to(tl.int64)[:, None] * width + columns[None, :]
        there = (row < rows)[:, None] & inside[None, :]
        x = tl.load(pointer + offsets, mask=there, other=0.0)
        to = (row.to(tl.int64) * 3 + which)[:, None] * width + columns[None, :]
        tl.store(out_pointer + to, x, mask=there)
        total += x.to(tl.float32)
    own = sums_pointer + (tl.program_id(0) * 3 + which) * width + columns
    tl.store(own, tl.sum(total, 0), mask=inside)
