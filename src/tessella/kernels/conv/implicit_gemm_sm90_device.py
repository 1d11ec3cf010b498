"""Device code of the Hopper convolution: one loader, one or two multiplying groups, one epilogue.

A block stays on its multiprocessor and takes every so-many-th tile of the output. Its warps have
roles: ``_load`` fills a ring of shared-memory stages by TMA, one stage a filter tap and ``BK``
channels (what lies outside the image is filled with zeros, which is the padding);
``_multiply`` feeds the tensor cores from the ring and finishes tiles; ``_load_residual`` brings
residuals straight into the buffers that the outputs will leave from. With two multiplying groups
the products of one tile hide the epilogue of the other.

Letters: a tile is BN images × BH × BW output pixels (BM together) × BCO output channels.
``_taps``, ``_place``, ``_begin`` and ``_next`` say which taps touch a tile and walk over them; a
gradient with respect to the input is the same walk over flipped weights.
"""

from __future__ import annotations

from tessella.kernels.epilogue_device import channel_vector, finish
from tessella.kernels.hopper import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _taps(first, last, size, taps, pad, dilation, STRIDE: gl.constexpr):
    """The first and last tap that reach the image from output rows first … last; at least one."""
    high = gl.minimum(gl.maximum(size - 1 + pad - first * STRIDE, 0) // dilation, taps - 1)
    low = (gl.maximum(pad - last * STRIDE, 0) + dilation - 1) // dilation
    return gl.minimum(low, high), high


@gluon.jit
def _place(item, grid, BN: gl.constexpr, BH: gl.constexpr, BW: gl.constexpr, BCO: gl.constexpr):
    """Where a tile lies: first image, row, column, output channel; and which part of the sum."""
    tiles_k, tiles_q, tiles_p, splits = grid
    tile = item // splits
    pixel = tile // tiles_k
    row = pixel // tiles_q
    n0 = (row // tiles_p) * BN
    return (
        n0,
        (row % tiles_p) * BH,
        (pixel % tiles_q) * BW,
        (tile % tiles_k) * BCO,
        item % splits,
    )


@gluon.jit
def _begin(
    p0,
    q0,
    split,
    splits,
    geometry,
    BH: gl.constexpr,
    BW: gl.constexpr,
    BK: gl.constexpr,
    SH: gl.constexpr,
    SW: gl.constexpr,
):
    """A tile's part of the sum: (number of steps, first tap row, column, chunk, column range)."""
    C, H, W, R, S, pad_h, pad_w, dil_h, dil_w = geometry
    r_low, r_high = _taps(p0, p0 + BH - 1, H, R, pad_h, dil_h, SH)
    s_low, s_high = _taps(q0, q0 + BW - 1, W, S, pad_w, dil_w, SW)
    chunks = (C + BK - 1) // BK
    columns = s_high - s_low + 1
    steps = (r_high - r_low + 1) * columns * chunks
    begin = steps * split // splits
    end = steps * (split + 1) // splits
    tap = begin // chunks
    r = r_low + tap // columns
    s = s_low + tap % columns
    return end - begin, r, s, (begin % chunks) * BK, s_low, s_high


@gluon.jit
def _steps(
    item,
    grid,
    geometry,
    BN: gl.constexpr,
    BH: gl.constexpr,
    BW: gl.constexpr,
    BCO: gl.constexpr,
    BK: gl.constexpr,
    SH: gl.constexpr,
    SW: gl.constexpr,
):
    """How many stages a tile takes."""
    _, p0, q0, _, split = _place(item, grid, BN, BH, BW, BCO)
    steps, _, _, _, _, _ = _begin(p0, q0, split, grid[3], geometry, BH, BW, BK, SH, SW)
    return steps


@gluon.jit
def _next(r, s, c, s_low, s_high, C, BK: gl.constexpr):
    """The step after this one: channels first, then columns, then rows of the filter."""
    c += BK
    wrap = c >= C
    c = gl.where(wrap, 0, c)
    s = gl.where(wrap, s + 1, s)
    wrap = s > s_high
    return gl.where(wrap, r + 1, r), gl.where(wrap, s_low, s), c


@gluon.jit
def _load_x(x, n0, h, w, c, full, stage, SH: gl.constexpr, SW: gl.constexpr):
    """One tap's pixels. A stride of two reads the view of x that has this row's parity."""
    if SH == 1 and SW == 1:
        load_tile(x[0], [n0, h, w, c], full, stage)
    else:
        view = (h & (SH - 1)) * 2 + (w & (SW - 1))
        h = h >> (SH - 1)
        w = w >> (SW - 1)
        if view == 0:
            load_tile(x[0], [n0, h, w, c], full, stage)
        elif view == 1:
            load_tile(x[1], [n0, h, w, c], full, stage)
        elif view == 2:
            load_tile(x[2], [n0, h, w, c], full, stage)
        else:
            load_tile(x[3], [n0, h, w, c], full, stage)


@gluon.jit
def _load(
    x,
    w,
    x_ring,
    w_ring,
    full,
    empty,
    geometry,
    grid,
    items,
    BN: gl.constexpr,
    BH: gl.constexpr,
    BW: gl.constexpr,
    BCO: gl.constexpr,
    BK: gl.constexpr,
    SH: gl.constexpr,
    SW: gl.constexpr,
    STAGES: gl.constexpr,
    INTERLEAVE: gl.constexpr,
):
    C, _, _, _, S, pad_h, pad_w, dil_h, dil_w = geometry
    g = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n0, p0, q0, k0, split = _place(item, grid, BN, BH, BW, BCO)
        steps, r, s, c, s_low, s_high = _begin(p0, q0, split, grid[3], geometry, BH, BW, BK, SH, SW)
        for _ in range(0, steps):
            i = g % STAGES
            ready = full.index(i)
            mbarrier.wait(empty.index(i), ((g // STAGES) & 1) ^ 1)
            mbarrier.expect(ready, x[0].block_type.nbytes + w.block_type.nbytes)
            h_at = p0 * SH + r * dil_h - pad_h
            w_at = q0 * SW + s * dil_w - pad_w
            _load_x(x, n0, h_at, w_at, c, ready, x_ring.index(i), SH, SW)
            if INTERLEAVE > 1:
                at = [k0 // (4 * INTERLEAVE), 0, 0, r * S + s, c]
                load_tile(w, at, ready, w_ring.index(i))
            else:
                load_tile(w, [k0, r * S + s, c], ready, w_ring.index(i))
            r, s, c = _next(r, s, c, s_low, s_high, C, BK)
            g += 1


@gluon.jit
def _load_residual(
    residual,
    slots,
    landed,
    freed,
    grid,
    items,
    BN: gl.constexpr,
    BH: gl.constexpr,
    BW: gl.constexpr,
    BCO: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUPS: gl.constexpr,
    RESIDUAL: gl.constexpr,
):
    u = 0
    count = items if RESIDUAL else 0
    for item in range(gl.program_id(0), count, gl.num_programs(0)):
        n0, p0, q0, k0, _ = _place(item, grid, BN, BH, BW, BCO)
        v = u // GROUPS
        slot = (u % GROUPS) * SLOTS + v % SLOTS
        mbarrier.wait(freed.index(slot), ((v // SLOTS) & 1) ^ 1)
        mbarrier.expect(landed.index(slot), residual.block_type.nbytes)
        load_tile(residual, [n0, p0, q0, k0], landed.index(slot), slots.index(slot))
        u += 1


@gluon.jit
def _product(acc, x, w, BM: gl.constexpr, BK: gl.constexpr, BCO: gl.constexpr, SWAP: gl.constexpr):
    x = x.reshape([BM, BK])
    w = w.reshape([BCO, BK])
    if SWAP:
        acc = warpgroup_mma(w, x.permute((1, 0)), acc, is_async=True)
    else:
        acc = warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def _multiply(
    y,
    bias,
    scale,
    alpha,
    beta,
    K,
    x_ring,
    w_ring,
    slots,
    full,
    empty,
    landed,
    freed,
    geometry,
    grid,
    items,
    images,
    BN: gl.constexpr,
    BH: gl.constexpr,
    BW: gl.constexpr,
    BCO: gl.constexpr,
    BK: gl.constexpr,
    SH: gl.constexpr,
    SW: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    RESIDUAL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SWAP: gl.constexpr,
    PROMOTE: gl.constexpr,
    INTERLEAVE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    BM: gl.constexpr = BN * BH * BW
    ROWS: gl.constexpr = BCO if SWAP else BM
    COLUMNS: gl.constexpr = BM if SWAP else BCO
    SUM: gl.constexpr = gl.int32 if x_ring.dtype == gl.int8 else gl.float32
    g = 0
    if GROUP == 1:
        g += _steps(gl.program_id(0), grid, geometry, BN, BH, BW, BCO, BK, SH, SW)
    v = 0
    every = GROUPS * gl.num_programs(0)
    for item in range(gl.program_id(0) + GROUP * gl.num_programs(0), items, every):
        n0, p0, q0, k0, split = _place(item, grid, BN, BH, BW, BCO)
        steps, _, _, _, _, _ = _begin(p0, q0, split, grid[3], geometry, BH, BW, BK, SH, SW)
        acc = gl.zeros((ROWS, COLUMNS), dtype=SUM, layout=LAYOUT)
        for k in range(0, steps):
            i = g % STAGES
            mbarrier.wait(full.index(i), (g // STAGES) & 1)
            if PROMOTE:  # sums of one stage only in the tensor core's narrow fp8 accumulator
                part = gl.zeros((ROWS, COLUMNS), dtype=SUM, layout=LAYOUT)
                part = _product(part, x_ring.index(i), w_ring.index(i), BM, BK, BCO, SWAP)
                acc += warpgroup_mma_wait(0, deps=(part,))
                barrier()
                mbarrier.arrive(empty.index(i))
            else:
                acc = _product(acc, x_ring.index(i), w_ring.index(i), BM, BK, BCO, SWAP)
                # the product before this one has finished: hand its stage back
                acc = warpgroup_mma_wait(1, deps=(acc,))
                barrier()
                mbarrier.arrive(empty.index((g + STAGES - 1) % STAGES), pred=k > 0)
            g += 1
        if not PROMOTE:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        # this group's last output has left its slot
        if RESIDUAL:
            store_wait(pendings=0)
        else:
            store_wait(pendings=SLOTS - 1)
        barrier()
        if not PROMOTE:
            mbarrier.arrive(empty.index((g + STAGES - 1) % STAGES), pred=steps > 0)
        at: gl.constexpr = GROUP * SLOTS
        slot = at + v % SLOTS
        if RESIDUAL:
            mbarrier.arrive(freed.index(at + (v + SLOTS - 1) % SLOTS), pred=v > 0)
            mbarrier.wait(landed.index(slot), (v // SLOTS) & 1)
        staged = slots.index(slot).reshape([BM, BCO])
        if SWAP:
            staged = staged.permute((1, 0))
        if INTERLEAVE > 1:  # undo the order of the weights' rows: no data moves
            acc = acc.reshape([BM, BCO // (4 * INTERLEAVE), INTERLEAVE // 2, 8])
            acc = acc.permute((0, 1, 3, 2)).reshape([BM, BCO])
        _finish_tile(acc, staged, bias, scale, alpha, beta, k0, K, RESIDUAL, ACTIVATION, SWAP, BCO)
        fence_async_shared()
        barrier()
        store_tile(y, [split * images + n0, p0, q0, k0], slots.index(slot))
        if GROUPS == 2:
            g += _steps(item + gl.num_programs(0), grid, geometry, BN, BH, BW, BCO, BK, SH, SW)
        v += 1
    store_wait(pendings=0)


@gluon.jit
def _finish_tile(
    acc,
    staged,
    bias,
    scale,
    alpha,
    beta,
    k0,
    K,
    RESIDUAL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SWAP: gl.constexpr,
    BCO: gl.constexpr,
):
    """The epilogue, from registers into shared memory, where the residual lay until now."""
    SIDE: gl.constexpr = 1 if SWAP else 0
    VECTOR: gl.constexpr = gl.SliceLayout(SIDE, acc.type.layout)
    b = None
    s = None
    r = None
    if bias is not None:
        b = channel_vector(bias, k0, K, BCO, VECTOR).expand_dims(SIDE)
    if scale is not None:
        s = channel_vector(scale, k0, K, BCO, VECTOR).expand_dims(SIDE)
    if RESIDUAL:
        r = staged.load(acc.type.layout)
    staged.store(finish(acc, s, b, r, alpha, beta, ACTIVATION, staged.dtype))


@gluon.jit(
    do_not_specialize=[
        "alpha", "beta", "K", "C", "H", "W", "R", "S", "pad_h", "pad_w", "dil_h", "dil_w",
        "tiles_k", "tiles_q", "tiles_p", "splits", "images", "items",
    ]
)  # fmt: skip
def convolve(
    x0,
    x1,
    x2,
    x3,
    w,
    y,
    residual,
    bias,
    scale,
    alpha,
    beta,
    K,
    C,
    H,
    W,
    R,
    S,
    pad_h,
    pad_w,
    dil_h,
    dil_w,
    tiles_k,
    tiles_q,
    tiles_p,
    splits,
    images,
    items,
    BN: gl.constexpr,
    BH: gl.constexpr,
    BW: gl.constexpr,
    BCO: gl.constexpr,
    BK: gl.constexpr,
    SH: gl.constexpr,
    SW: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUPS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SWAP: gl.constexpr,
    PROMOTE: gl.constexpr,
    INTERLEAVE: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    LAYOUT: gl.constexpr,
    num_warps: gl.constexpr,
):
    """A convolution's forward pass, [N, H, W, C] and [K, R·S, C] → [N, P, Q, K].

    Args:
        x0 … x3: descriptors of x; with a stride of two, of its even/odd rows × even/odd columns.
        w: descriptor of the weights; with INTERLEAVE, of their rows in the epilogue's order.
        y, residual: descriptors of the result and of what is added to it.
        splits: parts that the sum is cut into; part i goes to image i · images of y.
        items: tiles × splits.
    """
    x = (x0, x1, x2, x3)
    geometry = (C, H, W, R, S, pad_h, pad_w, dil_h, dil_w)
    grid = (tiles_k, tiles_q, tiles_p, splits)
    x_ring = gl.allocate_shared_memory(x0.dtype, [STAGES] + x0.block_type.shape, x0.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_type.shape, w.layout)
    slots = gl.allocate_shared_memory(y.dtype, [GROUPS * SLOTS] + y.block_type.shape, y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [GROUPS * SLOTS, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [GROUPS * SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(GROUPS * SLOTS):
        mbarrier.init(landed.index(i), count=1)
        mbarrier.init(freed.index(i), count=1)
    fence_async_shared()
    barrier()
    # fmt: off
    if GROUPS == 1:
        gl.warp_specialize([
            (_multiply, (y, bias, scale, alpha, beta, K, x_ring, w_ring, slots, full, empty, landed,
                         freed, geometry, grid, items, images, BN, BH, BW, BCO, BK, SH, SW, STAGES,
                         SLOTS, GROUPS, 0, RESIDUAL, ACTIVATION, SWAP, PROMOTE, INTERLEAVE,
                         LAYOUT)),
            (_load, (x, w, x_ring, w_ring, full, empty, geometry, grid, items, BN, BH, BW, BCO, BK,
                     SH, SW, STAGES, INTERLEAVE)),
            (_load_residual, (residual, slots, landed, freed, grid, items, BN, BH, BW, BCO, SLOTS,
                              GROUPS, RESIDUAL)),
        ], [1, 1], [LOAD_REGISTERS, LOAD_REGISTERS])
    else:
        gl.warp_specialize([
            (_multiply, (y, bias, scale, alpha, beta, K, x_ring, w_ring, slots, full, empty, landed,
                         freed, geometry, grid, items, images, BN, BH, BW, BCO, BK, SH, SW, STAGES,
                         SLOTS, GROUPS, 0, RESIDUAL, ACTIVATION, SWAP, PROMOTE, INTERLEAVE,
                         LAYOUT)),
            (_multiply, (y, bias, scale, alpha, beta, K, x_ring, w_ring, slots, full, empty, landed,
                         freed, geometry, grid, items, images, BN, BH, BW, BCO, BK, SH, SW, STAGES,
                         SLOTS, GROUPS, 1, RESIDUAL, ACTIVATION, SWAP, PROMOTE, INTERLEAVE,
                         LAYOUT)),
            (_load, (x, w, x_ring, w_ring, full, empty, geometry, grid, items, BN, BH, BW, BCO, BK,
                     SH, SW, STAGES, INTERLEAVE)),
            (_load_residual, (residual, slots, landed, freed, grid, items, BN, BH, BW, BCO, SLOTS,
                              GROUPS, RESIDUAL)),
        ], [num_warps, 1, 1], [GROUP_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS])
    # fmt: on
