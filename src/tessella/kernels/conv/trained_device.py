"""Device code of the input's gradient of a depthwise convolution with a stride, channels_last."""

from __future__ import annotations

import triton
import triton.language as tl

from tessella.kernels.conv.channelwise_device import floats, is_below


@triton.jit
def strided_gradient_kernel(
    gradient_pointer, w_pointer, out_pointer, threads, vectors, across, down, channels, height,
    width, out_height, out_width, WINDOW: tl.constexpr, PITCH: tl.constexpr, THREADS: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """The gradient of x: a thread makes as many rows and columns of it as the stride has.

    Args:
        threads: images · down · across · vectors.
        WINDOW: (filter, stride, padding), each along height and width.
        PITCH: between a filter's taps.
    """
    ROWS: tl.constexpr = steps_back(WINDOW, 0)
    COLUMNS: tl.constexpr = steps_back(WINDOW, 1)
    thread = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    channel = (thread % vectors)[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
    rest = thread // vectors
    v = rest % across
    u = rest // across % down
    image = (rest // (across * down)).to(tl.int64)
    there = thread < threads
    at = gradient_pointer + channel
    at += (((image * out_height + u) * out_width + v) * channels)[:, None]
    values = ()
    DOWN: tl.constexpr = len(ROWS)
    ACROSS: tl.constexpr = len(COLUMNS)
    for a in tl.static_range(DOWN):
        for b in tl.static_range(ACROSS):
            mask = is_below(u + ROWS[a], out_height) & is_below(v + COLUMNS[b], out_width) & there
            moved = at + (ROWS[a] * out_width + COLUMNS[b]) * channels
            value = tl.load(moved, mask=mask[:, None], other=0.0)
            values = values + (value,)  # noqa: RUF005
    numbers = floats(values)
    H: tl.constexpr = WINDOW[1][0]
    W: tl.constexpr = WINDOW[1][1]
    R: tl.constexpr = WINDOW[0][0]
    S: tl.constexpr = WINDOW[0][1]
    row, column = u * H, v * W
    to = out_pointer + channel + (((image * height + row) * width + column) * channels)[:, None]
    for a in tl.static_range(H):
        for b in tl.static_range(W):
            total = tl.zeros(channel.shape, tl.float32)
            for i in tl.static_range(R):
                for j in tl.static_range(S):
                    if meets(WINDOW, 0, a, i) and meets(WINDOW, 1, b, j):
                        number = numbers[index_of(WINDOW, a, b, i, j)]
                        tap = tl.load(w_pointer + (i * S + j) * PITCH + channel)
                        total = tl.fma(number, tap, total)
            mask = (row + a < height) & (column + b < width) & there
            made = total.to(out_pointer.dtype.element_ty)
            tl.store(to + (a * width + b) * channels, made, mask=mask[:, None])


@triton.constexpr_function
def meets(window, axis, at, tap):
    """Whether a place of x, from the first of a stride on, is under this tap of an output."""
    return (at + window[2][axis] - tap) % window[1][axis] == 0


@triton.constexpr_function
def steps_back(window, axis):
    """From the output of the same number, the steps to all that read a stride's places of x."""
    taps, stride, padding = (pair[axis] for pair in window)
    met = [(a + padding - t, stride) for a in range(stride) for t in range(taps)]
    return tuple(sorted({far // stride for far, stride in met if far % stride == 0}))


@triton.constexpr_function
def index_of(window, a, b, i, j):
    """Which of the outputs by ``steps_back`` has x's place (a, b) under its tap (i, j)."""
    rows, columns = steps_back(window, 0), steps_back(window, 1)
    row = rows.index((a + window[2][0] - i) // window[1][0])
    return row * len(columns) + columns.index((b + window[2][1] - j) // window[1][1])
