"""Device code of 1×1 convolutions whose results are batch-normalized and never written.

A convolution of one tap multiplies rows: ``y = x Wᵀ``. The moments of y's channels follow from the
moments of x's, ``Var(y) = W Cov(x) Wᵀ``, and so do the sums that a norm's backward pass takes over
y. Tensors of channels_last are [rows, channels]; channels are powers of two, rows are masked. Sums
over rows are float32, and always taken in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tessella.kernels.epilogue.triton_device import cast
from tessella.kernels.norm.batch_device import packed, unpacked


@triton.jit
def _offsets(row, columns, width):
    """Of a tile of rows and columns in [rows, width]."""
    return row.to(tl.int64)[:, None] * width + columns[None, :]


@triton.jit
def products_kernel(
    a_pointer, second_pointer, bits_pointer, joined_pointer, b_pointer, out_pointer, rows,
    A: tl.constexpr, B: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Each block's share of ``aᵀ b``, [A, B], and behind it of a's column sums, [A].

    Args:
        second_pointer: what is added to a first, or None.
        bits_pointer: at which places of a there is something else than 0; or None, then at all.
        joined_pointer: where a goes as it was multiplied, rounded to its type; or None.
    """
    wide = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    deep = tl.program_id(2) * DEEP + tl.arange(0, DEEP)
    eighths = tl.program_id(1) * (WIDE // 8) + tl.arange(0, WIDE // 8)
    made = tl.zeros([WIDE, DEEP], tl.float32)
    total = tl.zeros([ROWS, WIDE], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        there = (row < rows)[:, None]
        at = _offsets(row, wide, A)
        a = tl.load(a_pointer + at, mask=there, other=0.0)
        if second_pointer is not None:
            second = tl.load(second_pointer + at, mask=there, other=0.0)
            a = cast(a.to(tl.float32) + second.to(tl.float32), a.dtype)
        if bits_pointer is not None:
            bits = tl.load(bits_pointer + _offsets(row, eighths, A // 8), mask=there, other=0)
            a = tl.where(unpacked(bits), a, 0.0).to(a.dtype)
        if second_pointer is None and bits_pointer is None:
            # Through registers, as in the other cases: read where it was copied to, a has two
            # places in Triton 3.6's pipeline of three stages, and the product that still runs
            # reads the place that the next copy is written to.
            a = tl.where(there, a, 0.0).to(a.dtype)
        if joined_pointer is not None:
            own_rows = tl.where(tl.program_id(2) == 0, rows, 0)
            tl.store(joined_pointer + at, a, mask=(row < own_rows)[:, None])
        b = tl.load(b_pointer + _offsets(row, deep, B), mask=there, other=0.0)
        made = tl.dot(tl.trans(a), b, made, input_precision="ieee")
        total += a.to(tl.float32)
    own = out_pointer + tl.program_id(0).to(tl.int64) * (A * B + A)
    tl.store(own + wide[:, None] * B + deep[None, :], made)
    if tl.program_id(2) == 0:
        tl.store(own + A * B + wide, tl.sum(total, 0))


@triton.jit
def total_kernel(
    shares_pointer, out_pointer, count, blocks, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The sum of all blocks' shares, [blocks, count]."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < count
    total = tl.zeros([BLOCKS, COLUMNS], tl.float32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        there = (block < blocks)[:, None] & inside[None, :]
        total += tl.load(shares_pointer + _offsets(block, columns, count), mask=there, other=0.0)
    tl.store(out_pointer + columns, tl.sum(total, 0), mask=inside)


@triton.jit
def fold_kernel(
    totals_pointer, weight_pointer, gamma_pointer, beta_pointer, running_mean_pointer,
    running_variance_pointer, low_pointer, bias_pointer, mean_pointer, inverse_pointer,
    spread_pointer, rows, momentum, eps,
    C: tl.constexpr, K: tl.constexpr, CHANNELS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Weights and bias that give normalized results, for some output channels.

    Args:
        totals_pointer: ``xᵀ x`` and x's column sums.
        low_pointer: the weights, [C, K], in the type of x.
        spread_pointer: ``W Cov(x)``, [C, K].
    """
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    dtype = low_pointer.dtype.element_ty
    sums_pointer = totals_pointer + K * K
    mean = tl.zeros([CHANNELS], tl.float32)
    variance = tl.zeros([CHANNELS], tl.float32)
    for begin in range(0, K, DEEP):
        columns = begin + tl.arange(0, DEEP)
        at = channels[:, None] * K + columns[None, :]
        means = tl.load(sums_pointer + columns) / rows
        spread = tl.zeros([CHANNELS, DEEP], tl.float32)
        for first in range(0, K, DEEP):
            deep = first + tl.arange(0, DEEP)
            part = cast(tl.load(weight_pointer + channels[:, None] * K + deep[None, :]), dtype)
            own = tl.load(sums_pointer + deep) / rows
            covariance = tl.load(totals_pointer + deep[:, None] * K + columns[None, :]) / rows
            covariance -= own[:, None] * means[None, :]
            spread = tl.dot(part.to(tl.float32), covariance, spread, input_precision="ieee")
        tl.store(spread_pointer + at, spread)
        weight = cast(tl.load(weight_pointer + at), dtype).to(tl.float32)
        mean += tl.sum(weight * means[None, :], 1)
        variance += tl.sum(weight * spread, 1)
    variance = tl.maximum(variance, 0.0)
    inverse = 1 / tl.sqrt(variance + eps)
    tl.store(mean_pointer + channels, mean)
    tl.store(inverse_pointer + channels, inverse)
    factor = inverse * tl.load(gamma_pointer + channels)
    # the rounded weights' own mean, so that a channel's mean is the bias that it is to have
    shift = tl.zeros([CHANNELS], tl.float32)
    for begin in range(0, K, DEEP):
        columns = begin + tl.arange(0, DEEP)
        at = channels[:, None] * K + columns[None, :]
        weight = cast(tl.load(weight_pointer + at), dtype).to(tl.float32)
        low = cast(weight * factor[:, None], dtype)
        tl.store(low_pointer + at, low)
        means = tl.load(sums_pointer + columns) / rows
        shift += tl.sum(low.to(tl.float32) * means[None, :], 1)
    tl.store(bias_pointer + channels, tl.load(beta_pointer + channels) - shift)
    if running_mean_pointer is not None:
        old = tl.load(running_mean_pointer + channels)
        tl.store(running_mean_pointer + channels, old + momentum * (mean - old))
        old = tl.load(running_variance_pointer + channels)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(running_variance_pointer + channels, old + momentum * (unbiased - old))


@triton.jit
def _multiplied(
    made, x_pointer, row, there, weight_pointer, columns, K: tl.constexpr, DEEP: tl.constexpr
):
    """``made + x Wᵀ`` for some rows, and for the columns of which the weights [C, K] have rows."""
    for first in range(0, K, DEEP):
        deep = first + tl.arange(0, DEEP)
        x = tl.load(x_pointer + _offsets(row, deep, K), mask=there, other=0.0)
        weight = tl.load(weight_pointer + columns[:, None] * K + deep[None, :])
        made = tl.dot(x, tl.trans(weight), made, input_precision="ieee")
    return made


@triton.jit
def project_kernel(
    x_pointer, low_pointer, bias_pointer, other_pointer, other_low_pointer, other_bias_pointer,
    residual_pointer, y_pointer, bits_pointer, rows,
    C: tl.constexpr, K: tl.constexpr, OTHER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """``x lowᵀ + bias``, the same of another x where there is one, and a residual; and the ReLU of
    it, with a bit for each place that tells whether it was positive."""
    across: tl.constexpr = C // COLUMNS
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    there = (row < rows)[:, None]
    place = tl.program_id(0) % across
    columns = place * COLUMNS + tl.arange(0, COLUMNS)
    at = _offsets(row, columns, C)
    if residual_pointer is not None:  # asked for first: it is most of what is waited for
        residual = tl.load(residual_pointer + at, mask=there, other=0.0)
    made = tl.zeros([ROWS, COLUMNS], tl.float32)
    made = _multiplied(made, x_pointer, row, there, low_pointer, columns, K, DEEP)
    made += tl.load(bias_pointer + columns)[None, :]
    if other_pointer is not None:
        made = _multiplied(made, other_pointer, row, there, other_low_pointer, columns, OTHER, DEEP)
        made += tl.load(other_bias_pointer + columns)[None, :]
    if residual_pointer is not None:
        made += residual.to(tl.float32)
    if RELU:
        eighths = place * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
        tl.store(bits_pointer + _offsets(row, eighths, C // 8), packed(made > 0), mask=there)
        made = tl.where(made > 0, made, tl.where(made == made, 0.0, made))
    tl.store(y_pointer + at, cast(made, y_pointer.dtype.element_ty), mask=there)


@triton.jit
def slopes_kernel(
    totals_pointer, sums_pointer, weight_pointer, gamma_pointer, mean_pointer, inverse_pointer,
    spread_pointer, of_weight_pointer, of_gamma_pointer, of_beta_pointer, low_pointer,
    shares_pointer, rows, C: tl.constexpr, K: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Gradients of weights, factors and summands; for some output channels.

    Args:
        totals_pointer: ``gᵀ x`` and g's column sums.
        sums_pointer: x's column sums.
        low_pointer: the weights by which g is multiplied on the way to x, in x's type.
        shares_pointer: [2, C]: of the norm's gradient, what all lose and what they lose of the
            distance from the mean.
    """
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    every = tl.arange(0, K)
    at = channels[:, None] * K + every[None, :]
    dtype = low_pointer.dtype.element_ty
    weight = cast(tl.load(weight_pointer + at), dtype).to(tl.float32)
    products = tl.load(totals_pointer + at)
    total = tl.load(totals_pointer + C * K + channels)
    inverse = tl.load(inverse_pointer + channels)
    factor = inverse * tl.load(gamma_pointer + channels)
    means = tl.load(sums_pointer + every) / rows
    # about the mean: of x, as of what is made of it, since a product may be mostly that of means
    products -= total[:, None] * means[None, :]
    along = tl.sum(weight * products, 1)
    slope = along * inverse * inverse / rows
    spread = tl.load(spread_pointer + at) * rows
    tl.store(of_weight_pointer + at, factor[:, None] * (products - slope[:, None] * spread))
    tl.store(of_gamma_pointer + channels, along * inverse)
    tl.store(of_beta_pointer + channels, total)
    tl.store(low_pointer + at, cast(weight * factor[:, None], dtype))
    tl.store(shares_pointer + channels, factor * total / rows)
    tl.store(shares_pointer + C + channels, factor * slope)


@triton.jit
def remainder_kernel(
    weight_pointer, shares_pointer, mean_pointer, low_pointer, scale_pointer, constant_pointer,
    C: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """What x's gradient gets by the norm: ``scale · (x lowᵀ)``, and plus a constant.

    Args:
        mean_pointer: of what the convolution makes, [C].
        low_pointer: some of [K, K] in the type of x, for a norm's largest share, which is the
            scale: these numbers may be far smaller than float16 has.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * DEEP + tl.arange(0, DEEP)
    dtype = low_pointer.dtype.element_ty
    scale = tl.max(tl.abs(tl.load(shares_pointer + C + tl.arange(0, C))), 0)
    scale = tl.where(scale > 0, scale, 1.0)
    made = tl.zeros([ROWS, DEEP], tl.float32)
    constant = tl.zeros([ROWS], tl.float32)
    for first in range(0, C, DEEP):
        channels = first + tl.arange(0, DEEP)
        own = tl.load(weight_pointer + channels[None, :] * K + row[:, None])
        own = cast(own, dtype).to(tl.float32)
        weight = tl.load(weight_pointer + channels[:, None] * K + columns[None, :])
        weight = cast(weight, dtype).to(tl.float32)
        share = tl.load(shares_pointer + C + channels)
        moved = share * tl.load(mean_pointer + channels) - tl.load(shares_pointer + channels)
        constant += tl.sum(own * moved[None, :], 1)
        own *= (-share / scale)[None, :]
        made = tl.dot(own, weight, made, input_precision="ieee")
    tl.store(low_pointer + row[:, None] * K + columns[None, :], cast(made, dtype))
    if tl.program_id(1) == 0:
        tl.store(scale_pointer + row, tl.zeros([ROWS], tl.float32) + scale)
        tl.store(constant_pointer + row, constant)


@triton.jit
def gradient_kernel(
    g_pointer, low_pointer, x_pointer, less_pointer, scale_pointer, constant_pointer, out_pointer,
    rows, C: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr, LESS: tl.constexpr,
):  # fmt: skip
    """``g low + scale · (x lessᵀ) + constant``, the gradient of x.

    The sum of products is never negated: where a loop of four products or more begins with zeros
    and ends in a change of signs, ptxas 12.8 and 12.9 leave the products out.
    """
    across: tl.constexpr = K // COLUMNS
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    there = (row < rows)[:, None]
    columns = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    made = tl.zeros([ROWS, COLUMNS], tl.float32)
    made = _multiplied(made, x_pointer, row, there, less_pointer, columns, K, LESS)
    made = made * tl.load(scale_pointer + columns) + tl.load(constant_pointer + columns)
    for first in range(0, C, DEEP):
        deep = first + tl.arange(0, DEEP)
        g = tl.load(g_pointer + _offsets(row, deep, C), mask=there, other=0.0)
        low = tl.load(low_pointer + deep[:, None] * K + columns[None, :])
        made = tl.dot(g, low, made, input_precision="ieee")
    at = _offsets(row, columns, K)
    tl.store(out_pointer + at, cast(made, out_pointer.dtype.element_ty), mask=there)
