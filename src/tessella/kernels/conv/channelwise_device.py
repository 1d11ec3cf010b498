"""Device code of ``channelwise``: filters that read one channel each.

A thread keeps sums for some columns of the output and some neighbouring filters, and goes down its
strip of rows: an input value is loaded and converted once for all sums in its column. What unrolls
is constant; sizes and strides are arguments, so that the layers of a network share a kernel.

Names: a tile has ``VALUES`` neighbouring filters for each thread; ``at`` and ``at_…`` are pointers
[THREADS, VALUES]; ``WINDOW`` is (filter, stride, dilation), of three axes each; ``TAP`` the strides
of the filter: from filter to filter, then of three axes.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tessella.device.grouped_numbers import unspecialized
from tessella.kernels.epilogue.triton_device import cast, finish


class StripOfThread(NamedTuple):
    """What a thread of a strip does; constants of the compiler.

    Attributes:
        THREADS: of a block.
        VALUES, COLUMNS: neighbouring filters and columns of the output.
        LINES: or 0: strips of one row, whose input is loaded row by row, without steps.
        HOLDS: the filter stays in registers; else it is loaded in each step.
        X_COLUMN, Y_COLUMN: strides where they are to be constants, or None.
    """

    THREADS: int
    VALUES: int
    COLUMNS: int
    LINES: int
    HOLDS: bool
    X_COLUMN: int | None
    Y_COLUMN: int | None


@unspecialized
@triton.jit(do_not_specialize=["work", "size", "padding", "x_steps", "y_steps", "added_steps"])
def channelwise_sums(
    x, w, y, bias, scale, residual, work, size, padding, x_steps, y_steps, added_steps, factors,
    WINDOW: tl.constexpr, TAP: tl.constexpr, DEPTH: tl.constexpr, EACH: tl.constexpr,
    STRIP: tl.constexpr, ENDING: tl.constexpr,
):  # fmt: skip
    """A thread: VALUES filters × COLUMNS × the rows of a strip.

    In a step, LINES · stride rows of the input are added to the sums that they are part of, while
    the next ones are loaded; LINES rows of sums are finished, and those begun move up. Sums are
    float32: there are twice as many units as for int32, and MOST_TAPS products of int8 are exact.

    Args:
        work: threads of a tile and strip, images · across · vectors; vectors of VALUES filters;
            tiles, whose blocks are neighbours where they are; across, items of COLUMNS in a row;
            rows of the output in a strip.
        size: height and width of the input, and of the output.
        padding: above and before.
        x_steps, y_steps, added_steps: strides of images, channels, rows and columns, in VALUES
            elements, but of channels; added: the residual's.
        DEPTH: of the first of three spatial axes: image, out, padding, strides of x, y and
            residual; None where there are two.
        EACH: filters that read the same channel.
        factors: alpha, beta, gamma.
    """
    VALUES: tl.constexpr = STRIP.VALUES
    COLUMNS: tl.constexpr = STRIP.COLUMNS
    LINES: tl.constexpr = STRIP.LINES
    ACTIVATION: tl.constexpr = ENDING.ACTIVATION
    alpha, beta, gamma = factors
    threads, vectors, tiles, across, rows = work
    height, width, out_height, out_width = size
    above, before = padding
    x_image, x_channel, x_row, x_column = x_steps
    y_image, y_channel, y_row, y_column = y_steps
    added_image, added_channel, added_row, added_column = added_steps
    STRIDE: tl.constexpr = WINDOW[1]
    LAG: tl.constexpr = (WINDOW[0][1] - 1) * WINDOW[2][1] // STRIDE[1]  # rows of sums begun before
    strip, tile = divided(tl.program_id(0), tiles)
    block = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    if ENDING.WIDE:
        block, x_row, y_row = block.to(tl.int64), x_row.to(tl.int64), y_row.to(tl.int64)
        added_row = added_row.to(tl.int64)
    thread = block * STRIP.THREADS + tl.arange(0, STRIP.THREADS)
    if ENDING.PIXELS_LAST:
        rest, q = divided(thread, across)
        n, c = divided(rest, vectors)
    else:
        rest, c = divided(thread, vectors)
        n, q = divided(rest, across)
    c += tile * vectors
    p, q = strip * rows, q * COLUMNS
    h, v = p * STRIDE[1] - above, q * STRIDE[2] - before
    # other threads have nothing to read and nothing to store
    first_column = tl.where(thread < threads, v, -(2**30))[:, None]
    columns = tl.where(thread < threads, out_width - q, 0)[:, None]
    made = tl.minimum(rows, out_height - p)
    from_x = h * x_row + v * x_column + c // EACH * x_channel
    from_y = p * y_row + q * y_column + c * y_channel
    from_added = p * added_row + q * added_column + c * added_channel
    d = 0
    if DEPTH is not None:
        o, n = n % DEPTH[1], n // DEPTH[1]
        d = o * STRIDE[0] - DEPTH[2]
        from_x += d * DEPTH[3]
        from_y += o * DEPTH[4]
        from_added += o * DEPTH[5]
    near = tl.arange(0, VALUES)[None, :]
    k = c[:, None] * VALUES + near
    at_x = x + ((from_x + n * x_image)[:, None] * VALUES + near)
    at_y = y + ((from_y + n * y_image)[:, None] * VALUES + near)
    at_w = w + k * TAP[0]
    at_added = residual
    if residual is not None:
        at_added = residual + ((from_added + n * added_image)[:, None] * VALUES + near)
    biases = None if bias is None else tl.load(bias + k)
    scales = None if scale is None else tl.load(scale + k)
    column_of_x = x_column if STRIP.X_COLUMN is None else STRIP.X_COLUMN
    column_of_y = y_column if STRIP.Y_COLUMN is None else STRIP.Y_COLUMN
    steps_y = (
        y_row * VALUES,
        column_of_y * VALUES,
        added_row * VALUES,
        added_column * VALUES,
    )
    steps_x = (x_row * VALUES, column_of_x * VALUES)
    size = (height, width)
    if LINES == 0:
        R: tl.constexpr = WINDOW[0][1]
        T: tl.constexpr = WINDOW[0][0]
        sums = zeros(at_x, COLUMNS)
        for t in tl.static_range(T):
            for r in tl.static_range(R):
                values = load_row(at_x, d, h, first_column, size, steps_x, t, r * WINDOW[2][1],
                                  DEPTH, WINDOW, VALUES, COLUMNS)  # fmt: skip
                sums = add_taps(sums, floats(values), 0, (), at_w, t, r, WINDOW, TAP, COLUMNS,
                                False)  # fmt: skip
        store_row(sums, at_y, at_added, 0, columns, steps_y, biases, scales, alpha, beta, gamma,
                  ACTIVATION, COLUMNS)  # fmt: skip
    else:
        GROUP: tl.constexpr = LINES * STRIDE[1]
        taps = load_taps(at_w, WINDOW, TAP) if STRIP.HOLDS else ()
        # rows above the image add nothing, and neither do those below it
        begin = tl.minimum(tl.maximum(-h, 0) // GROUP, LAG // LINES)
        end = tl.minimum(tl.cdiv(made + LAG, LINES), tl.cdiv(height - h, GROUP))
        size = (tl.maximum(tl.minimum(height, h + end * GROUP), 0), width)
        h += begin * GROUP
        at_x += begin * GROUP * steps_x[0]
        values = load_group(at_x, d, h, first_column, size, steps_x, DEPTH, WINDOW, VALUES,
                            COLUMNS, GROUP)  # fmt: skip
        numbers = floats(values)
        sums = zeros(at_x, LAG * COLUMNS)
        for i in range(begin, end):
            h += GROUP
            at_x += GROUP * steps_x[0]
            values = load_group(at_x, d, h, first_column, size, steps_x, DEPTH, WINDOW, VALUES,
                                COLUMNS, GROUP)  # fmt: skip
            sums = add_group(sums + zeros(at_x, LINES * COLUMNS), numbers, taps, at_w, WINDOW, TAP,
                             COLUMNS, LINES, STRIP.HOLDS)  # fmt: skip
            for line in tl.static_range(LINES):
                row = i * LINES + line - LAG
                if (row >= 0) & (row < made):
                    store_row(sums[line * COLUMNS : (line + 1) * COLUMNS], at_y, at_added, row,
                              columns, steps_y, biases, scales, alpha, beta, gamma, ACTIVATION,
                              COLUMNS)  # fmt: skip
            sums = sums[LINES * COLUMNS :]
            numbers = floats(values)
        sums = sums + zeros(at_x, COLUMNS)
        for row in range(tl.maximum(begin, end) * LINES - LAG, made):
            if row >= 0:
                store_row(sums, at_y, at_added, row, columns, steps_y, biases, scales, alpha, beta,
                          gamma, ACTIVATION, COLUMNS)  # fmt: skip
            sums = sums[COLUMNS:] + zeros(at_x, COLUMNS)


@triton.jit
def divided(number, by):
    """Quotient and remainder of numbers from zero on."""
    if number.dtype.is_int32():  # unsigned, it takes fewer instructions
        quotient = (number.to(tl.uint32) // by.to(tl.uint32)).to(tl.int32)
    else:
        quotient = number // by
    return quotient, number - quotient * by


@triton.jit
def zeros(like, COUNT: tl.constexpr):
    """COUNT accumulators."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros(like.shape, tl.float32),)  # noqa: RUF005
    return sums


