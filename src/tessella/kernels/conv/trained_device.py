"""Device code of depthwise convolutions' gradients, of channels_last images.

As in ``channelwise_device`` a thread keeps sums, and goes down the rows: here those of a filter's
taps, to which each row of the gradient gives its products with as many rows of the input.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tessella.kernels.conv.channelwise_device import floats, is_below, zeros


@triton.jit
def weight_sums_kernel(
    gradient_pointer, x_pointer, sums_pointer, items, parts, across, channels, height, width,
    out_height, out_width, WINDOW: tl.constexpr, THREADS: tl.constexpr, VECTORS: tl.constexpr,
    VALUES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each part's sums for every tap, and of the gradient itself: [parts, taps + 1, channels].

    Args:
        items: runs of COLUMNS columns of all images; a part takes every ``parts``-th.
        across: runs in a row.
        WINDOW: (filter, stride, padding), each along height and width.
        VECTORS: of VALUES channels, in a block.
    """
    R: tl.constexpr = WINDOW[0][0]
    S: tl.constexpr = WINDOW[0][1]
    STRIDE: tl.constexpr = WINDOW[1]
    GROUP: tl.constexpr = STRIDE[0]
    LAG: tl.constexpr = (R - 1) // GROUP  # rows of the gradient that a row of x still meets
    COUNT: tl.constexpr = (COLUMNS - 1) * STRIDE[1] + S
    thread = tl.arange(0, THREADS)
    vector = tl.program_id(0) * VECTORS + thread % VECTORS
    channel = vector[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
    within = channel < channels
    part = tl.program_id(1) * (THREADS // VECTORS) + thread // VECTORS
    sums = zeros(channel, R * S + 1)
    for turn in range(tl.cdiv(items, parts)):
        item = part + turn * parts
        there = within & (item < items)[:, None] & (part < parts)[:, None]
        image = (item // across).to(tl.int64)
        q = item % across * COLUMNS
        v = q * STRIDE[1] - WINDOW[2][1]
        at_x = x_pointer + ((image * height * width + v) * channels)[:, None] + channel
        at_gradient = gradient_pointer + channel
        at_gradient += ((image * out_height * out_width + q) * channels)[:, None]
        window = zeros(channel, LAG * COLUMNS)
        for p in range(out_height + LAG):
            rows = tl.where(p < out_height, out_width, 0)
            newest = ()
            for i in tl.static_range(COLUMNS):
                mask = there & (q + i < rows)[:, None]
                at = at_gradient + (p * out_width + i) * channels
                newest = newest + (tl.load(at, mask=mask, other=0.0),)  # noqa: RUF005
            values = ()
            for g in tl.static_range(GROUP):
                h = p * STRIDE[0] - WINDOW[2][0] + g
                columns = tl.where(is_below(h, height), width, 0)
                for i in tl.static_range(COUNT):
                    mask = there & is_below(v + i, columns)[:, None]
                    at = at_x + (h * width + i) * channels
                    values = values + (tl.load(at, mask=mask, other=0.0),)  # noqa: RUF005
            window = window + floats(newest)
            sums = add_products(sums, floats(values), window, WINDOW, COLUMNS, LAG, COUNT)
            window = window[COLUMNS:]
    at_sums = sums_pointer + channel + (part * ((R * S + 1) * channels))[:, None]
    for tap in tl.static_range(R * S + 1):
        tl.store(at_sums + tap * channels, sums[tap], mask=within & (part < parts)[:, None])


@triton.jit
def add_products(sums, values, window, WINDOW: tl.constexpr, COLUMNS: tl.constexpr,
                 LAG: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    """All taps' sums, with the products of a step's rows of x; last that of the newest gradient."""
    R: tl.constexpr = WINDOW[0][0]
    S: tl.constexpr = WINDOW[0][1]
    STRIDE: tl.constexpr = WINDOW[1]
    made = ()
    for i in tl.static_range(R):
        for j in tl.static_range(S):
            total = sums[i * S + j]
            for column in tl.static_range(COLUMNS):
                value = values[i % STRIDE[0] * COUNT + column * STRIDE[1] + j]
                gradient = window[(LAG - i // STRIDE[0]) * COLUMNS + column]
                total = tl.fma(value, gradient, total)
            made = made + (total,)  # noqa: RUF005
    total = sums[R * S]
    for column in tl.static_range(COLUMNS):
        total += window[LAG * COLUMNS + column]
    return made + (total,)  # noqa: RUF005


@triton.jit
def strided_gradient_kernel(
    gradient_pointer, w_pointer, out_pointer, threads, vectors, across, down, channels, height,
    width, out_height, out_width, WINDOW: tl.constexpr, PITCH: tl.constexpr, THREADS: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """The gradient of x: a thread makes as many rows and columns of it as the stride has.

    Args:
        threads: images · down · across · vectors.
        WINDOW: as above.
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
