"""The kernel of pooling: element-wise steps, windows, element-wise steps, in plain Triton.

A tile is some output pixels by some channels, or some planes by some pixels: what lies together in
memory is the tile's second axis. Sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tessella.device.overlap import await_earlier
from tessella.kernels.epilogue.triton_device import cast
from tessella.kernels.pointwise.generated_device import instruction


@triton.jit
def window_kernel(
    x0, x1, x2, x3, x4, x5, x6, x7,  # what is read before the windows, then after them
    y_pointer,
    n_rows,
    BEFORE: tl.constexpr,  # how many are read before
    AFTER: tl.constexpr,
    STRIDES: tl.constexpr,  # of each tensor along [N, C, H, W], 0 where broadcast; y's last
    OPS: tl.constexpr,  # before
    READS: tl.constexpr,
    NUMBERS: tl.constexpr,
    RESULT: tl.constexpr,
    OPS_AFTER: tl.constexpr,
    READS_AFTER: tl.constexpr,
    NUMBERS_AFTER: tl.constexpr,
    RESULT_AFTER: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    MEAN: tl.constexpr,
    PADDED: tl.constexpr,  # the padding counts in the mean
    DIVISOR: tl.constexpr,  # of the mean; 0: the number of pixels
    LAST: tl.constexpr,  # channels are the tile's columns
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    await_earlier(OVERLAP)
    pointers = (x0, x1, x2, x3, x4, x5, x6, x7)
    PIXELS: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    COLUMNS: tl.constexpr = CHANNELS if LAST else PIXELS
    TILES: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    BARE: tl.constexpr = len(OPS) == 0
    tile = tl.program_id(0)
    rows = ((tile // TILES) * TILE_ROWS + tl.arange(0, TILE_ROWS))[:, None]
    columns = ((tile % TILES) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS))[None, :]
    columns_in = columns < COLUMNS
    inside = (rows < n_rows) & columns_in
    if LAST:
        n, pixels, c = rows // PIXELS, rows % PIXELS, columns
    else:
        n, pixels, c = rows // CHANNELS, columns, rows % CHANNELS
    p, q = pixels // OUT_WIDTH, pixels % OUT_WIDTH
    top = p * STRIDE_H - PADDING_H
    left = q * STRIDE_W - PADDING_W
    if MEAN:
        made = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    elif BARE and x0.dtype.element_ty == tl.int8:  # int8 to float32 has a quarter of the rate
        made = tl.full([TILE_ROWS, TILE_COLUMNS], -128, tl.int16)
    elif BARE and x0.dtype.element_ty == tl.float16:  # two at a time
        made = tl.full([TILE_ROWS, TILE_COLUMNS], float("-inf"), tl.float16)
    else:
        made = tl.full([TILE_ROWS, TILE_COLUMNS], float("-inf"), tl.float32)
    for r in tl.static_range(KERNEL_H):
        for s in tl.static_range(KERNEL_W):
            h = top + r * DILATION_H
            w = left + s * DILATION_W
            there = inside & (h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH)
            if MEAN and BARE:
                x = _load(x0, n, c, h, w, there, columns_in, 0, STRIDES, LAST, 0)
                made += x.to(tl.float32)
            elif MEAN:
                x = _before(
                    pointers, n, c, h, w, there, columns_in,
                    BEFORE, STRIDES, OPS, READS, NUMBERS, RESULT, LAST,
                )  # fmt: skip
                made += tl.where(there, x, 0.0)
            elif not BARE:
                x = _before(
                    pointers, n, c, h, w, there, columns_in,
                    BEFORE, STRIDES, OPS, READS, NUMBERS, RESULT, LAST,
                )  # fmt: skip
                x = tl.where(there, x, float("-inf"))
                made = tl.maximum(made, x, propagate_nan=tl.PropagateNan.ALL)
            elif x0.dtype.element_ty == tl.int8:
                # chosen apart: four bytes of a load become 0x80, 0xff, 0xff, 0xff for other=-128
                x = _load(x0, n, c, h, w, there, columns_in, 0, STRIDES, LAST, 0).to(tl.int16)
                made = tl.maximum(made, tl.where(there, x, -128))
            else:
                x = _load(x0, n, c, h, w, there, columns_in, float("-inf"), STRIDES, LAST, 0)
                x = x.to(made.dtype)
                made = tl.maximum(made, x, propagate_nan=tl.PropagateNan.ALL)
    if MEAN:
        if DIVISOR != 0:
            made = made / DIVISOR
        else:
            tall = _overlap(top, KERNEL_H, HEIGHT, PADDING_H, PADDED)
            wide = _overlap(left, KERNEL_W, WIDTH, PADDING_W, PADDED)
            made = made / (tall * wide).to(tl.float32)
    if len(OPS_AFTER) == 0:
        y = made.to(y_pointer.dtype.element_ty)
    else:
        values = (made.to(tl.float32),)
        for i in tl.static_range(AFTER):
            x = _load(
                pointers[BEFORE + i], n, c, p, q, inside, columns_in, 0.0, STRIDES, LAST, BEFORE + i
            )
            values = values + (x.to(tl.float32),)  # noqa: RUF005
        y = steps(values, OPS_AFTER, READS_AFTER, NUMBERS_AFTER, RESULT_AFTER)
        y = cast(y, y_pointer.dtype.element_ty)
        y = tl.broadcast_to(y, [TILE_ROWS, TILE_COLUMNS])
    places = _places(n, c, p, q, STRIDES, BEFORE + AFTER)
    tl.store(y_pointer + places, y, mask=inside)


@triton.jit
def _before(
    pointers,
    n,
    c,
    h,
    w,
    there,
    columns_in,
    BEFORE: tl.constexpr,
    STRIDES: tl.constexpr,
    OPS: tl.constexpr,
    READS: tl.constexpr,
    NUMBERS: tl.constexpr,
    RESULT: tl.constexpr,
    LAST: tl.constexpr,
):
    """What is pooled at one tap of every window, in float32."""
    values = ()
    for i in tl.static_range(BEFORE):
        x = _load(pointers[i], n, c, h, w, there, columns_in, 0.0, STRIDES, LAST, i)
        values = values + (x.to(tl.float32),)  # noqa: RUF005
    return steps(values, OPS, READS, NUMBERS, RESULT)


@triton.jit
def steps(
    values,
    OPS: tl.constexpr,
    READS: tl.constexpr,
    NUMBERS: tl.constexpr,
    RESULT: tl.constexpr,
):
    """What the steps make of values."""
    for i in tl.static_range(len(OPS)):
        x = instruction(values, None, 0, OPS, READS, NUMBERS, i)
        values = values + (x,)  # noqa: RUF005
    return values[RESULT]


@triton.jit
def _places(n, c, h, w, STRIDES: tl.constexpr, I: tl.constexpr):
    STEPS: tl.constexpr = STRIDES[I]
    return n * STEPS[0] + c * STEPS[1] + h * STEPS[2] + w * STEPS[3]


@triton.jit
def _load(
    pointer,
    n,
    c,
    h,
    w,
    there,
    columns_in,
    OTHER: tl.constexpr,
    STRIDES: tl.constexpr,
    LAST: tl.constexpr,
    I: tl.constexpr,
):
    """Elements of a tensor; one row or one number where it has no more."""
    STEPS: tl.constexpr = STRIDES[I]
    if STEPS[0] == 0 and STEPS[1] == 0 and STEPS[2] == 0 and STEPS[3] == 0:
        x = tl.load(pointer + tl.zeros([1, 1], tl.int32))
    elif LAST and STEPS[0] == 0 and STEPS[2] == 0 and STEPS[3] == 0:
        x = tl.load(pointer + c * STEPS[1], mask=columns_in, other=OTHER)
    else:
        x = tl.load(pointer + _places(n, c, h, w, STRIDES, I), mask=there, other=OTHER)
    return x


@triton.jit
def _overlap(
    start, KERNEL: tl.constexpr, SIZE: tl.constexpr, PADDING: tl.constexpr, PADDED: tl.constexpr
):
    """How many places of a window lie on the image, or on it and its padding."""
    end = tl.minimum(start + KERNEL, SIZE + PADDING)
    if PADDED:
        n = end - start
    else:
        n = tl.minimum(end, SIZE) - tl.maximum(start, 0)
    return tl.maximum(n, 1)  # of places that are not stored