@triton.jit
def floats(values):
    """The numbers of a tuple, each converted to float32."""
    numbers = ()
    for i in tl.static_range(len(values)):
        numbers = numbers + (values[i].to(tl.float32),)  # noqa: RUF005
    return numbers


@triton.jit
def load_taps(at, WINDOW: tl.constexpr, TAP: tl.constexpr):
    """Load all taps of the filter."""
    T: tl.constexpr = WINDOW[0][0]
    R: tl.constexpr = WINDOW[0][1]
    S: tl.constexpr = WINDOW[0][2]
    taps = ()
    for t in tl.static_range(T):
        for r in tl.static_range(R):
            for s in tl.static_range(S):
                tap = tl.load(at + (t * TAP[1] + r * TAP[2] + s * TAP[3]))
                taps = taps + (tap.to(tl.float32),)  # noqa: RUF005
    return taps


@triton.jit
def load_group(at, d, h, v, size, steps, DEPTH: tl.constexpr, WINDOW: tl.constexpr,
               VALUES: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """GROUP rows of the input, from row h on, of each plane that the filter reads."""
    T: tl.constexpr = WINDOW[0][0]
    values = ()
    for t in tl.static_range(T):
        for row in tl.static_range(GROUP):
            values = values + load_row(at, d, h, v, size, steps, t, row, DEPTH, WINDOW, VALUES,
                                       COLUMNS)  # fmt: skip
    return values


@triton.jit
def load_row(at, d, h, v, size, steps, t: tl.constexpr, row: tl.constexpr, DEPTH: tl.constexpr,
             WINDOW: tl.constexpr, VALUES: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Load the places of an input row that COLUMNS of the output read, from column v on.

    Zero beside the image, whose ``size`` is (height, width).
    """
    COUNT: tl.constexpr = places(COLUMNS, WINDOW)
    width = tl.where(is_below(h + row, size[0]), size[1], 0)
    at += row * steps[0]
    if DEPTH is not None:
        plane = d + t * WINDOW[2][0]
        width = tl.where((plane >= 0) & (plane < DEPTH[0]), width, 0)[:, None]
        at += t * (WINDOW[2][0] * VALUES) * DEPTH[3]
    values = ()
    for i in tl.static_range(COUNT):
        inside = is_below(v + place(i, COLUMNS, WINDOW), width)
        value = tl.load(at + place(i, COLUMNS, WINDOW) * steps[1], mask=inside, other=0.0)
        values = values + (value,)  # noqa: RUF005
    return values


@triton.jit
def add_group(sums, numbers, taps, at_w, WINDOW: tl.constexpr, TAP: tl.constexpr,
              COLUMNS: tl.constexpr, LINES: tl.constexpr, HOLDS: tl.constexpr):  # fmt: skip
    """All rows of sums, and their products with a group of rows of the input."""
    COUNT: tl.constexpr = places(COLUMNS, WINDOW)
    STRIDE: tl.constexpr = WINDOW[1][1]
    LAG: tl.constexpr = (WINDOW[0][1] - 1) * WINDOW[2][1] // STRIDE
    GROUP: tl.constexpr = LINES * STRIDE
    T: tl.constexpr = WINDOW[0][0]
    made = ()
    for i in tl.static_range(LAG + LINES):
        row = sums[i * COLUMNS : (i + 1) * COLUMNS]
        for t in tl.static_range(T):
            for g in tl.static_range(GROUP):
                if is_tap(g + (LAG - i) * STRIDE, WINDOW):
                    row = add_taps(row, numbers, (t * GROUP + g) * COUNT, taps, at_w, t,
                                   (g + (LAG - i) * STRIDE) // WINDOW[2][1], WINDOW, TAP, COLUMNS,
                                   HOLDS)  # fmt: skip
        made = made + row
    return made


@triton.jit
def add_taps(sums, numbers, FROM: tl.constexpr, taps, at_w, t: tl.constexpr, r: tl.constexpr,
             WINDOW: tl.constexpr, TAP: tl.constexpr, COLUMNS: tl.constexpr,
             HOLDS: tl.constexpr):  # fmt: skip
    """A row of sums, and the products of a row of the input, from number FROM on, with row r of the
    filter."""
    R: tl.constexpr = WINDOW[0][1]
    S: tl.constexpr = WINDOW[0][2]
    for s in tl.static_range(S):
        if HOLDS:
            tap = taps[(t * R + r) * S + s]
        else:
            tap = tl.load(at_w + (t * TAP[1] + r * TAP[2] + s * TAP[3])).to(tl.float32)
        added = ()
        for j in tl.static_range(COLUMNS):
            number = numbers[FROM + rank(j, s, COLUMNS, WINDOW)]
            added = added + (tl.fma(number, tap, sums[j]),)  # noqa: RUF005
        sums = added
    return sums


@triton.jit
def store_row(sums, at, at_added, row, columns, steps, biases, scales, alpha, beta, gamma,
              ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The epilogue of a row of sums, and the row itself: its first ``columns``."""
    KIND: tl.constexpr = at.dtype.element_ty
    at += row * steps[0]
    if at_added is not None:
        at_added += row * steps[2]
    for j in tl.static_range(COLUMNS):
        inside = columns > j
        if KIND == tl.int32:  # noqa: SIM300
            tl.store(at + j * steps[1], sums[j], mask=inside)
        else:
            residuals = None
            if at_added is not None:
                residuals = tl.load(at_added + j * steps[3], mask=inside, other=0.0)
            made = finish(sums[j], scales, biases, residuals, alpha, beta, gamma, ACTIVATION)
            tl.store(at + j * steps[1], cast(made, KIND), mask=inside)


@triton.jit
def is_below(number, limit):
    """Whether 0 ≤ number < limit, by one comparison."""
    return number.to(tl.uint32) < limit.to(tl.uint32)


@triton.constexpr_function
def is_tap(distance, window):
    """Whether a row at this distance below an output row's first one is under a tap."""
    return 0 <= distance <= (window[0][1] - 1) * window[2][1] and distance % window[2][1] == 0


@triton.constexpr_function
def read(columns, window):
    """Places of the input, in a row, that a run of output pixels reads, from the left."""
    taps = range(window[0][2])
    return sorted({j * window[1][2] + s * window[2][2] for j in range(columns) for s in taps})


@triton.constexpr_function
def places(columns, window):
    """The number of places that a run of output pixels reads."""
    return len(read(columns, window))


@triton.constexpr_function
def place(i, columns, window):
    """The i-th place that a run of output pixels reads."""
    return read(columns, window)[i]


@triton.constexpr_function
def rank(j, s, columns, window):
    """The number of the place that pixel j of the run reads under tap s."""
    return read(columns, window).index(j * window[1][2] + s * window[2][2])
