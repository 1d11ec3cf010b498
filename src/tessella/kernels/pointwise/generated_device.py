"""One Triton kernel for all programs: it interprets a program while it is compiled.

The program, the strides and the sizes are compile-time tuples, so what runs is straight-line code.
Values are float32 tiles of rows and columns; a value that is the same in all rows, or in all
columns, stays one row or one column. No inline assembly: Triton's interpreter runs it too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tessella.device.overlap import await_earlier
from tessella.kernels.epilogue.triton_device import cast
from tessella.kernels.shared.instructions_device import instruction


@triton.jit
def program_kernel(
    inputs,  # the first again where there are fewer than the most
    outputs,  # the same
    n_rows,
    n_units,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    UNIT: tl.constexpr,  # columns = n_units · UNIT: what is known to divide them
    OPS: tl.constexpr,
    READS: tl.constexpr,
    NUMBERS: tl.constexpr,
    RESULTS: tl.constexpr,
    SIZES: tl.constexpr,  # of the row axes but the slowest, the slowest first
    STRIDES: tl.constexpr,  # of each tensor, inputs first; along the row axes, then the columns
    FORMS: tl.constexpr,  # of each tensor: "tile", "row", "column" or "one"
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    await_earlier(OVERLAP)
    n_columns = n_units * UNIT
    tiles = tl.cdiv(n_columns, TILE_COLUMNS)
    tile = tl.program_id(0)
    rows = (tile // tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = (tile % tiles) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    columns_in = (columns < n_columns)[None, :]
    places = (rows, columns, (rows < n_rows)[:, None], columns_in)
    values = ()
    for i in tl.static_range(INPUTS):
        x = _load(inputs[i], places, SIZES, STRIDES, FORMS, i)
        values = values + (x,)  # noqa: RUF005
    for i in tl.static_range(len(OPS)):
        x = instruction(values, columns_in, n_columns, OPS, READS, NUMBERS, i)
        values = values + (x,)  # noqa: RUF005
    for i in tl.static_range(OUTPUTS):
        x = _value(values, RESULTS, i)
        _store(outputs[i], x, places, SIZES, STRIDES, FORMS, INPUTS + i)


@triton.jit
def _value(values, NUMBERS: tl.constexpr, I: tl.constexpr):
    return values[NUMBERS[I]]


@triton.jit
def _offsets(rows, SIZES: tl.constexpr, STRIDES: tl.constexpr):
    """The offset at which each row begins, in elements."""
    rest = rows
    offsets = rows * 0
    for i in tl.static_range(len(SIZES)):
        # a name for the size would be bound twice, which Triton's compiler does not take
        offsets += rest % SIZES[len(SIZES) - 1 - i] * STRIDES[len(SIZES) - i]
        rest = rest // SIZES[len(SIZES) - 1 - i]
    return offsets + rest * STRIDES[0]


@triton.jit
def _load(
    pointer, places, SIZES: tl.constexpr, ALL_STRIDES: tl.constexpr, FORMS: tl.constexpr,
    I: tl.constexpr,
):  # fmt: skip
    """An input in float32: [rows, columns], [1, columns], [rows, 1] or [1, 1].

    ``places``: rows, columns, and which of both there are.
    """
    rows, columns, rows_in, columns_in = places
    STRIDES: tl.constexpr = ALL_STRIDES[I]
    FORM: tl.constexpr = FORMS[I]
    if FORM == "tile":
        STEP: tl.constexpr = STRIDES[len(SIZES) + 1]
        offsets = _offsets(rows, SIZES, STRIDES)[:, None] + columns[None, :] * STEP
        x = tl.load(pointer + offsets, mask=rows_in & columns_in, other=0.0)
    elif FORM == "row":
        x = tl.load(
            pointer + columns[None, :] * STRIDES[len(SIZES) + 1], mask=columns_in, other=0.0
        )
    elif FORM == "column":
        x = tl.load(pointer + _offsets(rows, SIZES, STRIDES)[:, None], mask=rows_in, other=0.0)
    else:
        x = tl.load(pointer + tl.zeros([1, 1], tl.int32))
    return x.to(tl.float32)


@triton.jit
def _store(
    pointer, x, places, SIZES: tl.constexpr, ALL_STRIDES: tl.constexpr, FORMS: tl.constexpr,
    I: tl.constexpr,
):  # fmt: skip
    rows, columns, rows_in, columns_in = places
    STRIDES: tl.constexpr = ALL_STRIDES[I]
    FORM: tl.constexpr = FORMS[I]
    if FORM == "column":  # one number a row, made by a reduction
        offsets, mask = _offsets(rows, SIZES, STRIDES)[:, None], rows_in
    else:
        STEP: tl.constexpr = STRIDES[len(SIZES) + 1]
        offsets = _offsets(rows, SIZES, STRIDES)[:, None] + columns[None, :] * STEP
        mask = rows_in & columns_in
    x = tl.broadcast_to(x, offsets.shape)
    tl.store(pointer + offsets, cast(x, pointer.dtype.element_ty), mask=mask)
