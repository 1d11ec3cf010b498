"""Device code of a layer norm's gradients in one pass: of what is normalized, of its parameters,
and of the sum before it.

Each block takes every ``programs``-th tile of rows, and keeps the columns' sums until its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tessella.kernels.epilogue.triton_device import cast


@triton.jit
def _tile(
    start, columns, x_pointer, first_pointer, second_pointer, beside_pointer, rows, width,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Values of a tile as they lie in memory; what has no pointer is the first gradient again."""
    row = start + tl.arange(0, ROWS)
    offsets = row.to(tl.int64)[:, None] * width + columns[None, :]
    there = (row < rows)[:, None] & (columns < width)[None, :]
    x = tl.load(x_pointer + offsets, mask=there, other=0.0)
    first = tl.load(first_pointer + offsets, mask=there, other=0.0)
    second = first
    beside = first
    if second_pointer is not None:
        second = tl.load(second_pointer + offsets, mask=there, other=0.0)
    if beside_pointer is not None:
        beside = tl.load(beside_pointer + offsets, mask=there, other=0.0)
    return x, first, second, beside


@triton.jit
def layer_gradients_kernel(
    x_pointer, mean_pointer, inverse_pointer, weight_pointer, first_pointer, second_pointer,
    beside_pointer, out_pointer, low_pointer, sums_pointer, rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Gradients of rows [rows, width], and the block's sums [programs, SUMS, width].

    A tile is loaded while the one before it is computed.

    Args:
        first_pointer, second_pointer: gradients of the norm's result, which are added; or None.
        beside_pointer: a gradient that what is normalized gets from elsewhere; or None.
        low_pointer: where the gradient goes once more, as another type; or None.
        SUMS: 2, of the weight's and the bias's gradients; 3: and of ``out``.
    """
    columns = tl.arange(0, COLUMNS)
    inside = columns < width
    weight = tl.load(weight_pointer + columns, mask=inside, other=0.0)[None, :]
    of_weight = tl.zeros([COLUMNS], tl.float32)
    of_bias = tl.zeros([COLUMNS], tl.float32)
    of_out = tl.zeros([COLUMNS], tl.float32)
    stride = tl.num_programs(0) * ROWS
    given, first, second, beside = _tile(
        tl.program_id(0) * ROWS, columns, x_pointer, first_pointer, second_pointer, beside_pointer,
        rows, width, ROWS,
    )  # fmt: skip
    for start in range(tl.program_id(0) * ROWS, rows, stride):
        next_given, next_first, next_second, next_beside = _tile(
            start + stride, columns, x_pointer, first_pointer, second_pointer, beside_pointer,
            rows, width, ROWS,
        )  # fmt: skip
        row = start + tl.arange(0, ROWS)
        offsets = row.to(tl.int64)[:, None] * width + columns[None, :]
        there = (row < rows)[:, None] & inside[None, :]
        mean = tl.load(mean_pointer + row, mask=row < rows, other=0.0)[:, None]
        inverse = tl.load(inverse_pointer + row, mask=row < rows, other=0.0)[:, None]
        gradient = first.to(tl.float32)
        if second_pointer is not None:
            gradient += second.to(tl.float32)
        x = tl.where(there, (given.to(tl.float32) - mean) * inverse, 0.0)
        of_weight += tl.sum(gradient * x, 0)
        of_bias += tl.sum(gradient, 0)
        gradient *= weight
        slope = tl.sum(gradient * x, 1)[:, None] / width
        constant = tl.sum(gradient, 1)[:, None] / width
        made = inverse * (gradient - constant - x * slope)
        if beside_pointer is not None:
            made += beside.to(tl.float32)
        tl.store(out_pointer + offsets, cast(made, out_pointer.dtype.element_ty), mask=there)
        if low_pointer is not None:
            tl.store(low_pointer + offsets, cast(made, low_pointer.dtype.element_ty), mask=there)
        if SUMS == 3:
            of_out += tl.sum(tl.where(there, made, 0.0), 0)
        given, first, second, beside = next_given, next_first, next_second, next_beside
    own = sums_pointer + tl.program_id(0) * SUMS * width + columns
    tl.store(own, of_weight, mask=inside)
    tl.store(own + width, of_bias, mask=inside)
    if SUMS == 3:
        tl.store(own + 2 * width, of_out, mask=inside)
