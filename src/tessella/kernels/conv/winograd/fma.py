"""Winograd's F(2, 3) in one kernel, in true float32 on the plain units: the Gluon twin of
``winograd.device``.

The 16 products follow one another, each over all channels, 16 at a time. While the units multiply,
the next slice of the transformed filter is copied and the pixels of the next slice of the input are
on their way to registers, where they are combined and put into shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

from tessella.device.hopper import barrier, commit_copies, copy_elements, gl, gluon, wait_for_copies
from tessella.kernels.epilogue.gluon_device import channel_vector, finish


class Takes(NamedTuple):
    """The transform's matrices by what they take: two inputs and factors a row, all outputs."""

    INPUTS: tuple[tuple[int, ...], ...]
    FACTORS: tuple[tuple[float, ...], ...]
    OUTPUTS: tuple[tuple[float, ...], ...]


class Block(NamedTuple):
    """Tiles, filters, and channels of a step."""

    T: int
    K: int
    C: int


@gluon.jit
def _pick(VALUES: gl.constexpr, ROW: gl.constexpr, i):
    """VALUES[ROW][i], i known at run time, of four."""
    picked = i * 0 + VALUES[ROW][3]
    for index in gl.static_range(3):
        picked = gl.where(i == index, VALUES[ROW][index], picked)
    return picked


@gluon.jit
def _pixels(
    images, seen, c, h, w, i, j, sizes, x_strides, INPUTS: gl.constexpr, WHOLE: gl.constexpr
):  # fmt: skip
    """The four pixels of each tile that product (i, j) combines, for channels c."""
    _, C, _, H, W, _, _, _, _ = sizes
    _, xc, xh, xw = x_strides
    r1 = _pick(INPUTS, 0, i)
    r2 = _pick(INPUTS, 1, i)
    c1 = _pick(INPUTS, 0, j)
    c2 = _pick(INPUTS, 1, j)
    top = seen & (h + r1 >= 0) & (h + r1 < H)
    bottom = seen & (h + r2 >= 0) & (h + r2 < H)
    left = (w + c1 >= 0) & (w + c1 < W)
    right = (w + c2 >= 0) & (w + c2 < W)
    p = images + c * xc
    if not WHOLE:
        top = top & (c < C)
        bottom = bottom & (c < C)
    a = gl.load(p + (r1 * xh + c1 * xw), mask=top & left, other=0.0)
    b = gl.load(p + (r1 * xh + c2 * xw), mask=top & right, other=0.0)
    d = gl.load(p + (r2 * xh + c1 * xw), mask=bottom & left, other=0.0)
    e = gl.load(p + (r2 * xh + c2 * xw), mask=bottom & right, other=0.0)
    return a, b, d, e


@gluon.jit
def _sum_parts(y, GATHER: gl.constexpr):
    """The sum over the parts, after a thread has them all: a sum across warps moves more."""
    return gl.sum(gl.convert_layout(y, GATHER), 0)


