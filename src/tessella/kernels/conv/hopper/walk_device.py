"""Device code: how a block of the Hopper convolution walks over tiles, filter taps and channels.

A block stays on its multiprocessor and takes every so-many-th tile of the output; those of its
warps that load and those that multiply take the same walk, each for itself. A gradient with respect
to the input is the same walk over flipped weights.

``grid`` is (tiles of channels, columns, rows), the blocks' number in digits of these, splits, and
where the last tile of channels begins; ``geometry`` is C, steps that a tap's channels take, H, W,
R, S, padding and dilation. With groups of channels C is how many a tile reads, and channels are
counted from its ``first_channel`` on.
"""

from __future__ import annotations

from typing import NamedTuple

from tessella.device.hopper import gl, gluon


class Tile(NamedTuple):
    """A tile of the output, and what is read for it; constants of the compiler.

    Attributes:
        BN, BH, BW: images, rows and columns of its pixels.
        BCO: output channels.
        BK: input channels of a step.
        SH, SW: stride.
        DILATED: whether a dilation is not one.
        SPLIT: whether the sum is cut into parts, a block each.
        TAPS: of a column of the filter, that one step multiplies.
        INTERLEAVE: by how much the weights' rows are spread, see ``implicit_gemm``.
        DEPTH: taps along the depth of a volume, whose slices are the images: rows of the filter
            are those of each such tap, one after another. An odd number; 1 for images.
    """

    BN: int
    BH: int
    BW: int
    BCO: int
    BK: int
    SH: int
    SW: int
    DILATED: bool
    SPLIT: bool
    TAPS: int
    INTERLEAVE: int
    DEPTH: int = 1


class Ring(NamedTuple):
    """How shared memory is used; constants of the compiler.

    Attributes:
        STAGES: that are loaded ahead.
        HELD: tiles of weights that stay: taps × chunks, or none. Then the number of blocks is a
            multiple of the tiles of channels.
        GROUPS: of warps that multiply in turns.
        SLOTS: of a group, for its results.
    """

    STAGES: int
    HELD: int
    GROUPS: int
    SLOTS: int


@gluon.jit
def _taps(first, last, size, taps, pad, dilation, STRIDE: gl.constexpr, DILATED: gl.constexpr):
    """The first and last tap that reach the image from output rows first … last; at least one."""
    high = gl.maximum(size - 1 + pad - first * STRIDE, 0)
    low = gl.maximum(pad - last * STRIDE, 0)
    if DILATED:
        high = high // dilation
        low = (low + dilation - 1) // dilation
    high = gl.minimum(high, taps - 1)
    return gl.minimum(low, high), high


@gluon.jit
def first_tile(grid):
    """The tile that a block starts with, by its axes: channels, columns, rows, images."""
    tiles, _, splits, _ = grid
    tile = gl.program_id(0) // splits
    pixel = tile // tiles[0]
    row = pixel // tiles[1]
    return tile % tiles[0], pixel % tiles[1], row % tiles[2], row // tiles[2]


@gluon.jit
def next_tile(k, q, p, n, grid):
    """The tile as many places on as there are blocks: an addition with carries, not a division."""
    tiles, step, _, _ = grid
    k += step[0]
    over = k >= tiles[0]
    k = gl.where(over, k - tiles[0], k)
    q += step[1] + gl.where(over, 1, 0)
    over = q >= tiles[1]
    q = gl.where(over, q - tiles[1], q)
    p += step[2] + gl.where(over, 1, 0)
    over = p >= tiles[2]
    p = gl.where(over, p - tiles[2], p)
    return k, q, p, n + step[3] + gl.where(over, 1, 0)


@gluon.jit
def channel(k, grid, BCO: gl.constexpr):
    """The first output channel of a tile. The last tile ends with the last channel.

    Where tiles do not divide the channels, two of them make the same results of some: rows of
    weights outside the tensor would cost TMA four times as much as rows inside.
    """
    return gl.minimum(k * BCO, grid[3])


@gluon.jit
def first_channel(k0, group_k, group_c, UNIT: gl.constexpr):
    """The first input channel that the tile of output channels from k0 on reads.

    A group has group_k output and group_c input channels; None: there is one group. UNIT: channels
    in 16 bytes, where TMA's boxes have to begin: an H200 stops with an illegal instruction else.
    """
    return 0 if group_k is None else k0 // group_k * group_c // UNIT * UNIT


@gluon.jit
def terms(p, q, grid, geometry, TILE: gl.constexpr):
    """This block's terms of a tile's sum: steps; tap row, column and channel of the first; columns.

    All of the sum, unless it is SPLIT.
    """
    _, chunks, H, W, R, S, pad_h, pad_w, dil_h, dil_w = geometry
    r, r_high = _taps(
        p * TILE.BH, p * TILE.BH + TILE.BH - 1, H, R, pad_h, dil_h, TILE.SH, TILE.DILATED
    )
    if TILE.DEPTH > 1:  # rows of several slices: the image's edge is another one for each
        r = 0
        r_high = R - 1
    s_low, s_high = _taps(
        q * TILE.BW, q * TILE.BW + TILE.BW - 1, W, S, pad_w, dil_w, TILE.SW, TILE.DILATED
    )
    columns = s_high - s_low + 1
    steps = (r_high - r + 1) * columns * chunks
    s = s_low
    c = 0
    if TILE.SPLIT:
        splits = grid[2]
        split = gl.program_id(0) % splits
        begin = steps * split // splits
        steps = steps * (split + 1) // splits - begin
        tap = begin // chunks
        r += tap // columns
        s += tap % columns
        c = (begin % chunks) * TILE.BK
    return steps, r, s, c, s_low, s_high


@gluon.jit
def next_step(r, s, c, s_low, s_high, C, BK: gl.constexpr):
    """The step after this one: channels first, then columns, then rows of the filter."""
    c += BK
    wrap = c >= C
    c = gl.where(wrap, 0, c)
    s = gl.where(wrap, s + 1, s)
    wrap = s > s_high
    return gl.where(wrap, r + 1, r), gl.where(wrap, s_low, s), c
