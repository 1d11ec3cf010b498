"""Winograd's transforms on the device, in plain Triton: filter, input and output of the tiles.

Letters: p one of the n² products, t a tile (over all images), c an input channel, k a filter.
The transformed input V, the transformed filter U and the products M have any strides, given in the
order (p, t, c), (p, k, c), (p, t, k); they are padded to whole blocks, with zeros.
``sizes`` of an output are its tiles, filters, height, width, tiles down and tiles across an image;
``epilogue`` is bias, residual, scale, the residual's four strides, alpha and beta, in one tuple: a
function of Triton 3.6 loses the constants in a tuple of a tuple that it is given.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tessella.kernels.epilogue.triton_device import cast, finish

Matrix = tuple[tuple[float, ...], ...]


class InputTransform(NamedTuple):
    """F(m, r) with n = m + r - 1, as far as input and filter are transformed."""

    BT: Matrix
    G: Matrix
    N: int
    M: int
    R: int


@triton.jit
def _apply(
    MATRIX: tl.constexpr,
    values,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """MATRIX · (values[FIRST], values[FIRST + STEP], …), a tuple of ROWS tiles."""
    made = ()
    for i in tl.static_range(ROWS):
        row = tl.zeros_like(values[FIRST])
        for j in tl.static_range(COLUMNS):
            if MATRIX[i][j] == 1.0:
                row += values[FIRST + STEP * j]
            elif MATRIX[i][j] != 0.0:
                row += MATRIX[i][j] * values[FIRST + STEP * j]
        made += (row,)
    return made


@triton.jit
def stored(x, dtype: tl.constexpr, TF32: tl.constexpr):
    """A transformed number as the products want it; for TF32 rounded, since they truncate."""
    if TF32:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _transform_filter(
    w, u, K, C, w_strides, u_strides, block_k, block_c,
    G: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    wk, wc, wr, ws = w_strides
    up, uk, uc = u_strides
    k = block_k * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    c = block_c * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    inside = (k < K) & (c < C)
    taps = w + k * wk + c * wc
    columns = ()
    for s in tl.static_range(R):
        column = ()
        for r in tl.static_range(R):
            tap = tl.load(taps + r * wr + s * ws, mask=inside, other=0.0)
            column += (tap.to(tl.float32),)
        columns += _apply(G, column, 0, 1, N, R)
    for i in tl.static_range(N):
        row = _apply(G, columns, i, N, N, R)
        for j in tl.static_range(N):
            made = stored(row[j], u.dtype.element_ty, TF32)
            tl.store(u + (i * N + j) * up + k * uk + c * uc, made)


@triton.jit
def _transform_input(
    x, v, sizes, x_strides, v_strides, block_t, block_c,
    TRANSFORM: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    BT: tl.constexpr = TRANSFORM.BT
    N: tl.constexpr = TRANSFORM.N
    M: tl.constexpr = TRANSFORM.M
    T, C, H, W, tiles_h, tiles_w = sizes
    xn, xc, xh, xw = x_strides
    vp, vt, vc = v_strides
    c = block_c * BLOCK[1] + tl.arange(0, BLOCK[1])[:, None]
    t = block_t * BLOCK[0] + tl.arange(0, BLOCK[0])[None, :]
    h = (t // tiles_w) % tiles_h * M - PADDING[0]
    w = t % tiles_w * M - PADDING[1]
    inside = (c < C) & (t < T)
    pixels = x + t // (tiles_w * tiles_h) * xn + c * xc + h * xh + w * xw
    columns = ()
    for j in tl.static_range(N):
        column = ()
        seen = inside & (w + j >= 0) & (w + j < W)
        for i in tl.static_range(N):
            mask = seen & (h + i >= 0) & (h + i < H)
            pixel = tl.load(pixels + i * xh + j * xw, mask=mask, other=0.0)
            column += (pixel.to(tl.float32),)
        columns += _apply(BT, column, 0, 1, N, N)
    for i in tl.static_range(N):
        row = _apply(BT, columns, i, N, N, N)
        for j in tl.static_range(N):
            made = stored(row[j], v.dtype.element_ty, TF32)
            tl.store(v + (i * N + j) * vp + t * vt + c * vc, made)


@triton.jit
def transform_filter(
    w, u, K, C, w_strides, u_strides, blocks_c,
    G: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """w [K, C, R, R] → u = G w Gᵀ. One block: BLOCK_K × BLOCK_C filters."""
    block = tl.program_id(0)
    _transform_filter(
        w, u, K, C, w_strides, u_strides, block // blocks_c, block % blocks_c,
        G, N, R, BLOCK_K, BLOCK_C, TF32,
    )  # fmt: skip


@triton.jit
def transform_input_and_filter(
    x, v, sizes, x_strides, v_strides, blocks_c, w, u, K, w_strides, u_strides,
    filter_blocks, filter_blocks_c,
    TRANSFORM: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr, FILTER: tl.constexpr,
    TF32: tl.constexpr,
):  # fmt: skip
    """v = Bᵀ x B of every tile; where w is not None also u = G w Gᵀ, by the first blocks.

    Args:
        sizes: tiles, channels, height and width of x, tiles down and across an image.
        BLOCK: tiles and channels; FILTER: filters and channels.
    """
    G: tl.constexpr = TRANSFORM.G
    block = tl.program_id(0)
    if block >= filter_blocks:
        block -= filter_blocks
        _transform_input(
            x, v, sizes, x_strides, v_strides, block // blocks_c, block % blocks_c,
            TRANSFORM, PADDING, BLOCK, TF32,
        )  # fmt: skip
    elif w is not None:
        _transform_filter(
            w, u, K, sizes[1], w_strides, u_strides, block // filter_blocks_c,
            block % filter_blocks_c, G, TRANSFORM.N, TRANSFORM.R, FILTER[0], FILTER[1],
            TF32,
        )  # fmt: skip


@triton.jit
def transform_output(
    m, y, sizes, m_strides, y_strides, blocks_k, epilogue,
    AT: tl.constexpr, N: tl.constexpr, M: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y = epilogue(Aᵀ m A). WIDE puts a tile's row of outputs side by side before storing it."""
    T, K, _, _, _, _ = sizes
    mp, mt, mk = m_strides
    bias, scale = epilogue[0], epilogue[2]
    block = tl.program_id(0)
    k = block % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    t = block // blocks_k * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    products = m + t * mt + k * mk  # the workspace is padded: no mask
    columns = ()
    for j in tl.static_range(N):
        column = ()
        for i in tl.static_range(N):
            column += (tl.load(products + (i * N + j) * mp),)
        columns += _apply(AT, column, 0, 1, M, N)
    b = None if bias is None else tl.load(bias + k, mask=k < K, other=0.0)
    s = None if scale is None else tl.load(scale + k, mask=k < K, other=0.0)
    # a power of two of neighbours: of 8 for 6 outputs the last two are not stored
    WIDTH: tl.constexpr = 8 if M == 6 else M
    for i in tl.static_range(M):
        row = _apply(AT, columns, i, M, M, N)
        if WIDE:
            even = tl.interleave(row[0], row[2]) if M == 4 else row[0]
            odd = tl.interleave(row[1], row[3]) if M == 4 else row[1]
            if M == 6:
                none = tl.zeros_like(row[0])
                even = tl.interleave(tl.interleave(row[0], row[4]), tl.interleave(row[2], none))
                odd = tl.interleave(tl.interleave(row[1], row[5]), tl.interleave(row[3], none))
            lane = tl.arange(0, BLOCK_T * WIDTH)[None, :]
            real = tl.where(lane % WIDTH < M, T, 0)
            _finish(
                tl.interleave(even, odd), y, block // blocks_k * BLOCK_T + lane // WIDTH, k, i,
                lane % WIDTH, real, sizes, y_strides, b, s, epilogue, M, ACTIVATION,
            )  # fmt: skip
        else:
            for j in tl.static_range(M):
                _finish(row[j], y, t, k, i, j, T, sizes, y_strides, b, s, epilogue, M, ACTIVATION)


