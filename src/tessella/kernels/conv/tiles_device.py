"""Device code that the portable convolution kernels share: indices, products, the epilogue.

Pixels, filters, depth and the three spatial axes are as in ``tiles``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tessella.kernels.epilogue.triton_device import cast, finish


class Window(NamedTuple):
    """What a filter reads: channels of a group, and along three axes how it lies on the image."""

    C: int
    FILTER: tuple[int, int, int]
    STRIDE: tuple[int, int, int]
    PADDING: tuple[int, int, int]
    DILATION: tuple[int, int, int]


class Block(NamedTuple):
    """What a block multiplies; constants of the compiler.

    Attributes:
        SPLITS, STEPS: parts of the depth, and the steps of DEPTH values in each.
        PRECISION: of float32 products.
        IMPRECISE: products of fp8 that the tensor cores' own sums may take up, or None.
    """

    PIXELS: int
    FILTERS: int
    DEPTH: int
    SPLITS: int
    STEPS: int
    STAGES: int
    PRECISION: str
    IMPRECISE: int | None


class Ending(NamedTuple):
    """What is done to sums; PIXELS_LAST: pixels are neighbours in memory; WIDE: 64-bit offsets."""

    ACTIVATION: str | None
    PIXELS_LAST: bool
    WIDE: bool


@triton.jit
def tile_of_program(filters, PIXELS: tl.constexpr, FILTERS: tl.constexpr, SPLITS: tl.constexpr):
    """What a block makes: its pixels, filters, group and part of the depth.

    Blocks that share pixels are neighbours, so that one of them finds the input in the cache.
    """
    across = tl.cdiv(filters, FILTERS)
    tile = tl.program_id(0)
    m = tile // across * PIXELS + tl.arange(0, PIXELS)
    k = tile % across * FILTERS + tl.arange(0, FILTERS)
    return m, k, tl.program_id(1), tl.program_id(2)


@triton.jit
def split_pixel(m, out):
    """The number of a pixel as (n, o, p, q); ``out`` are the output's three extents."""
    row = m // out[2]
    plane = row // out[1]
    return plane // out[0], plane % out[0], row % out[1], m % out[2]


@triton.jit
def first_input(n, o, p, q, strides, STRIDE: tl.constexpr, PADDING: tl.constexpr):
    """Where tap (0, 0, 0) of a pixel reads: (depth, row, column), and the offset of channel 0."""
    d = o * STRIDE[0] - PADDING[0]
    h = p * STRIDE[1] - PADDING[1]
    v = q * STRIDE[2] - PADDING[2]
    return d, h, v, n * strides[0] + d * strides[2] + h * strides[3] + v * strides[4]


@triton.jit
def split_tap(tap, FILTER: tl.constexpr):
    """The number of a tap as (t, r, s)."""
    return tap // (FILTER[1] * FILTER[2]), tap // FILTER[2] % FILTER[1], tap % FILTER[2]


@triton.jit
def is_inside(inside, d, h, v, image, PADDING: tl.constexpr):
    """``inside``, and the place lies in the image; an axis without padding is never left."""
    if PADDING[2] > 0:
        inside = inside & (v >= 0) & (v < image[2])
    if PADDING[1] > 0:
        inside = inside & (h >= 0) & (h < image[1])
    if PADDING[0] > 0:
        inside = inside & (d >= 0) & (d < image[0])
    return inside


@triton.jit
def place(pixels, filters, PIXELS_LAST: tl.constexpr):
    """Two vectors as the axes of one tile: pixels × filters, or filters × pixels."""
    if PIXELS_LAST:
        across, down = pixels[None, :], filters[:, None]
    else:
        across, down = pixels[:, None], filters[None, :]
    return across, down


@triton.jit
def multiply(
    x, w, acc, PIXELS_LAST: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE: tl.constexpr
):
    """``acc + x · w``; the tiles are transposed where pixels are last."""
    if PIXELS_LAST:
        left, right = w, x
    else:
        left, right = x, w
    return tl.dot(left, right, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE,
                  out_dtype=acc.dtype)  # fmt: skip


