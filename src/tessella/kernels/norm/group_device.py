"""Device code of a group norm's statistics, and of the factor and the shift of each channel.

Numbers of a chunk of pixels are taken a tile at a time. Each place of a tile keeps the mean and the
sum of squared differences from it of what it has seen (Welford), so that nothing cancels; places,
then chunks, are put together in a fixed order (Chan, Golub, LeVeque).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tessella.device.overlap import await_earlier


class Groups(NamedTuple):
    """How channels are taken.

    Attributes:
        CHANNELS: of a group; ``PADDED`` is the power of two that holds them.
        GROUPS: of a tile; ``ALL`` of an image.
        STRIDES: elements from image to image, from channel to channel and from pixel to pixel.
    """

    CHANNELS: int
    PADDED: int
    GROUPS: int
    ALL: int
    STRIDES: tuple[int, int, int]


@triton.jit
def group_moments_kernel(
    x_pointer, parts_pointer, factor_pointer, shift_pointer, weight_pointer, bias_pointer,
    pixels, per_chunk, eps,
    FORM: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Mean and squares of each channel of a chunk, [2, images, chunks, channels] of float32.

    Where there is one chunk, the factors and shifts [images, channels] at once.

    Args:
        per_chunk: pixels of a chunk, a multiple of ``ROWS``.
    """
    await_earlier(OVERLAP)
    CHANNELS: tl.constexpr = FORM.CHANNELS * FORM.ALL
    PLACES: tl.constexpr = FORM.GROUPS * FORM.PADDED
    TILES: tl.constexpr = (FORM.ALL + FORM.GROUPS - 1) // FORM.GROUPS
    STRIDES: tl.constexpr = FORM.STRIDES
    chunk = tl.program_id(0) % CHUNKS
    tile = tl.program_id(0) // CHUNKS % TILES
    image = (tl.program_id(0) // (CHUNKS * TILES)).to(tl.int64)
    channel, is_channel = _channels(tile, FORM)
    start = chunk * per_chunk
    end = tl.maximum(tl.minimum(start + per_chunk, pixels), start)
    row = tl.arange(0, ROWS)
    x = x_pointer + image * STRIDES[0] + channel[None, :].to(tl.int64) * STRIDES[1]
    mean = tl.zeros([ROWS, PLACES], tl.float32)
    squares = tl.zeros([ROWS, PLACES], tl.float32)
    seen = 0.0
    coming = _tile(x, start + row, end, is_channel, STRIDES[2])
    for first in range(start, end, ROWS):
        value = coming.to(tl.float32)  # the next tile is loaded while this one is computed
        coming = _tile(x, first + ROWS + row, end, is_channel, STRIDES[2])
        seen += 1.0
        share = 1.0 / seen
        apart = tl.where((first + row < end)[:, None], value - mean, 0.0)
        mean += apart * share
        squares += apart * apart * (1.0 - share)
    count = tl.maximum((end - start - row + ROWS - 1) // ROWS, 0).to(tl.float32)[:, None]
    total = tl.maximum(end - start, 1).to(tl.float32)
    middle = tl.sum(mean * count, 0) / total
    apart = mean - middle[None, :]
    squares = tl.sum(squares + count * apart * apart, 0)
    if CHUNKS == 1:
        _finish(middle, squares, total, channel, is_channel, image * CHANNELS, factor_pointer,
                shift_pointer, weight_pointer, bias_pointer, eps, FORM)  # fmt: skip
    else:
        images = tl.num_programs(0) // (CHUNKS * TILES)
        part = parts_pointer + (image * CHUNKS + chunk) * CHANNELS + channel
        tl.store(part, middle, mask=is_channel)
        tl.store(part + images.to(tl.int64) * (CHUNKS * CHANNELS), squares, mask=is_channel)


@triton.jit
def group_factors_kernel(
    parts_pointer, factor_pointer, shift_pointer, weight_pointer, bias_pointer,
    pixels, per_chunk, eps,
    FORM: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Factors and shifts of what ``group_moments_kernel`` found in several chunks."""
    await_earlier(OVERLAP)
    CHANNELS: tl.constexpr = FORM.CHANNELS * FORM.ALL
    PLACES: tl.constexpr = FORM.GROUPS * FORM.PADDED
    TILES: tl.constexpr = (FORM.ALL + FORM.GROUPS - 1) // FORM.GROUPS
    image = (tl.program_id(0) // TILES).to(tl.int64)
    images = (tl.num_programs(0) // TILES).to(tl.int64)
    channel, is_channel = _channels(tl.program_id(0) % TILES, FORM)
    row = tl.arange(0, ROWS)
    means = parts_pointer + image * (CHUNKS * CHANNELS) + channel[None, :]
    sums = tl.zeros([ROWS, PLACES], tl.float32)
    for first in range(0, CHUNKS, ROWS):
        chunk = first + row
        there = (chunk < CHUNKS)[:, None] & is_channel[None, :]
        mean = tl.load(means + chunk[:, None] * CHANNELS, mask=there, other=0.0)
        sums += mean * _size(chunk, pixels, per_chunk, CHUNKS)
    total = pixels.to(tl.float32)
    middle = tl.sum(sums, 0) / total
    squares = tl.zeros([ROWS, PLACES], tl.float32)
    for first in range(0, CHUNKS, ROWS):
        chunk = first + row
        there = (chunk < CHUNKS)[:, None] & is_channel[None, :]
        part = means + chunk[:, None] * CHANNELS
        apart = tl.load(part, mask=there, other=0.0) - middle[None, :]
        own = tl.load(part + images * (CHUNKS * CHANNELS), mask=there, other=0.0)
        squares += own + apart * apart * _size(chunk, pixels, per_chunk, CHUNKS)
    _finish(middle, tl.sum(squares, 0), total, channel, is_channel, image * CHANNELS,
            factor_pointer, shift_pointer, weight_pointer, bias_pointer, eps, FORM)  # fmt: skip


@triton.jit
def _tile(x, pixel, end, is_channel, STRIDE: tl.constexpr):
    there = (pixel < end)[:, None] & is_channel[None, :]
    return tl.load(x + pixel.to(tl.int64)[:, None] * STRIDE, mask=there, other=0.0)


@triton.jit
def _size(chunk, pixels, per_chunk, CHUNKS: tl.constexpr):
    """Pixels of chunks, as a column."""
    size = tl.maximum(tl.minimum(pixels - chunk * per_chunk, per_chunk), 0)
    return tl.where(chunk < CHUNKS, size, 0).to(tl.float32)[:, None]


@triton.jit
def _channels(tile, FORM: tl.constexpr):
    """The channels of a tile's groups, each padded to a power of two, and which of them are."""
    PLACES: tl.constexpr = FORM.GROUPS * FORM.PADDED
    place = tl.arange(0, PLACES)
    group = tile * FORM.GROUPS + place // FORM.PADDED
    inner = place % FORM.PADDED
    return group * FORM.CHANNELS + inner, (group < FORM.ALL) & (inner < FORM.CHANNELS)


@triton.jit
def _finish(
    mean, squares, count, channel, is_channel, first, factor_pointer, shift_pointer,
    weight_pointer, bias_pointer, eps, FORM: tl.constexpr,
):  # fmt: skip
    """The factor and the shift of each channel, from its own mean and squares."""
    if FORM.CHANNELS > 1:
        own = mean
        mean = _over_group(tl.where(is_channel, own, 0.0), FORM) / FORM.CHANNELS
        apart = own - mean
        squares = tl.where(is_channel, squares + count * apart * apart, 0.0)
        squares = _over_group(squares, FORM)
        count *= FORM.CHANNELS
    factor = 1.0 / tl.sqrt_rn(squares / count + eps)
    if weight_pointer is not None:
        factor *= tl.load(weight_pointer + channel, mask=is_channel, other=0.0).to(tl.float32)
    shift = -mean * factor
    if bias_pointer is not None:
        shift += tl.load(bias_pointer + channel, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(factor_pointer + first + channel, factor, mask=is_channel)
    tl.store(shift_pointer + first + channel, shift, mask=is_channel)


@triton.jit
def _over_group(x, FORM: tl.constexpr):
    """Each group's sum, at all of its places."""
    GROUPS: tl.constexpr = FORM.GROUPS
    PADDED: tl.constexpr = FORM.PADDED
    made = tl.sum(tl.reshape(x, [GROUPS, PADDED]), 1)
    made = tl.broadcast_to(made[:, None], [GROUPS, PADDED])
    return tl.reshape(made, [GROUPS * PADDED])
