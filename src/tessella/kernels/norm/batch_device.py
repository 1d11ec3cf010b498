"""Device code of a batch normalization in training, with what follows it in the same pass.

A tensor of channels_last is [rows, channels] in memory: its images' pixels are the rows. Sums over
rows are float32 and always taken in the same order: a block adds up every ``programs``-th tile of
rows around its channels' first values, which keeps the digits of a mean far from zero, and one
block a few channels' sums of all blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tessella.kernels.epilogue.triton_device import activate, cast


@triton.jit
def _places(first_row, ROWS: tl.constexpr, columns, rows, channels):
    """Offsets of a tile [ROWS, columns], and which of its places are there."""
    row = first_row + tl.arange(0, ROWS)
    offsets = row.to(tl.int64)[:, None] * channels + columns[None, :]
    return offsets, (row < rows)[:, None] & (columns < channels)[None, :]


@triton.jit
def _columns(COLUMNS: tl.constexpr):
    return tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _slope(x, gradient, ACTIVATION: tl.constexpr):
    """The gradient of what an activation was given, by that and by the gradient of its result."""
    if ACTIVATION is None:
        y = gradient
    elif ACTIVATION == "relu":
        y = tl.where(x > 0, gradient, 0.0)
    elif ACTIVATION == "relu6":
        y = tl.where((x > 0) & (x < 6), gradient, 0.0)
    else:
        tl.static_assert(ACTIVATION == "silu")
        small = tl.exp(-tl.abs(x))  # which does not overflow
        share = tl.where(x < 0, small, 1.0) / (1 + small)
        y = gradient * share * (1 + x * (1 - share))
    return y


@triton.jit
def moments_kernel(
    x_pointer, sums_pointer, rows, channels,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Each block's sums of a channel's distances from its first value, and of their squares."""
    columns = _columns(COLUMNS)
    first = tl.load(x_pointer + columns, mask=columns < channels, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    step: tl.constexpr = ROWS * AT_ONCE
    for begin in range(tl.program_id(0) * step, rows, tl.num_programs(0) * step):
        for tile in tl.static_range(AT_ONCE):  # whose loads need not wait for each other
            offsets, there = _places(begin + tile * ROWS, ROWS, columns, rows, channels)
            x = tl.load(x_pointer + offsets, mask=there, other=0.0).to(tl.float32)
            x = tl.where(there, x - first, 0.0)
            total += x
            squares += x * x
    _store_sums(sums_pointer, total, squares, columns, channels)


@triton.jit
def _store_sums(pointer, first, second, columns, channels):
    """Sums over a block's rows into [2, programs, channels]."""
    programs = tl.num_programs(0)
    own = pointer + tl.program_id(0) * channels + columns
    tl.store(own, tl.sum(first, 0), mask=columns < channels)
    tl.store(own + programs * channels, tl.sum(second, 0), mask=columns < channels)


@triton.jit
def _all_sums(pointer, columns, programs, channels, BLOCKS: tl.constexpr):
    """Both sums of all blocks, for some channels."""
    first = tl.zeros([BLOCKS, columns.shape[0]], tl.float32)
    second = tl.zeros([BLOCKS, columns.shape[0]], tl.float32)
    for block in range(0, programs, BLOCKS):
        offsets, there = _places(block, BLOCKS, columns, programs, channels)
        first += tl.load(pointer + offsets, mask=there, other=0.0)
        second += tl.load(pointer + offsets + programs * channels, mask=there, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def statistics_kernel(
    sums_pointer, x_pointer, mean_pointer, inverse_pointer, running_mean_pointer,
    running_variance_pointer, programs, rows, channels, momentum, eps,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Means and inverse deviations of channels, which their running statistics move towards."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < channels
    total, squares = _all_sums(sums_pointer, columns, programs, channels, BLOCKS)
    distance = total / rows
    variance = tl.maximum(squares / rows - distance * distance, 0.0)
    mean = tl.load(x_pointer + columns, mask=there, other=0.0).to(tl.float32) + distance
    tl.store(mean_pointer + columns, mean, mask=there)
    tl.store(inverse_pointer + columns, 1 / tl.sqrt(variance + eps), mask=there)
    if running_mean_pointer is not None:
        old = tl.load(running_mean_pointer + columns, mask=there)
        tl.store(running_mean_pointer + columns, old + momentum * (mean - old), mask=there)
        old = tl.load(running_variance_pointer + columns, mask=there)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(running_variance_pointer + columns, old + momentum * (unbiased - old), mask=there)


@triton.jit
def _affine(norm, columns, channels):
    """Of some channels: the mean, and the factor and the summand of what lies around it."""
    mean_pointer, inverse_pointer, weight_pointer, bias_pointer = norm
    there = columns < channels
    mean = tl.load(mean_pointer + columns, mask=there, other=0.0)
    factor = tl.load(inverse_pointer + columns, mask=there, other=0.0)
    factor = factor * tl.load(weight_pointer + columns, mask=there, other=0.0)
    bias = tl.load(bias_pointer + columns, mask=there, other=0.0)
    return mean[None, :], factor[None, :], bias[None, :]


@triton.jit
def packed(positive):
    """A bit for each place of [ROWS, COLUMNS], eight neighbours of a row in a byte."""
    ROWS: tl.constexpr = positive.shape[0]
    BYTES: tl.constexpr = positive.shape[1] // 8
    bits = tl.reshape(positive.to(tl.int32), [ROWS, BYTES, 8])
    return tl.sum(bits << tl.arange(0, 8)[None, None, :], 2).to(tl.uint8)


@triton.jit
def unpacked(packed):
    """The reverse of ``packed``."""
    ROWS: tl.constexpr = packed.shape[0]
    BYTES: tl.constexpr = packed.shape[1]
    bits = (packed.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(bits, [ROWS, BYTES * 8]) != 0


@triton.jit
def _bytes(pointer, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, rows, channels):
    """Where a tile's bits are, and which of their bytes are there."""
    columns = tl.program_id(1) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
    offsets, there = _places(first_row, ROWS, columns, rows, channels // 8)
    return pointer + offsets, there


@triton.jit
def normalize_kernel(
    x_pointer, norm, other_pointer, other_norm, y_pointer, bits_pointer, rows, channels,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """``activation(normalized · weight + bias + other)``; the last rows first, which the pass for
    statistics has just read and the cache still has.

    Args:
        norm: mean, inverse deviation, weight and bias.
        other_pointer: what is added, normalized by ``other_norm`` where there is one; or None.
        bits_pointer: where a bit tells for each place whether the result is positive; or None.
    """
    columns = _columns(COLUMNS)
    mean, factor, bias = _affine(norm, columns, channels)
    if other_norm is not None:
        other_mean, other_factor, other_bias = _affine(other_norm, columns, channels)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    for tile in range(TILES):
        row = (block * TILES + TILES - 1 - tile) * ROWS
        offsets, there = _places(row, ROWS, columns, rows, channels)
        x = tl.load(x_pointer + offsets, mask=there, other=0.0).to(tl.float32)
        y = (x - mean) * factor + bias
        if other_pointer is not None:
            other = tl.load(other_pointer + offsets, mask=there, other=0.0).to(tl.float32)
            if other_norm is not None:
                other = (other - other_mean) * other_factor + other_bias
            y += other
        if bits_pointer is not None:
            at, within = _bytes(bits_pointer, row, ROWS, COLUMNS, rows, channels)
            tl.store(at, packed(y > 0), mask=within)
        y = cast(activate(y, ACTIVATION), y_pointer.dtype.element_ty)
        tl.store(y_pointer + offsets, y, mask=there)


@triton.jit
def gradient_sums_kernel(
    gradient_pointer, second_pointer, x_pointer, norm, other_pointer, other_norm, bits_pointer,
    joined_pointer, sums_pointer, other_sums_pointer, rows, channels,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Each block's sums of the gradients before the activation, and of their products with x.

    Args:
        second_pointer: a second gradient of the same result, or None.
        other_pointer: what else was normalized by ``other_norm`` and added, or None.
        bits_pointer: which results were positive, where a ReLU had a sum as its argument; or None.
        joined_pointer: where the gradients before the activation go, if they are wanted.
    """
    columns = _columns(COLUMNS)
    mean, factor, bias = _affine(norm, columns, channels)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    if other_norm is not None:
        other_mean, _, _ = _affine(other_norm, columns, channels)
        other_products = tl.zeros([ROWS, COLUMNS], tl.float32)
    step: tl.constexpr = ROWS * AT_ONCE
    for begin in range(tl.program_id(0) * step, rows, tl.num_programs(0) * step):
        for tile in tl.static_range(AT_ONCE):
            row = begin + tile * ROWS
            offsets, there = _places(row, ROWS, columns, rows, channels)
            x = tl.load(x_pointer + offsets, mask=there, other=0.0).to(tl.float32) - mean
            g = tl.load(gradient_pointer + offsets, mask=there, other=0.0).to(tl.float32)
            if second_pointer is not None:
                g += tl.load(second_pointer + offsets, mask=there, other=0.0).to(tl.float32)
            if bits_pointer is not None:
                at, within = _bytes(bits_pointer, row, ROWS, COLUMNS, rows, channels)
                g = tl.where(unpacked(tl.load(at, mask=within, other=0)), g, 0.0)
            else:
                g = tl.where(there, _slope(x * factor + bias, g, ACTIVATION), 0.0)
            if joined_pointer is not None:
                rounded = cast(g, joined_pointer.dtype.element_ty)
                tl.store(joined_pointer + offsets, rounded, mask=there)
            total += g
            products += g * x
            if other_norm is not None:
                other = tl.load(other_pointer + offsets, mask=there, other=0.0).to(tl.float32)
                other_products += g * (other - other_mean)
    _store_sums(sums_pointer, total, products, columns, channels)
    if other_norm is not None:
        _store_sums(other_sums_pointer, total, other_products, columns, channels)


@triton.jit
def parameters_kernel(
    sums_pointer, inverse_pointer, weight_gradient_pointer, bias_gradient_pointer,
    shares_pointer, programs, rows, channels, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The parameters' gradients; and [2, channels]: what every gradient of x loses, and what of its
    distance from the mean."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < channels
    total, products = _all_sums(sums_pointer, columns, programs, channels, BLOCKS)
    inverse = tl.load(inverse_pointer + columns, mask=there, other=0.0)
    tl.store(weight_gradient_pointer + columns, products * inverse, mask=there)
    tl.store(bias_gradient_pointer + columns, total, mask=there)
    tl.store(shares_pointer + columns, total / rows, mask=there)
    tl.store(shares_pointer + channels + columns, products * inverse * inverse / rows, mask=there)


@triton.jit
def input_gradient_kernel(
    gradient_pointer, x_pointer, norm, shares_pointer, out_pointer, rows, channels,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The gradient of x; the last rows first, as in ``normalize_kernel``."""
    columns = _columns(COLUMNS)
    mean, factor, bias = _affine(norm, columns, channels)
    inside = columns < channels
    constant = tl.load(shares_pointer + columns, mask=inside, other=0.0)[None, :]
    slope = tl.load(shares_pointer + channels + columns, mask=inside, other=0.0)[None, :]
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    for tile in range(TILES):
        row = (block * TILES + TILES - 1 - tile) * ROWS
        offsets, there = _places(row, ROWS, columns, rows, channels)
        x = tl.load(x_pointer + offsets, mask=there, other=0.0).to(tl.float32) - mean
        g = tl.load(gradient_pointer + offsets, mask=there, other=0.0).to(tl.float32)
        g = _slope(x * factor + bias, g, ACTIVATION)
        out = cast(factor * (g - constant - x * slope), out_pointer.dtype.element_ty)
        tl.store(out_pointer + offsets, out, mask=there)
