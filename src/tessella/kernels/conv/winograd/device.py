"""Winograd's transforms on the device, in plain Triton: filter, input and output of the tiles.

Letters: p one of the n² products, t a tile (over all images), c an input channel, k a filter.
The transformed input V, the transformed filter U and the products M have any strides, given in the
order (p, t, c), (p, k, c), (p, t, k); they are padded to whole blocks, with zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tessella.kernels.epilogue.triton_device import cast, finish


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
    w, u, K, C, wk, wc, wr, ws, up, uk, uc, block_k, block_c,
    G: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
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
    x, v, T, C, H, W, tiles_h, tiles_w, xn, xc, xh, xw, vp, vt, vc, block_t, block_c,
    BT: tl.constexpr, N: tl.constexpr, M: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    c = block_c * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
    t = block_t * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    h = (t // tiles_w) % tiles_h * M - PAD_H
    w = t % tiles_w * M - PAD_W
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
    w, u, K, C, wk, wc, wr, ws, up, uk, uc, blocks_c,
    G: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """w [K, C, R, R] → u = G w Gᵀ. One block: BLOCK_K × BLOCK_C filters."""
    block = tl.program_id(0)
    _transform_filter(
        w, u, K, C, wk, wc, wr, ws, up, uk, uc, block // blocks_c, block % blocks_c,
        G, N, R, BLOCK_K, BLOCK_C, TF32,
    )  # fmt: skip


@triton.jit
def transform_input_and_filter(
    x, v, T, C, H, W, tiles_h, tiles_w, xn, xc, xh, xw, vp, vt, vc, blocks_c,
    w, u, K, wk, wc, wr, ws, up, uk, uc, filter_blocks, filter_blocks_c,
    BT: tl.constexpr, G: tl.constexpr, N: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    FILTER_K: tl.constexpr, FILTER_C: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """v = Bᵀ x B of every tile; where w is not None also u = G w Gᵀ, by the first blocks."""
    block = tl.program_id(0)
    if block >= filter_blocks:
        block -= filter_blocks
        _transform_input(
            x, v, T, C, H, W, tiles_h, tiles_w, xn, xc, xh, xw, vp, vt, vc,
            block // blocks_c, block % blocks_c, BT, N, M, PAD_H, PAD_W, BLOCK_T, BLOCK_C, TF32,
        )  # fmt: skip
    elif w is not None:
        _transform_filter(
            w, u, K, C, wk, wc, wr, ws, up, uk, uc, block // filter_blocks_c,
            block % filter_blocks_c, G, N, R, FILTER_K, FILTER_C, TF32,
        )  # fmt: skip


@triton.jit
def transform_output(
    m, y, T, K, P, Q, tiles_h, tiles_w, mp, mt, mk, yn, yk, yp, yq, blocks_k,
    bias, residual, scale, rn, rk, rp, rq, alpha, beta,
    AT: tl.constexpr, N: tl.constexpr, M: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y = epilogue(Aᵀ m A). WIDE puts a tile's row of outputs side by side before storing it."""
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
                lane % WIDTH, real, K, P, Q, tiles_h, tiles_w, yn, yk, yp, yq,
                b, residual, s, rn, rk, rp, rq, alpha, beta, M, ACTIVATION,
            )  # fmt: skip
        else:
            for j in tl.static_range(M):
                _finish(
                    row[j], y, t, k, i, j, T, K, P, Q, tiles_h, tiles_w, yn, yk, yp, yq,
                    b, residual, s, rn, rk, rp, rq, alpha, beta, M, ACTIVATION,
                )  # fmt: skip


@triton.jit
def _finish(
    made, y, t, k, i, j, T, K, P, Q, tiles_h, tiles_w, yn, yk, yp, yq,
    bias, residual, scale, rn, rk, rp, rq, alpha, beta,
    M: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Output (i, j) of tiles t, or as many as lanes: epilogue, and into its place."""
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
    made, y, first, k, T, K, P, Q, tiles_h, tiles_w, yn, yk, yp, yq,
    bias, residual, scale, rn, rk, rp, rq, alpha, beta,
    ACTIVATION: tl.constexpr, BLOCK_T: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Stores 2 × 2 outputs of BLOCK_T tiles from ``first`` on: made is (y00, y01, y10, y11) [t, k].

    WIDE (pixels are neighbours): turned to [k, t] and a tile's two columns put side by side.
    """
    b = None if bias is None else tl.load(bias + k, mask=k < K, other=0.0)
    s = None if scale is None else tl.load(scale + k, mask=k < K, other=0.0)
    for i in tl.static_range(2):
        if WIDE:
            lane = tl.arange(0, BLOCK_T * 2)[None, :]
            b_column = None if b is None else b[:, None]
            s_column = None if s is None else s[:, None]
            _finish(
                tl.interleave(tl.trans(made[2 * i]), tl.trans(made[2 * i + 1])), y,
                first + lane // 2, k[:, None], i, lane % 2, T, K, P, Q, tiles_h, tiles_w,
                yn, yk, yp, yq, b_column, residual, s_column, rn, rk, rp, rq, alpha, beta,
                2, ACTIVATION,
            )  # fmt: skip
        else:
            t = first + tl.arange(0, BLOCK_T)[:, None]
            b_row = None if b is None else b[None, :]
            s_row = None if s is None else s[None, :]
            for j in tl.static_range(2):
                _finish(
                    made[2 * i + j], y, t, k[None, :], i, j, T, K, P, Q, tiles_h, tiles_w,
                    yn, yk, yp, yq, b_row, residual, s_row, rn, rk, rp, rq, alpha, beta,
                    2, ACTIVATION,
                )  # fmt: skip
