"""The kernel of pooling: element-wise steps, windows, element-wise steps, in plain Triton.

A tile is some output pixels by some channels, or some planes by some pixels: what lies together in
memory is the tile's second axis. Sums are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tessella.device.overlap import await_earlier
from tessella.kernels.epilogue.triton_device import cast
from tessella.kernels.shared.instructions_device import steps


class Window(NamedTuple):
    """The windows, and the images that they lie on.

    Attributes:
        MEAN: of a window, else its maximum.
        PADDED: the padding counts in the mean.
        DIVISOR: of the mean; 0: the number of pixels.
    """

    CHANNELS: int
    HEIGHT: int
    WIDTH: int
    OUT_HEIGHT: int
    OUT_WIDTH: int
    KERNEL_H: int
    KERNEL_W: int
    STRIDE_H: int
    STRIDE_W: int
    PADDING_H: int
    PADDING_W: int
    DILATION_H: int
    DILATION_W: int
    MEAN: bool
    PADDED: bool
    DIVISOR: int


@triton.jit
def window_kernel(
    pointers,  # what is read before the windows, then after them
    y_pointer,
    n_rows,
    FIRST: tl.constexpr,
    WINDOW: tl.constexpr,
    THEN: tl.constexpr,
    STRIDES: tl.constexpr,  # of each tensor along [N, C, H, W], 0 where broadcast; y's last
    LAST: tl.constexpr,  # channels are the tile's columns
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    KERNEL_H: tl.constexpr = WINDOW.KERNEL_H
    KERNEL_W: tl.constexpr = WINDOW.KERNEL_W
    BEFORE: tl.constexpr = FIRST.COUNT
    AFTER: tl.constexpr = THEN.COUNT
    await_earlier(OVERLAP)
    x0 = pointers[0]
    PIXELS: tl.constexpr = WINDOW.OUT_HEIGHT * WINDOW.OUT_WIDTH
    COLUMNS: tl.constexpr = WINDOW.CHANNELS if LAST else PIXELS
    TILES: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    BARE: tl.constexpr = len(FIRST.OPS) == 0
    tile = tl.program_id(0)
    rows = ((tile // TILES) * TILE_ROWS + tl.arange(0, TILE_ROWS))[:, None]
    columns = ((tile % TILES) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS))[None, :]
    columns_in = columns < COLUMNS
    inside = (rows < n_rows) & columns_in
    if LAST:
        n, pixels, c = rows // PIXELS, rows % PIXELS, columns
    else:
        n, pixels, c = rows // WINDOW.CHANNELS, columns, rows % WINDOW.CHANNELS
    p, q = pixels // WINDOW.OUT_WIDTH, pixels % WINDOW.OUT_WIDTH
    top = p * WINDOW.STRIDE_H - WINDOW.PADDING_H
    left = q * WINDOW.STRIDE_W - WINDOW.PADDING_W
    if WINDOW.MEAN:
        made = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    elif BARE and x0.dtype.element_ty == tl.int8:  # int8 to float32 has a quarter of the rate
        made = tl.full([TILE_ROWS, TILE_COLUMNS], -128, tl.int16)
    elif BARE and x0.dtype.element_ty == tl.float16:  # two at a time
        made = tl.full([TILE_ROWS, TILE_COLUMNS], float("-inf"), tl.float16)
    else:
        made = tl.full([TILE_ROWS, TILE_COLUMNS], float("-inf"), tl.float32)
    for r in tl.static_range(KERNEL_H):
        for s in tl.static_range(KERNEL_W):
            h = top + r * WINDOW.DILATION_H
            w = left + s * WINDOW.DILATION_W
            there = inside & (h >= 0) & (h < WINDOW.HEIGHT) & (w >= 0) & (w < WINDOW.WIDTH)
            tap = (n, c, h, w)
            if WINDOW.MEAN and BARE:
                x = _load(x0, tap, there, columns_in, 0, STRIDES, LAST, 0)
                made += x.to(tl.float32)
            elif WINDOW.MEAN:
                x = _before(pointers, tap, there, columns_in, FIRST, STRIDES, LAST)
                made += tl.where(there, x, 0.0)
            elif not BARE:
                x = _before(pointers, tap, there, columns_in, FIRST, STRIDES, LAST)
                x = tl.where(there, x, float("-inf"))
                made = tl.maximum(made, x, propagate_nan=tl.PropagateNan.ALL)
            elif x0.dtype.element_ty == tl.int8:
                # chosen apart: four bytes of a load become 0x80, 0xff, 0xff, 0xff for other=-128
                x = _load(x0, tap, there, columns_in, 0, STRIDES, LAST, 0).to(tl.int16)
                made = tl.maximum(made, tl.where(there, x, -128))
            else:
                x = _load(x0, tap, there, columns_in, float("-inf"), STRIDES, LAST, 0)
                x = x.to(made.dtype)
                made = tl.maximum(made, x, propagate_nan=tl.PropagateNan.ALL)
    if WINDOW.MEAN:
        if WINDOW.DIVISOR != 0:
            made = made / WINDOW.DIVISOR
        else:
            tall = _overlap(top, KERNEL_H, WINDOW.HEIGHT, WINDOW.PADDING_H, WINDOW.PADDED)
            wide = _overlap(left, KERNEL_W, WINDOW.WIDTH, WINDOW.PADDING_W, WINDOW.PADDED)
            made = made / (tall * wide).to(tl.float32)
    place = (n, c, p, q)
    if len(THEN.OPS) == 0:
        y = made.to(y_pointer.dtype.element_ty)
    else:
        values = (made.to(tl.float32),)
        for i in tl.static_range(AFTER):
            read = pointers[BEFORE + i]
            x = _load(read, place, inside, columns_in, 0.0, STRIDES, LAST, BEFORE + i)
            values = values + (x.to(tl.float32),)  # noqa: RUF005
        y = steps(values, THEN)
        y = cast(y, y_pointer.dtype.element_ty)
        y = tl.broadcast_to(y, [TILE_ROWS, TILE_COLUMNS])
    tl.store(y_pointer + _offsets(place, STRIDES, BEFORE + AFTER), y, mask=inside)


@triton.jit
def _before(
    pointers, place, there, columns_in,
    FIRST: tl.constexpr, STRIDES: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The pixels at one tap of every window, in float32, after the steps before the pooling."""
    COUNT: tl.constexpr = FIRST.COUNT
    values = ()
    for i in tl.static_range(COUNT):
        x = _load(pointers[i], place, there, columns_in, 0.0, STRIDES, LAST, i)
        values = values + (x.to(tl.float32),)  # noqa: RUF005
    return steps(values, FIRST)


@triton.jit
def _offsets(place, STRIDES: tl.constexpr, I: tl.constexpr):
    n, c, h, w = place
    STEPS: tl.constexpr = STRIDES[I]
    return n * STEPS[0] + c * STEPS[1] + h * STEPS[2] + w * STEPS[3]


@triton.jit
def _load(
    pointer, place, there, columns_in, OTHER: tl.constexpr, STRIDES: tl.constexpr,
    LAST: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """Elements of a tensor at (n, c, h, w); one row or one number where it has no more."""
    STEPS: tl.constexpr = STRIDES[I]
    if STEPS[0] == 0 and STEPS[1] == 0 and STEPS[2] == 0 and STEPS[3] == 0:
        x = tl.load(pointer + tl.zeros([1, 1], tl.int32))
    elif LAST and STEPS[0] == 0 and STEPS[2] == 0 and STEPS[3] == 0:
        x = tl.load(pointer + place[1] * STEPS[1], mask=columns_in, other=OTHER)
    else:
        x = tl.load(pointer + _offsets(place, STRIDES, I), mask=there, other=OTHER)
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
