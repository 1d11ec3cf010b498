"""Device code of pictures in training: turned, cut, mirrored, coloured, noisy and normalized, in
one pass; what ``data.augment`` makes of them on a host, and in its order."""

from __future__ import annotations

import triton
import triton.language as tl

CUT: tl.constexpr = tl.constexpr(4)  # numbers of a cut, as ``scale_device`` reads them
WORDS: tl.constexpr = tl.constexpr(12)  # of a change (``data.changes``)
_ROUND: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 · 2²³: added to less, it leaves whole numbers
_TURN: tl.constexpr = tl.constexpr(6.2831854820251465)  # 2 π
_UNIT: tl.constexpr = tl.constexpr(2.0**-24)


@triton.jit
def _rounded(x):
    """Half to even."""
    return (x + _ROUND) - _ROUND


@triton.jit
def _number(at, place: tl.constexpr):
    return tl.load(at + place).to(tl.float32, bitcast=True)


@triton.jit
def _inside(place, side):
    """A place in a row of pictures of which each second one is mirrored."""
    place = ((place % (2 * side)) + 2 * side) % (2 * side)
    return tl.where(place < side, place, 2 * side - 1 - place)


@triton.jit
def _places(cuts, words, picture, row, column, sides, TURN: tl.constexpr):
    """Which four stored pixels make a pixel of the picture, and how far it is between them.

    A pixel of a picture that is not turned is the first of them.
    """
    stored_height, stored_width, height, width = sides
    at = cuts + picture * CUT
    mirror, flip = tl.load(at + 2), tl.load(at + 3)
    y = tl.load(at).to(tl.int32) + tl.where(flip != 0, height - 1 - row, row)
    x = tl.load(at + 1).to(tl.int32) + tl.where(mirror != 0, width - 1 - column, column)
    across, down = 0.0, 0.0
    right, below = x, y
    if TURN:
        w = words + picture * WORDS
        fy, fx = y.to(tl.float32), x.to(tl.float32)
        from_x = fx * _number(w, 0) + (fy * _number(w, 1) + _number(w, 2))
        from_y = fx * _number(w, 3) + (fy * _number(w, 4) + _number(w, 5))
        left, top = tl.floor(from_x), tl.floor(from_y)
        across, down = from_x - left, from_y - top
        x, right = (
            _inside(left.to(tl.int32), stored_width),
            _inside(left.to(tl.int32) + 1, stored_width),
        )
        y, below = (
            _inside(top.to(tl.int32), stored_height),
            _inside(top.to(tl.int32) + 1, stored_height),
        )
    first, second = y * stored_width, below * stored_width
    return first + x, first + right, second + x, second + right, across, down


@triton.jit
def _loaded(at, mask):
    return (tl.load(at, mask=mask, other=0).to(tl.int32) & 65535).to(tl.float32)


@triton.jit
def _value(at, places, mask, CHANNELS: tl.constexpr, TURN: tl.constexpr):
    """A channel of a pixel, a whole number."""
    one, two, three, four, across, down = places
    value = _loaded(at + one * CHANNELS, mask)
    if TURN:
        lower = _loaded(at + three * CHANNELS, mask)
        value += across * (_loaded(at + two * CHANNELS, mask) - value)
        lower += across * (_loaded(at + four * CHANNELS, mask) - lower)
        value = _rounded(value + down * (lower - value))
    return value


