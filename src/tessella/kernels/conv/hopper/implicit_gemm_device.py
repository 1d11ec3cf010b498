"""Device code of the Hopper convolution: one loader, one or two multiplying groups, one epilogue.

A block stays on its multiprocessor and takes every so-many-th tile of the output (``walk_device``).
Its warps have roles: ``load`` (``load_device``) fills a ring of shared-memory stages by TMA, one
stage a filter tap and ``BK`` channels (what lies outside the image is filled with zeros, which is
the padding); ``_multiply`` feeds the tensor cores from the ring and finishes tiles;
``load_residual`` brings residuals straight into the buffers that the outputs will leave from. With
two multiplying groups the products of one tile hide the epilogue of the other.

Letters: a tile is BH × BN images × BW output pixels (BM together, in this order) × BCO output
channels. Where a stage holds TAPS filter taps of one column, their pixels overlap: BH + TAPS - 1
rows are loaded once, and tap t multiplies from row t on. Where all tiles of a block have the same
output channels, their weights can be HELD: loaded once, all taps; a stage has pixels only, then.
"""

# ruff: noqa: RUF005, SIM113 (device code has no starred lists and no enumerate)
from __future__ import annotations

from tessella.device.hopper import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    store_tile,
    store_wait,
    wait_for_dependencies,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tessella.kernels.conv.hopper.load_device import load, load_residual
from tessella.kernels.conv.hopper.walk_device import (
    channel,
    first_tile,
    next_step,
    next_tile,
    terms,
)
from tessella.kernels.epilogue.finish_device import finish_tile
from tessella.kernels.epilogue.gluon_device import channel_vector
from tessella.kernels.epilogue.int8_device import sorted_layout


