"""Device code of pictures: a part cut out, mirrored, flipped and normalized, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_kernel(
    pixels, cuts, gain, offset, out, stored_height, stored_width, height, width,
    CHANNELS: tl.constexpr, CUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of a row of one picture: unsigned [N, H, W, C] to float32 [N, h, w, C].

    A row of ``cuts``, int64 [N, 4], is top, left, mirror and flip. The product and the sum round
    apart, as on the host: to be launched with ``fuse=False``.
    """
    picture, row = tl.program_id(1).to(tl.int64), tl.program_id(0)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = place < width * CHANNELS
    column, channel = place // CHANNELS, place % CHANNELS
    from_row, from_column = row, column
    if CUTS:
        at = cuts + picture * 4
        top, left = tl.load(at).to(tl.int32), tl.load(at + 1).to(tl.int32)
        mirror, flip = tl.load(at + 2), tl.load(at + 3)
        from_row = top + tl.where(flip != 0, height - 1 - row, row)
        from_column = left + tl.where(mirror != 0, width - 1 - column, column)
    line = pixels + (picture * stored_height + from_row) * stored_width * CHANNELS
    value = tl.load(line + from_column * CHANNELS + channel, mask=mask, other=0)
    scaled = (value.to(tl.int32) & 65535).to(tl.float32) * tl.load(gain + channel)
    to = out + (picture * height + row) * width * CHANNELS
    tl.store(to + place, scaled + tl.load(offset + channel), mask=mask)