@triton.jit
def sum_kernel(
    pixels, cuts, words, sums, stored_height, stored_width, height, width,
    CHANNELS: tl.constexpr, TURN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of each channel over a row of each picture, int64 [N, height, CHANNELS]."""
    row, picture = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sides = stored_height, stored_width, height, width
    base = pixels + picture * stored_height * stored_width * CHANNELS
    for channel in tl.static_range(CHANNELS):
        total = tl.zeros([BLOCK], tl.int32)
        for first in range(0, width, BLOCK):
            column = first + tl.arange(0, BLOCK)
            mask = column < width
            places = _places(cuts, words, picture, row, column, sides, TURN)
            value = _value(base + channel, places, mask, CHANNELS, TURN)
            total += tl.where(mask, value, 0.0).to(tl.int32)
        tl.store(sums + (picture * height + row) * CHANNELS + channel, tl.sum(total.to(tl.int64)))


@triton.jit
def _hue(red, green, blue, most, share):
    """RGB of 0 to ``most``, its colours turned by a share of their circle."""
    red = tl.minimum(tl.maximum(red, 0.0), most) / most
    green = tl.minimum(tl.maximum(green, 0.0), most) / most
    blue = tl.minimum(tl.maximum(blue, 0.0), most) / most
    value = tl.maximum(tl.maximum(red, green), blue)
    spread = value - tl.minimum(tl.minimum(red, green), blue)
    by = tl.where(spread > 0, spread, 1.0)
    of_blue = 4.0 + (red - green) / by
    sector = tl.where(value == green, 2.0 + (blue - red) / by, of_blue)
    sector = tl.where(value == red, (green - blue) / by, sector)
    sector += 6.0 * share
    sector -= 6.0 * tl.floor(sector / 6.0)
    # of each channel: its distance from where the circle has it in full
    red = tl.minimum(tl.maximum(tl.abs(sector - 3.0) - 1.0, 0.0), 1.0)
    green = tl.minimum(tl.maximum(2.0 - tl.abs(sector - 2.0), 0.0), 1.0)
    blue = tl.minimum(tl.maximum(2.0 - tl.abs(sector - 4.0), 0.0), 1.0)
    low = value - spread
    return (low + spread * red) * most, (low + spread * green) * most, (low + spread * blue) * most


@triton.jit
def _normal(words, picture, number):
    """The number of this place in the noise of a picture."""
    w = words + picture * WORDS
    zero = number * 0
    a, b, c, d = tl.philox_impl(
        (number // 4).to(tl.uint32), zero.to(tl.uint32), zero.to(tl.uint32), zero.to(tl.uint32),
        (zero + tl.load(w + 10)).to(tl.uint32, bitcast=True),
        (zero + tl.load(w + 11)).to(tl.uint32, bitcast=True),
    )  # fmt: skip
    second = number % 4 >= 2
    one = (tl.where(second, c, a) >> 8).to(tl.float32) * _UNIT + _UNIT / 2
    two = (tl.where(second, d, b) >> 8).to(tl.float32) * _UNIT + _UNIT / 2
    radius = tl.sqrt(-2.0 * tl.log(one))
    return radius * tl.where(number % 2 == 0, tl.cos(two * _TURN), tl.sin(two * _TURN))


@triton.jit
def _stored(
    value, out, at, words, picture, number, most, sigma, gain, offset, mask,
    NOISE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Noise, whole numbers that a picture can hold, and its normalization."""
    if NOISE:
        value += sigma * _normal(words, picture, number)
    if not WHOLE:
        value = _rounded(tl.minimum(tl.maximum(value, 0.0), most))
    tl.store(out + at, value * tl.load(gain) + tl.load(offset), mask=mask)


@triton.jit
def change_kernel(
    pixels, cuts, words, means, gain, offset, out, stored_height, stored_width, height, width,
    most, sigma, CHANNELS: tl.constexpr, TURN: tl.constexpr, COLOR: tl.constexpr,
    HUE: tl.constexpr, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of a row of one picture: unsigned [N, H, W, C] to float32 [N, h, w, C].

    ``means`` are those of the channels of each picture, as it is turned and cut, [N, C]. As on the
    host each operation rounds: to be launched with ``fuse=False``.
    """
    row, picture = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    sides = stored_height, stored_width, height, width
    places = _places(cuts, words, picture, row, column, sides, TURN)
    base = pixels + picture * stored_height * stored_width * CHANNELS
    w, mean = words + picture * WORDS, means + picture * CHANNELS
    WHOLE: tl.constexpr = not (COLOR or HUE or NOISE)
    number = (row * width + column) * CHANNELS
    at = picture * height * width * CHANNELS + number
    if CHANNELS == 3:
        red = _value(base, places, mask, CHANNELS, TURN)
        green = _value(base + 1, places, mask, CHANNELS, TURN)
        blue = _value(base + 2, places, mask, CHANNELS, TURN)
        if COLOR:
            bright, contrast, saturation = _number(w, 6), _number(w, 7), _number(w, 8)
            middle = bright * tl.load(mean)
            red = middle + (red * bright - middle) * contrast
            middle = bright * tl.load(mean + 1)
            green = middle + (green * bright - middle) * contrast
            middle = bright * tl.load(mean + 2)
            blue = middle + (blue * bright - middle) * contrast
            grey = red * 0.299 + green * 0.587 + blue * 0.114
            red = grey + (red - grey) * saturation
            green = grey + (green - grey) * saturation
            blue = grey + (blue - grey) * saturation
        if HUE:
            red, green, blue = _hue(red, green, blue, most, _number(w, 9))
        _stored(red, out, at, words, picture, number, most, sigma, gain, offset, mask, NOISE, WHOLE)
        _stored(
            green, out, at + 1, words, picture, number + 1, most, sigma, gain + 1, offset + 1, mask,
            NOISE, WHOLE,
        )  # fmt: skip
        _stored(
            blue, out, at + 2, words, picture, number + 2, most, sigma, gain + 2, offset + 2, mask,
            NOISE, WHOLE,
        )  # fmt: skip
    else:
        for channel in tl.static_range(CHANNELS):
            value = _value(base + channel, places, mask, CHANNELS, TURN)
            if COLOR:
                middle = _number(w, 6) * tl.load(mean + channel)
                value = middle + (value * _number(w, 6) - middle) * _number(w, 7)
            _stored(
                value, out, at + channel, words, picture, number + channel, most, sigma,
                gain + channel, offset + channel, mask, NOISE, WHOLE,
            )  # fmt: skip
