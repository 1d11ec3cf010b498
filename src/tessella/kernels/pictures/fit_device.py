"""Device code of pictures: chroma interpolated and colours as libjpeg's, resized as by Pillow.

All in the integers of these libraries, so that every bit is theirs. A table has a row of 14 numbers
for each picture (``fit``).
"""

from __future__ import annotations

import triton
import triton.language as tl

WIDTH: tl.constexpr = tl.constexpr(14)  # of a table


@triton.jit
def _chroma(plane, pitch, row, column, height, width, across, down, mask):
    """A row of chroma at places of the luma: libjpeg's "fancy" upsampling, 3 : 1 each way."""
    i, j = row // down, column // across
    # the neighbour on the side where the place lies in its sample; at the border, the sample itself
    above = tl.minimum(tl.maximum(i + (row % 2) * 2 - 1, 0), height - 1)
    beside = tl.minimum(tl.maximum(j + (column % 2) * 2 - 1, 0), width - 1)
    made = tl.load(plane + i * pitch + j, mask=mask, other=0).to(tl.int32)
    if across == 2:
        aside = tl.load(plane + i * pitch + beside, mask=mask, other=0).to(tl.int32)
        if down == 2:
            near = 3 * made + tl.load(plane + above * pitch + j, mask=mask, other=0)
            aside = 3 * aside + tl.load(plane + above * pitch + beside, mask=mask, other=0)
            made = (3 * near + aside + 8 - column % 2) >> 4
        else:
            made = (3 * made + aside + 1 + column % 2) >> 2
    return made - 128


@triton.jit
def _byte(x):
    return tl.minimum(tl.maximum(x, 0), 255)


@triton.jit
def colour_kernel(planes, table, out, LUMA: tl.constexpr, BLOCK: tl.constexpr):
    """Planes to pixels, red in the lowest byte of 32 bits; LUMA: grey by ITU-R 601."""
    at = table + tl.program_id(1) * WIDTH
    height, width = tl.load(at + 6).to(tl.int32), tl.load(at + 7).to(tl.int32)
    blocks = (width + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks
    if row < height:
        column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        mask = column < width
        line = planes + tl.load(at) + row * tl.load(at + 3)
        red = tl.load(line + column, mask=mask, other=0).to(tl.int32)
        green, blue = red, red
        across, down = tl.load(at + 8).to(tl.int32), tl.load(at + 9).to(tl.int32)
        if across > 0:
            rows, columns = (height + down - 1) // down, (width + across - 1) // across
            blues, reds = planes + tl.load(at + 1), planes + tl.load(at + 2)
            pitch = tl.load(at + 4)
            cb = _chroma(blues, pitch, row, column, rows, columns, across, down, mask)
            cr = _chroma(reds, pitch, row, column, rows, columns, across, down, mask)
            # libjpeg's tables: 1.402, 0.344, 0.714 and 1.772 in 16 bits after the point
            green = _byte(red + ((-22554 * cb - 46802 * cr + 32768) >> 16))
            blue = _byte(red + ((116130 * cb + 32768) >> 16))
            red = _byte(red + ((91881 * cr + 32768) >> 16))
        if LUMA:
            red = (299 * red + 587 * green + 114 * blue + 500) // 1000
        to = out + tl.load(at + 5) + row.to(tl.int64) * width
        tl.store(to + column, red | (green << 8) | (blue << 16), mask=mask)


@triton.jit
def fit_kernel(
    pixels, table, taps, out, height, width,
    CHANNELS: tl.constexpr, GREY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pixels of ``colour_kernel`` to [N, height, width, CHANNELS], some places of a row at a time.

    ``taps`` holds, for each place of a side, a first pixel and weights of 22 bits behind the point.
    The first pass, here the inner loop, goes along the rows; each rounds to whole numbers.
    """
    picture = tl.program_id(1)
    at = table + picture * WIDTH
    blocks = (width + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    wide, high = tl.load(at + 12).to(tl.int32), tl.load(at + 13).to(tl.int32)  # taps of a place
    columns = taps + tl.load(at + 10) + tl.minimum(column, width - 1) * (1 + wide)
    rows = taps + tl.load(at + 11) + row * (1 + high)
    top, left = tl.load(rows), tl.load(columns)
    shown = mask & (tl.minimum(top, left) >= 0)
    step = tl.load(at + 7)
    corner = pixels + tl.load(at + 5) + top * step + left
    red = tl.full([BLOCK], 1 << 21, tl.int32)
    green, blue = red, red
    for i in range(high):
        weight = tl.load(rows + 1 + i)
        r = tl.full([BLOCK], 1 << 21, tl.int32)
        g, b = r, r
        line = corner + i * step
        for j in range(wide):
            part = tl.load(columns + 1 + j)
            value = tl.load(line + j, mask=shown, other=0)
            r += (value & 255) * part
            g += ((value >> 8) & 255) * part
            b += ((value >> 16) & 255) * part
        red += _byte(r >> 22) * weight
        green += _byte(g >> 22) * weight
        blue += _byte(b >> 22) * weight
    out += ((picture.to(tl.int64) * height + row) * width + column) * CHANNELS
    tl.store(out, tl.where(shown, _byte(red >> 22), GREY).to(tl.uint8), mask=mask)
    if CHANNELS == 3:
        tl.store(out + 1, tl.where(shown, _byte(green >> 22), GREY).to(tl.uint8), mask=mask)
        tl.store(out + 2, tl.where(shown, _byte(blue >> 22), GREY).to(tl.uint8), mask=mask)