@gluon.jit
def _store_rows(
    left, right, y, i, first, k0, sizes, y_strides, epilogue,
    ACTIVATION: gl.constexpr, GATHER: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Row i of the tiles' outputs: two neighbours a tile, whose parts [parts, t, k] are added."""
    both = gl.join(_sum_parts(left, GATHER), _sum_parts(right, GATHER)).permute((1, 0, 2))
    made = both.reshape([both.shape[0], both.shape[1] * 2])
    T, K, P, Q, tiles_h, tiles_w = sizes
    yn, yk, yp, yq = y_strides
    bias, residual, scale, rn, rk, rp, rq, alpha, beta = epilogue
    made = gl.convert_layout(made, LAYOUT)
    KS: gl.constexpr = made.shape[0]
    LANES: gl.constexpr = made.shape[1]
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    k = k0 + gl.arange(0, KS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    t = first + lane // 2
    p = (t // tiles_w) % tiles_h * 2 + i
    q = t % tiles_w * 2 + lane % 2
    n = t // (tiles_w * tiles_h)
    inside = (t < T) & (p < P) & (q < Q) & (k < K)
    s = channel_vector(scale, k0, K, KS, gl.SliceLayout(1, LAYOUT), 1)
    b = channel_vector(bias, k0, K, KS, gl.SliceLayout(1, LAYOUT), 1)
    other = None
    if residual is not None:
        other = gl.load(residual + n * rn + k * rk + p * rp + q * rq, mask=inside, other=0.0)
    dtype: gl.constexpr = y.dtype.element_ty
    made = finish(made, s, b, other, alpha, beta, None, ACTIVATION, dtype)
    gl.store(y + n * yn + k * yk + p * yp + q * yq, made.to(dtype), mask=inside)


@gluon.jit
def convolve_fma(
    x, u, y, sizes, x_strides, filters, blocks_k, y_strides, epilogue,
    DEPTH: gl.constexpr, TRANSFORM: gl.constexpr, PADDING: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, WARPS_T: gl.constexpr, WHOLE: gl.constexpr,
    ACTIVATION: gl.constexpr, WIDE: gl.constexpr, WIDE_OUT: gl.constexpr,
):  # fmt: skip
    """y = epilogue(conv(x)), with ``sizes`` and ``epilogue`` as in ``winograd.fused.convolve``.

    WIDE, WIDE_OUT: pixels are neighbours in x, in y; else channels.
    """
    BLOCK_T: gl.constexpr = BLOCK.T
    BLOCK_K: gl.constexpr = BLOCK.K
    INPUTS: gl.constexpr = TRANSFORM.INPUTS
    FACTORS: gl.constexpr = TRANSFORM.FACTORS
    OUTPUTS: gl.constexpr = TRANSFORM.OUTPUTS
    BLOCK_C: gl.constexpr = BLOCK.C
    T, _, K, _, _, P, Q, tiles_h, tiles_w = sizes
    xn, _, xh, xw = x_strides
    NUM_WARPS: gl.constexpr = gl.num_warps()
    # [part of the channels, tile, filter]: the warps of a part hold sums of their own
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 4, 4], [1, 4, 8], [SPLIT, WARPS_T, NUM_WARPS // (SPLIT * WARPS_T)], [2, 1, 0]
    )
    GATHER: gl.constexpr = gl.BlockedLayout([SPLIT, 1, 4], [1, 4, 8], [1, NUM_WARPS, 1], [2, 1, 0])
    V_PART: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    U_PART: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    READ: gl.constexpr = (
        gl.BlockedLayout([1, 1], [1, 32], [NUM_WARPS, 1], [1, 0])
        if WIDE
        else gl.BlockedLayout([1, 1], [16, 2], [1, NUM_WARPS], [0, 1])
    )
    ACROSS: gl.constexpr = min(BLOCK_K // 4, 32)
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [NUM_WARPS, 1], [1, 0])
    OUT: gl.constexpr = (
        gl.BlockedLayout([1, 4], [2, 16], [NUM_WARPS, 1], [1, 0])
        if WIDE_OUT
        else gl.BlockedLayout([4, 1], [32, 1], [1, NUM_WARPS], [0, 1])
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    MIXED: gl.constexpr = (
        PLAIN
        if WIDE
        else gl.PaddedSharedLayout.with_identity_for([[BLOCK_T, 4]], [BLOCK_C, BLOCK_T], [1, 0])
    )
    v_ring = gl.allocate_shared_memory(gl.float32, [2, BLOCK_C, BLOCK_T], MIXED)
    u_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_C, BLOCK_K], PLAIN)

    block = gl.program_id(0)
    first = block // blocks_k * BLOCK_T
    k0 = block % blocks_k * BLOCK_K
    t = first + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, READ))[None, :]
    lane = gl.arange(0, BLOCK_C, layout=gl.SliceLayout(1, READ))[:, None]
    h = (t // tiles_w) % tiles_h * 2 - PADDING[0]
    w = t % tiles_w * 2 - PADDING[1]
    images = x + t // (tiles_w * tiles_h) * xn + h * xh + w * xw
    real = t < T
    u_c = gl.arange(0, BLOCK_C, layout=gl.SliceLayout(1, COPY))[:, None]
    u_k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, COPY))[None, :]
    u += k0 + u_c * filters + u_k

    STEPS: gl.constexpr = DEPTH // BLOCK_C
    y00 = gl.zeros([SPLIT, BLOCK_T, BLOCK_K], gl.float32, layout=LAYOUT)
    y01 = gl.zeros([SPLIT, BLOCK_T, BLOCK_K], gl.float32, layout=LAYOUT)
    y10 = gl.zeros([SPLIT, BLOCK_T, BLOCK_K], gl.float32, layout=LAYOUT)
    y11 = gl.zeros([SPLIT, BLOCK_T, BLOCK_K], gl.float32, layout=LAYOUT)
    product = gl.zeros([SPLIT, BLOCK_T, BLOCK_K], gl.float32, layout=LAYOUT)
    for ahead in gl.static_range(STAGES - 1):  # the 16 products take at least 16 steps
        copy_elements(u_ring.index(ahead), u)
        commit_copies()
        u += BLOCK_C * filters
    zero = block * 0
    a, b, d, e = _pixels(images, real, lane, h, w, zero, zero, sizes, x_strides, INPUTS, WHOLE)
    f1 = _pick(FACTORS, 0, zero)
    f2 = _pick(FACTORS, 1, zero)
    v_ring.index(0).store(f1 * (f1 * a + f2 * b) + f2 * (f1 * d + f2 * e))
    for step in range(16 * STEPS):
        wait_for_copies(STAGES - 2)
        barrier()
        if step + STAGES - 1 < 16 * STEPS:
            copy_elements(u_ring.index((step + STAGES - 1) % STAGES), u)
        commit_copies()
        u += BLOCK_C * filters
        after = step + 1
        seen = real & (after < 16 * STEPS)
        i = after // STEPS // 4
        j = after // STEPS % 4
        c = after % STEPS * BLOCK_C + lane
        a, b, d, e = _pixels(images, seen, c, h, w, i, j, sizes, x_strides, INPUTS, WHOLE)
        v_tile = v_ring.index(step % 2)
        u_tile = u_ring.index(step % STAGES)
        for s in gl.static_range(0, BLOCK_C, SPLIT):
            left = v_tile.slice(s, SPLIT, dim=0).load(V_PART)
            right = u_tile.slice(s, SPLIT, dim=0).load(U_PART)
            product += left[:, :, None] * right[:, None, :]
        f1 = _pick(FACTORS, 0, i)
        f2 = _pick(FACTORS, 1, i)
        g1 = _pick(FACTORS, 0, j)
        g2 = _pick(FACTORS, 1, j)
        v_ring.index(after % 2).store(f1 * (g1 * a + g2 * b) + f2 * (g1 * d + g2 * e))
        if after % STEPS == 0:
            i = step // STEPS // 4
            j = step // STEPS % 4
            top = _pick(OUTPUTS, 0, i)
            bottom = _pick(OUTPUTS, 1, i)
            leftmost = _pick(OUTPUTS, 0, j)
            rightmost = _pick(OUTPUTS, 1, j)
            y00 += top * leftmost * product
            y01 += top * rightmost * product
            y10 += bottom * leftmost * product
            y11 += bottom * rightmost * product
            product = gl.zeros([SPLIT, BLOCK_T, BLOCK_K], gl.float32, layout=LAYOUT)
    outs = (T, K, P, Q, tiles_h, tiles_w)
    _store_rows(y00, y01, y, 0, first, k0, outs, y_strides, epilogue, ACTIVATION, GATHER, OUT)
    _store_rows(y10, y11, y, 1, first, k0, outs, y_strides, epilogue, ACTIVATION, GATHER, OUT)
