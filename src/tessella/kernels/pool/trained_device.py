"""Device code of max pooling in training; pixels are rows, as in ``kernels.norm.batch_device``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pixels(ROWS: tl.constexpr, rows, height, width):
    """Some pixels: their number, image, row and column."""
    pixel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    image = pixel // (height * width)
    rest = pixel % (height * width)
    return pixel, image, rest // width, rest % width, pixel < rows


@triton.jit
def largest_kernel(
    x_pointer, y_pointer, places_pointer, rows, channels, height, width, y_height, y_width,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr, PADDING_W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The largest of each window and its place in it; a NaN is larger than all before it."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pixel, image, y_row, y_column, there = _pixels(ROWS, rows, y_height, y_width)
    inside = columns < channels
    largest = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    places = tl.full([ROWS, COLUMNS], 255, tl.int32)
    for i in tl.static_range(KERNEL_H):
        for j in tl.static_range(KERNEL_W):
            row, column = y_row * STRIDE_H - PADDING_H + i, y_column * STRIDE_W - PADDING_W + j
            within = there & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            offsets = ((image * height + row) * width + column).to(tl.int64) * channels
            mask = within[:, None] & inside[None, :]
            x = tl.load(x_pointer + offsets[:, None] + columns[None, :], mask=mask, other=0.0)
            x = x.to(tl.float32)
            takes = mask & ((x > largest) | (x != x) | (places == 255))
            largest = tl.where(takes, x, largest)
            places = tl.where(takes, i * KERNEL_W + j, places)
    offsets = pixel.to(tl.int64)[:, None] * channels + columns[None, :]
    mask = there[:, None] & inside[None, :]
    tl.store(y_pointer + offsets, largest.to(y_pointer.dtype.element_ty), mask=mask)
    tl.store(places_pointer + offsets, places.to(tl.uint8), mask=mask)


@triton.jit
def gradient_kernel(
    gradient_pointer, places_pointer, out_pointer, rows, channels, height, width, y_height, y_width,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr, PADDING_W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sum of the gradients of those windows in which an input was the largest."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pixel, image, row, column, there = _pixels(ROWS, rows, height, width)
    inside = columns < channels
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for a in tl.static_range((KERNEL_H + STRIDE_H - 1) // STRIDE_H):
        for b in tl.static_range((KERNEL_W + STRIDE_W - 1) // STRIDE_W):
            y_row = (row + PADDING_H) // STRIDE_H - a
            y_column = (column + PADDING_W) // STRIDE_W - b
            i, j = row + PADDING_H - y_row * STRIDE_H, column + PADDING_W - y_column * STRIDE_W
            within = there & (y_row >= 0) & (y_row < y_height) & (i < KERNEL_H)
            within = within & (y_column >= 0) & (y_column < y_width) & (j < KERNEL_W)
            offsets = ((image * y_height + y_row) * y_width + y_column).to(tl.int64) * channels
            offsets = offsets[:, None] + columns[None, :]
            mask = within[:, None] & inside[None, :]
            place = tl.load(places_pointer + offsets, mask=mask, other=255).to(tl.int32)
            mask = mask & (place == (i * KERNEL_W + j)[:, None])
            total += tl.load(gradient_pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    offsets = pixel.to(tl.int64)[:, None] * channels + columns[None, :]
    mask = there[:, None] & inside[None, :]
    tl.store(out_pointer + offsets, total.to(out_pointer.dtype.element_ty), mask=mask)