@gluon.jit
def _product(
    acc,
    x_ring,
    w_ring,
    i,
    w_at,
    w_step,
    BM: gl.constexpr,
    BH: gl.constexpr,
    BK: gl.constexpr,
    BCO: gl.constexpr,
    TAPS: gl.constexpr,
    SWAP: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Starts the products of stage i, of weights from w_at on.

    ROWS: the layout of the pixels of one tap, [BM, BK].
    """
    for t in gl.static_range(TAPS):
        if TAPS == 1:
            x = x_ring.index(i).reshape([BM, BK])
        else:
            x = reinterpret(x_ring.index(i * (BH + TAPS - 1) + t), x_ring.dtype, [BM, BK], ROWS)
        w = w_ring.index(w_at + t * w_step).reshape([BCO, BK])
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
    gamma,
    K,
    x_ring,
    w_ring,
    slots,
    full,
    empty,
    landed,
    freed,
    turns,
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
    DILATED: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    HELD: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    RESIDUAL: gl.constexpr,
    UNSCALED: gl.constexpr,
    SMALL: gl.constexpr,
    FOLDED: gl.constexpr,
    HALVES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SWAP: gl.constexpr,
    PROMOTE: gl.constexpr,
    INTERLEAVE: gl.constexpr,
    TAPS: gl.constexpr,
    LAYOUT: gl.constexpr,
    SLAB: gl.constexpr,
):
    BM: gl.constexpr = BN * BH * BW
    ROWS: gl.constexpr = BCO if SWAP else BM
    COLUMNS: gl.constexpr = BM if SWAP else BCO
    SUM: gl.constexpr = gl.int32 if x_ring.dtype == gl.int8 else gl.float32
    sums = gl.zeros((ROWS, COLUMNS), dtype=SUM, layout=LAYOUT)
    FINAL: gl.constexpr = sorted_layout(_in_order(sums, BM, BCO, INTERLEAVE, SWAP).type.layout)
    SIDE: gl.constexpr = 1 if SWAP else 0
    VECTOR: gl.constexpr = gl.SliceLayout(SIDE, FINAL)
    wait_for_dependencies()
    C, chunks, _, _, _, S, _, _, _, _ = geometry
    if HELD > 0:
        mbarrier.wait(full.index(STAGES), 0)
    g = 0
    k, q, p, n = first_tile(grid)
    if GROUP == 1:
        steps, _, _, _, _, _ = terms(p, q, grid, geometry, BH, BW, BK, SH, SW, DILATED, SPLIT)
        g += steps
        k, q, p, n = next_tile(k, q, p, n, grid)
    v = 0
    every = GROUPS * gl.num_programs(0)
    for _ in range(gl.program_id(0) + GROUP * gl.num_programs(0), items, every):
        steps, r, s, c, s_low, s_high = terms(
            p, q, grid, geometry, BH, BW, BK, SH, SW, DILATED, SPLIT
        )
        k0 = channel(k, grid, BCO)
        # what the epilogue wants of global memory is on its way while the products run
        factor = None
        b = None
        if scale is not None:
            factor = channel_vector(scale, k0, K, BCO, VECTOR).expand_dims(SIDE)
        if bias is not None:
            b = channel_vector(bias, k0, K, BCO, VECTOR).expand_dims(SIDE)
        acc = gl.zeros((ROWS, COLUMNS), dtype=SUM, layout=LAYOUT)
        if GROUPS == 2:  # in turns: a stage's parity tells only two rounds of the ring apart
            mbarrier.wait(turns.index(GROUP), (v & 1) ^ (1 - GROUP))
        at: gl.constexpr = GROUP * SLOTS
        for step in range(steps):
            i = g % STAGES
            mbarrier.wait(full.index(i), (g // STAGES) & 1)
            if HELD > 0:
                w_at = (r * S + s) * chunks + c // BK
                w_step = S * chunks
                r, s, c = next_step(r, s, c, s_low, s_high, C, BK)
            else:
                w_at = i * TAPS
                w_step = 1
            if PROMOTE:  # sums of one stage only in the tensor core's narrow fp8 accumulator
                part = gl.zeros((ROWS, COLUMNS), dtype=SUM, layout=LAYOUT)
                part = _product(
                    part, x_ring, w_ring, i, w_at, w_step, BM, BH, BK, BCO, TAPS, SWAP, SLAB
                )
                acc += warpgroup_mma_wait(0, deps=(part,))
                barrier()
                mbarrier.arrive(empty.index(i))
            else:
                acc = _product(
                    acc, x_ring, w_ring, i, w_at, w_step, BM, BH, BK, BCO, TAPS, SWAP, SLAB
                )
                # the products of the stage before have finished: hand it back
                acc = warpgroup_mma_wait(TAPS, deps=(acc,))
                barrier()
                mbarrier.arrive(empty.index((g + STAGES - 1) % STAGES), pred=step > 0)
            g += 1
        if not PROMOTE:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        if RESIDUAL:  # this group's last output has left its slot: the next residual may come
            store_wait(pendings=0)
        else:  # the output that was last in the slot has left it
            store_wait(pendings=SLOTS - 1)
        barrier()
        if RESIDUAL:
            mbarrier.arrive(freed.index(at + (v + SLOTS - 1) % SLOTS), pred=v > 0)
        if not PROMOTE:
            mbarrier.arrive(empty.index((g + STAGES - 1) % STAGES), pred=steps > 0)
        if GROUPS == 2:
            mbarrier.arrive(turns.index(1 - GROUP))
        slot = at + v % SLOTS
        if RESIDUAL:
            mbarrier.wait(landed.index(slot), (v // SLOTS) & 1)
        staged = slots.index(slot).reshape([BM, BCO])
        if SWAP:
            staged = staged.permute((1, 0))
        acc = gl.convert_layout(_in_order(acc, BM, BCO, INTERLEAVE, SWAP), FINAL)
        added = None
        if RESIDUAL:
            added = staged.load(FINAL)
        DTYPE: gl.constexpr = staged.dtype
        if UNSCALED:
            acc = finish_tile(
                acc, factor, b, added, 1.0, 1.0, gamma, FOLDED, SMALL, HALVES, ACTIVATION, DTYPE
            )
        else:
            acc = finish_tile(
                acc, factor, b, added, alpha, beta, gamma, FOLDED, SMALL, HALVES, ACTIVATION, DTYPE
            )
        staged.store(acc)
        fence_async_shared()
        barrier()
        image = n * BN
        if SPLIT:
            image += gl.program_id(0) % grid[2] * images
        store_tile(y, [p * BH, image, q * BW, k0], slots.index(slot))
        k, q, p, n = next_tile(k, q, p, n, grid)
        if GROUPS == 2:
            steps, _, _, _, _, _ = terms(p, q, grid, geometry, BH, BW, BK, SH, SW, DILATED, SPLIT)
            g += steps
            k, q, p, n = next_tile(k, q, p, n, grid)
        v += 1
    store_wait(pendings=0)


@gluon.jit
def _in_order(
    acc, BM: gl.constexpr, BCO: gl.constexpr, INTERLEAVE: gl.constexpr, SWAP: gl.constexpr
):
    """Undoes the order of the weights' rows: a new name for each element, no data moves."""
    BLOCKS: gl.constexpr = BCO // (8 * INTERLEAVE)
    if INTERLEAVE > 1:
        if SWAP:
            acc = acc.reshape([BLOCKS, INTERLEAVE, 8, BM]).permute((0, 2, 1, 3))
            acc = acc.reshape([BCO, BM])
        else:
            acc = acc.reshape([BM, BLOCKS, INTERLEAVE, 8]).permute((0, 1, 3, 2))
            acc = acc.reshape([BM, BCO])
    return acc


@gluon.jit(
    do_not_specialize=[
        "alpha", "beta", "C", "H", "W", "R", "S", "pad_h", "pad_w", "dil_h", "dil_w",
        "chunks", "tiles_k", "tiles_q", "tiles_p", "step_k", "step_q", "step_p", "step_n", "splits",
        "images", "items", "group_k", "group_c",
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
    gamma,
    K,
    C,
    chunks,
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
    step_k,
    step_q,
    step_p,
    step_n,
    splits,
    last_k,
    images,
    items,
    group_k,
    group_c,
    BN: gl.constexpr,
    BH: gl.constexpr,
    BW: gl.constexpr,
    BCO: gl.constexpr,
    BK: gl.constexpr,
    SH: gl.constexpr,
    SW: gl.constexpr,
    DILATED: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    HELD: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUPS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    UNSCALED: gl.constexpr,
    SMALL: gl.constexpr,
    FOLDED: gl.constexpr,
    HALVES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SWAP: gl.constexpr,
    PROMOTE: gl.constexpr,
    INTERLEAVE: gl.constexpr,
    TAPS: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    LAYOUT: gl.constexpr,
    SLAB: gl.constexpr,
    CONSTANT: gl.constexpr,
    num_warps: gl.constexpr,
):
    """A convolution's forward pass, [N, H, W, C] and [K, R·S, C] → [N, P, Q, K].

    Args:
        x0 … x3: descriptors of x as [H, N, W, C]; with a stride of two, of its even/odd rows ×
            even/odd columns; with TAPS, x1 has boxes of TAPS - 1 rows.
        w: descriptor of the weights; with INTERLEAVE, of their rows in the epilogue's order.
        y, residual: descriptors of the result and of what is added to it, [P, N, Q, K].
        C: input channels of x, or those that a tile of output channels reads of its groups.
        chunks: stages that a tap's channels take.
        step_k … step_n: the number of blocks, written in digits of tiles_k, tiles_q, tiles_p.
        splits: with SPLIT, parts that the sum is cut into, a block each; part i goes to image
            i · images of y.
        last_k: where the last tile of channels begins.
        items: tiles × splits.
        group_k, group_c: output and input channels of a group; None if there is one group.
        HELD: how many tiles of weights stay in shared memory: taps × chunks, or none. Then the
            number of blocks is a multiple of tiles_k.
        DILATED: whether a dilation is not one.
        UNSCALED: alpha and beta are one.
        SMALL: int32 sums are at most 2^22.
        FOLDED: scale and bias are ``int8_epilogue.folded``'s.
        HALVES: ``epilogue.in_halves``.
        CONSTANT: no kernel just before this one may have written the weights.
    """
    x = (x0, x1, x2, x3)
    geometry = (C, chunks, H, W, R, S, pad_h, pad_w, dil_h, dil_w)
    grid = ((tiles_k, tiles_q, tiles_p), (step_k, step_q, step_p, step_n), splits, last_k)
    if TAPS == 1:
        x_ring = gl.allocate_shared_memory(x0.dtype, [STAGES] + x0.block_type.shape, x0.layout)
    else:  # a row of pixels at a time: BN · BW ≥ 8 of them keep the swizzle's phase
        x_ring = gl.allocate_shared_memory(x0.dtype, [STAGES * (BH + TAPS - 1), BN * BW, BK], SLAB)
    TILES: gl.constexpr = HELD if HELD > 0 else STAGES * TAPS
    w_ring = gl.allocate_shared_memory(w.dtype, [TILES] + w.block_type.shape, w.layout)
    slots = gl.allocate_shared_memory(y.dtype, [GROUPS * SLOTS] + y.block_type.shape, y.layout)
    FULL: gl.constexpr = STAGES + 1 if HELD > 0 else STAGES  # the last one: of held weights
    full = gl.allocate_shared_memory(gl.int64, [FULL, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [GROUPS * SLOTS, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [GROUPS * SLOTS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    if HELD > 0:
        mbarrier.init(full.index(STAGES), count=HELD)
    for i in gl.static_range(GROUPS * SLOTS):
        mbarrier.init(landed.index(i), count=1)
        mbarrier.init(freed.index(i), count=1)
    fence_async_shared()
    barrier()
    # fmt: off
    if GROUPS == 1:
        gl.warp_specialize([
            (_multiply, (y, bias, scale, alpha, beta, gamma, K, x_ring, w_ring, slots, full, empty,
                         landed, freed, turns, geometry, grid, items, images, BN, BH, BW, BCO, BK,
                         SH, SW, DILATED, SPLIT, STAGES, HELD, SLOTS, GROUPS, 0, RESIDUAL,
                         UNSCALED, SMALL, FOLDED, HALVES, ACTIVATION, SWAP, PROMOTE, INTERLEAVE,
                         TAPS, LAYOUT, SLAB)),
            (load, (x, w, x_ring, w_ring, full, empty, geometry, grid, items, group_k, group_c, BN,
                     BH, BW, BCO, BK, SH, SW, DILATED, SPLIT, STAGES, HELD, TAPS, INTERLEAVE,
                    CONSTANT)),
            (load_residual, (residual, slots, landed, freed, grid, items, BN, BH, BW, BCO, SLOTS,
                              GROUPS, RESIDUAL)),
        ], [1, 1], [LOAD_REGISTERS, LOAD_REGISTERS])
    else:
        gl.warp_specialize([
            (_multiply, (y, bias, scale, alpha, beta, gamma, K, x_ring, w_ring, slots, full, empty,
                         landed, freed, turns, geometry, grid, items, images, BN, BH, BW, BCO, BK,
                         SH, SW, DILATED, SPLIT, STAGES, HELD, SLOTS, GROUPS, 0, RESIDUAL,
                         UNSCALED, SMALL, FOLDED, HALVES, ACTIVATION, SWAP, PROMOTE, INTERLEAVE,
                         TAPS, LAYOUT, SLAB)),
            (_multiply, (y, bias, scale, alpha, beta, gamma, K, x_ring, w_ring, slots, full, empty,
                         landed, freed, turns, geometry, grid, items, images, BN, BH, BW, BCO, BK,
                         SH, SW, DILATED, SPLIT, STAGES, HELD, SLOTS, GROUPS, 1, RESIDUAL,
                         UNSCALED, SMALL, FOLDED, HALVES, ACTIVATION, SWAP, PROMOTE, INTERLEAVE,
                         TAPS, LAYOUT, SLAB)),
            (load, (x, w, x_ring, w_ring, full, empty, geometry, grid, items, group_k, group_c, BN,
                     BH, BW, BCO, BK, SH, SW, DILATED, SPLIT, STAGES, HELD, TAPS, INTERLEAVE,
                    CONSTANT)),
            (load_residual, (residual, slots, landed, freed, grid, items, BN, BH, BW, BCO, SLOTS,
                              GROUPS, RESIDUAL)),
        ], [num_warps, 1, 1], [GROUP_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS])
    # fmt: on