@triton.jit
def _finish(
    made, y, t, k, i, j, T, sizes, y_strides, bias, scale, epilogue,
    M: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    """Output (i, j) of T tiles t, or as many as lanes: epilogue, and into its place."""
    _, K, P, Q, tiles_h, tiles_w = sizes
    yn, yk, yp, yq = y_strides
    _, residual, _, rn, rk, rp, rq, alpha, beta = epilogue
    n = t // (tiles_w * tiles_h)
    p = (t // tiles_w) % tiles_h * M + i
    q = t % tiles_w * M + j
    inside = (t < T) & (k < K) & (p < P) & (q < Q)
    if residual is None:
        other = None
    else:
        other = tl.load(residual + n * rn + k * rk + p * rp + q * rq, mask=inside, other=0.0)
    made = finish(made, scale, bias, other, alpha, beta, None, ACTIVATION)
    made = cast(made, y.dtype.element_ty)
    tl.store(y + n * yn + k * yk + p * yp + q * yq, made, mask=inside)


@triton.jit
def finish_tiles(
    made, y, first, k, sizes, y_strides, epilogue,
    ACTIVATION: tl.constexpr, BLOCK_T: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Stores 2 × 2 outputs of BLOCK_T tiles from ``first`` on: made is (y00, y01, y10, y11) [t, k].

    WIDE (pixels are neighbours): turned to [k, t] and a tile's two columns put side by side.
    """
    T, K, _, _, _, _ = sizes
    bias, scale = epilogue[0], epilogue[2]
    b = None if bias is None else tl.load(bias + k, mask=k < K, other=0.0)
    s = None if scale is None else tl.load(scale + k, mask=k < K, other=0.0)
    for i in tl.static_range(2):
        if WIDE:
            lane = tl.arange(0, BLOCK_T * 2)[None, :]
            b_column = None if b is None else b[:, None]
            s_column = None if s is None else s[:, None]
            _finish(
                tl.interleave(tl.trans(made[2 * i]), tl.trans(made[2 * i + 1])), y,
                first + lane // 2, k[:, None], i, lane % 2, T, sizes, y_strides,
                b_column, s_column, epilogue, 2, ACTIVATION,
            )  # fmt: skip
        else:
            t = first + tl.arange(0, BLOCK_T)[:, None]
            b_row = None if b is None else b[None, :]
            s_row = None if s is None else s[None, :]
            for j in tl.static_range(2):
                _finish(
                    made[2 * i + j], y, t, k[None, :], i, j, T, sizes, y_strides,
                    b_row, s_row, epilogue, 2, ACTIVATION,
                )  # fmt: skip