@triton.jit
def zeros(PIXELS: tl.constexpr, FILTERS: tl.constexpr, DTYPE: tl.constexpr,
          PIXELS_LAST: tl.constexpr):  # fmt: skip
    """Accumulators of products of ``DTYPE``."""
    kind: tl.constexpr = tl.int32 if DTYPE.is_int() else tl.float32
    shape: tl.constexpr = (FILTERS, PIXELS) if PIXELS_LAST else (PIXELS, FILTERS)
    return tl.zeros(shape, kind)


@triton.jit
def store(
    acc, y, bias, scale, residual, m, k, group, pixels, filters, out, y_strides, residual_strides,
    factors, ENDING: tl.constexpr,
):  # fmt: skip
    """The epilogue of one tile, and the tile itself: pixels ``m``, filters ``k`` of a group.

    ``factors`` are alpha, beta and gamma.
    """
    ACTIVATION: tl.constexpr = ENDING.ACTIVATION
    alpha, beta, gamma = factors
    n, o, p, q = split_pixel(m.to(tl.int64) if ENDING.WIDE else m, out)
    inside_m, inside_k = place(m < pixels, k < filters, ENDING.PIXELS_LAST)
    inside = inside_m & inside_k
    k += group * filters
    if ENDING.WIDE:
        k = k.to(tl.int64)
    at_m, at_k = place(
        n * y_strides[0] + o * y_strides[2] + p * y_strides[3] + q * y_strides[4],
        k * y_strides[1],
        ENDING.PIXELS_LAST,
    )
    if y.dtype.element_ty == tl.int32:
        tl.store(y + (at_m + at_k), acc, mask=inside)
    else:
        _, channel = place(m, k, ENDING.PIXELS_LAST)
        biases = None if bias is None else tl.load(bias + channel, mask=inside_k, other=0.0)
        scales = None if scale is None else tl.load(scale + channel, mask=inside_k, other=0.0)
        residuals = None
        if residual is not None:
            from_m, from_k = place(
                n * residual_strides[0]
                + o * residual_strides[2]
                + p * residual_strides[3]
                + q * residual_strides[4],
                k * residual_strides[1],
                ENDING.PIXELS_LAST,
            )
            residuals = tl.load(residual + (from_m + from_k), mask=inside, other=0.0)
        made = finish(acc, scales, biases, residuals, alpha, beta, gamma, ACTIVATION)
        tl.store(y + (at_m + at_k), cast(made, y.dtype.element_ty), mask=inside)


@triton.jit
def store_part(acc, parts, part, m, k, group, pixels, filters, all_filters,
               PIXELS_LAST: tl.constexpr):  # fmt: skip
    """An accumulator of a split product, for ``add_parts``: parts [splits, pixels, filters], or
    [splits, filters, pixels] where pixels are last."""
    inside_m, inside_k = place(m < pixels, k < filters, PIXELS_LAST)
    at_m, at_k = place(m, k + group * filters, PIXELS_LAST)
    base = parts + part.to(tl.int64) * pixels * all_filters
    if PIXELS_LAST:
        tl.store(base + (at_k * pixels + at_m), acc, mask=inside_m & inside_k)
    else:
        tl.store(base + (at_m * all_filters + at_k), acc, mask=inside_m & inside_k)


@triton.jit
def add_parts(
    parts, y, bias, scale, residual, pixels, filters, out, strides, factors,
    ENDING: tl.constexpr, SPLITS: tl.constexpr, PIXELS: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    """The second half of a split product: the parts are added in order, so always alike."""
    m = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    k = tl.program_id(1) * FILTERS + tl.arange(0, FILTERS)
    inside_m, inside_k = place(m < pixels, k < filters, ENDING.PIXELS_LAST)
    at_m, at_k = place(m, k, ENDING.PIXELS_LAST)
    at = at_k * pixels + at_m if ENDING.PIXELS_LAST else at_m * filters + at_k
    acc = tl.load(parts + at, mask=inside_m & inside_k, other=0)
    for part in tl.static_range(1, SPLITS):
        base = parts + tl.full((), part, tl.int64) * pixels * filters
        acc += tl.load(base + at, mask=inside_m & inside_k, other=0)
    store(acc, y, bias, scale, residual, m, k, 0, pixels, filters, out, strides[0], strides[1],
          factors, ENDING)  # fmt: skip
