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

from typing import Any, NamedTuple

from tessella.device.grouped_numbers import unspecialized
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
from tessella.kernels.shared.ring_device import barriers


class Product(NamedTuple):
    """How stages are multiplied; constants of the compiler.

    Attributes:
        SWAP: output channels are the product's rows.
        PROMOTE: fp8 products of one stage are summed in float32 outside the tensor cores.
        LAYOUT: of the sums.
        SLAB: of the pixels of one tap in shared memory, [BM, BK].
    """

    SWAP: bool
    PROMOTE: bool
    LAYOUT: Any
    SLAB: Any


class Ending(NamedTuple):
    """What is done to a tile's sums; the last four as in ``finish_device.Ending``.

    Attributes:
        RESIDUAL: whether something is added.
        UNSCALED: alpha and beta are one.
    """

    RESIDUAL: bool
    UNSCALED: bool
    SMALL: bool
    FOLDED: bool
    SIXTEEN_BITS: bool
    ACTIVATION: str | None


@gluon.jit
def _product(acc, memory, i, w_at, w_step, TILE: gl.constexpr, PRODUCT: gl.constexpr):
    """Starts the products of stage i, of weights from w_at on."""
    SLAB: gl.constexpr = PRODUCT.SLAB
    TAPS: gl.constexpr = TILE.TAPS
    BM: gl.constexpr = TILE.BN * TILE.BH * TILE.BW
    x_ring, w_ring = memory
    for t in gl.static_range(TAPS):
        if TAPS == 1:
            x = x_ring.index(i).reshape([BM, TILE.BK])
        else:
            x = reinterpret(
                x_ring.index(i * (TILE.BH + TAPS - 1) + t),
                x_ring.dtype,
                [BM, TILE.BK],
                SLAB,
            )
        w = w_ring.index(w_at + t * w_step).reshape([TILE.BCO, TILE.BK])
        if PRODUCT.SWAP:
            acc = warpgroup_mma(w, x.permute((1, 0)), acc, is_async=True)
        else:
            acc = warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def _multiply(
    y,
    epilogue,
    memory,
    slots,
    signals,
    geometry,
    grid,
    items,
    images,
    GROUP: gl.constexpr,
    TILE: gl.constexpr,
    RING: gl.constexpr,
    PRODUCT: gl.constexpr,
    ENDING: gl.constexpr,
):
    LAYOUT: gl.constexpr = PRODUCT.LAYOUT
    bias, scale, alpha, beta, gamma, K = epilogue
    full, empty, landed, freed, turns = signals
    BM: gl.constexpr = TILE.BN * TILE.BH * TILE.BW
    ROWS: gl.constexpr = TILE.BCO if PRODUCT.SWAP else BM
    COLUMNS: gl.constexpr = BM if PRODUCT.SWAP else TILE.BCO
    SUM: gl.constexpr = gl.int32 if memory[0].dtype == gl.int8 else gl.float32
    sums = gl.zeros((ROWS, COLUMNS), dtype=SUM, layout=LAYOUT)
    FINAL: gl.constexpr = sorted_layout(
        _in_order(sums, BM, TILE.BCO, TILE.INTERLEAVE, PRODUCT.SWAP).type.layout
    )
    SIDE: gl.constexpr = 1 if PRODUCT.SWAP else 0
    VECTOR: gl.constexpr = gl.SliceLayout(SIDE, FINAL)
    wait_for_dependencies()
    C, chunks, _, _, _, S, _, _, _, _ = geometry
    if RING.HELD > 0:
        mbarrier.wait(full.index(RING.STAGES), 0)
    g = 0
    k, q, p, n = first_tile(grid)
    if GROUP == 1:
        steps, _, _, _, _, _ = terms(p, q, grid, geometry, TILE)
        g += steps
        k, q, p, n = next_tile(k, q, p, n, grid)
    v = 0
    every = RING.GROUPS * gl.num_programs(0)
    for _ in range(gl.program_id(0) + GROUP * gl.num_programs(0), items, every):
        steps, r, s, c, s_low, s_high = terms(p, q, grid, geometry, TILE)
        k0 = channel(k, grid, TILE.BCO)
        # what the epilogue wants of global memory is on its way while the products run
        factor = channel_vector(scale, k0, K, TILE.BCO, VECTOR, SIDE)
        b = channel_vector(bias, k0, K, TILE.BCO, VECTOR, SIDE)
        acc = gl.zeros((ROWS, COLUMNS), dtype=SUM, layout=LAYOUT)
        if RING.GROUPS == 2:  # in turns: a stage's parity tells only two rounds of the ring apart
            mbarrier.wait(turns.index(GROUP), (v & 1) ^ (1 - GROUP))
        at: gl.constexpr = GROUP * RING.SLOTS
        for step in range(steps):
            i = g % RING.STAGES
            mbarrier.wait(full.index(i), (g // RING.STAGES) & 1)
            if RING.HELD > 0:
                w_at = (r * TILE.TAPS * S + s) * chunks + c // TILE.BK
                w_step = S * chunks
                r, s, c = next_step(r, s, c, s_low, s_high, C, TILE.BK)
            else:
                w_at = i * TILE.TAPS
                w_step = 1
            if PRODUCT.PROMOTE:  # of one stage only, in the tensor core's narrow fp8 accumulator
                part = gl.zeros((ROWS, COLUMNS), dtype=SUM, layout=LAYOUT)
                part = _product(part, memory, i, w_at, w_step, TILE, PRODUCT)
                acc += warpgroup_mma_wait(0, deps=(part,))
                barrier()
                mbarrier.arrive(empty.index(i))
            else:
                acc = _product(acc, memory, i, w_at, w_step, TILE, PRODUCT)
                # the products of the stage before have finished: hand it back
                acc = warpgroup_mma_wait(TILE.TAPS, deps=(acc,))
                barrier()
                mbarrier.arrive(empty.index((g + RING.STAGES - 1) % RING.STAGES), pred=step > 0)
            g += 1
        if not PRODUCT.PROMOTE:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        if ENDING.RESIDUAL:  # the group's last output has left its slot for the next residual
            store_wait(pendings=0)
        else:  # the output that was last in the slot has left it
            store_wait(pendings=RING.SLOTS - 1)
        barrier()
        if ENDING.RESIDUAL:
            mbarrier.arrive(freed.index(at + (v + RING.SLOTS - 1) % RING.SLOTS), pred=v > 0)
        if not PRODUCT.PROMOTE:
            mbarrier.arrive(empty.index((g + RING.STAGES - 1) % RING.STAGES), pred=steps > 0)
        if RING.GROUPS == 2:
            mbarrier.arrive(turns.index(1 - GROUP))
        slot = at + v % RING.SLOTS
        if ENDING.RESIDUAL:
            mbarrier.wait(landed.index(slot), (v // RING.SLOTS) & 1)
        staged = slots.index(slot).reshape([BM, TILE.BCO])
        if PRODUCT.SWAP:
            staged = staged.permute((1, 0))
        acc = gl.convert_layout(_in_order(acc, BM, TILE.BCO, TILE.INTERLEAVE, PRODUCT.SWAP), FINAL)
        added = None
        if ENDING.RESIDUAL:
            added = staged.load(FINAL)
        DTYPE: gl.constexpr = staged.dtype
        if ENDING.UNSCALED:
            acc = finish_tile(acc, factor, b, added, 1.0, 1.0, gamma, ENDING, DTYPE)
        else:
            acc = finish_tile(acc, factor, b, added, alpha, beta, gamma, ENDING, DTYPE)
        staged.store(acc)
        fence_async_shared()
        barrier()
        image = n * TILE.BN
        if TILE.SPLIT:
            image += gl.program_id(0) % grid[2] * images
        store_tile(y, [p * TILE.BH, image, q * TILE.BW, k0], slots.index(slot))
        k, q, p, n = next_tile(k, q, p, n, grid)
        if RING.GROUPS == 2:
            steps, _, _, _, _, _ = terms(p, q, grid, geometry, TILE)
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


@unspecialized
@gluon.jit(do_not_specialize=["geometry", "walk", "counts", "group"])
def convolve(
    x0, x1, x2, x3, w, y, residual, epilogue, geometry, walk, last_k, counts, group,
    TILE: gl.constexpr, RING: gl.constexpr, PRODUCT: gl.constexpr, ENDING: gl.constexpr,
    REGISTERS: gl.constexpr, CONSTANT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """A convolution's forward pass, [N, H, W, C] and [K, R·S, C] → [N, P, Q, K].

    Args:
        x0 … x3: descriptors of x as [H, N, W, C]; with a stride of two, of its even/odd rows ×
            even/odd columns; with TAPS, x1 has boxes of TAPS - 1 rows.
        w: descriptor of the weights; with INTERLEAVE, of their rows in the epilogue's order.
        y, residual: descriptors of the result and of what is added to it, [P, N, Q, K].
        epilogue: bias, scale, alpha, beta, gamma, and K or None.
        geometry: C, the input channels of x, or those that a tile of output channels reads of its
            groups; chunks, the stages that a tap's channels take; H, W; R, S; padding; dilation.
        walk: tiles of channels, columns and rows; the number of blocks, written in digits of these;
            splits: with SPLIT, parts that the sum is cut into, a block each.
        last_k: where the last tile of channels begins.
        counts: images of y between the results of one part and of the next; tiles × splits.
        group: output and input channels of a group; None and None if there is one group.
        REGISTERS: of a thread that multiplies, and of one that loads.
        CONSTANT: no kernel just before this one may have written the weights.
    """
    RESIDUAL: gl.constexpr = ENDING.RESIDUAL
    SLAB: gl.constexpr = PRODUCT.SLAB
    STAGES: gl.constexpr = RING.STAGES
    SLOTS: gl.constexpr = RING.GROUPS * RING.SLOTS
    x = (x0, x1, x2, x3)
    grid = (walk[0], walk[1], walk[2], last_k)
    images, items = counts
    if TILE.TAPS == 1:
        x_ring = gl.allocate_shared_memory(x0.dtype, [STAGES] + x0.block_type.shape, x0.layout)
    else:  # a row of pixels at a time: BN · BW ≥ 8 of them keep the swizzle's phase
        x_ring = gl.allocate_shared_memory(
            x0.dtype,
            [STAGES * (TILE.BH + TILE.TAPS - 1), TILE.BN * TILE.BW, TILE.BK],
            SLAB,
        )
    TILES: gl.constexpr = RING.HELD if RING.HELD > 0 else STAGES * TILE.TAPS
    w_ring = gl.allocate_shared_memory(w.dtype, [TILES] + w.block_type.shape, w.layout)
    slots = gl.allocate_shared_memory(y.dtype, [SLOTS] + y.block_type.shape, y.layout)
    FULL: gl.constexpr = STAGES + (1 if RING.HELD > 0 else 0)  # the last: of held weights
    full = gl.allocate_shared_memory(gl.int64, [FULL, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    if RING.HELD > 0:
        mbarrier.init(full.index(STAGES), count=RING.HELD)
    empty = barriers(STAGES, 1)
    landed = barriers(SLOTS, 1)
    freed = barriers(SLOTS, 1)
    turns = empty  # where nobody asks: 3.6 puts no None into a tuple
    if RING.GROUPS == 2:
        turns = barriers(2, 1)
    fence_async_shared()
    barrier()
    memory = (x_ring, w_ring)
    signals = (full, empty, landed, freed, turns)
    if RING.GROUPS == 1:
        gl.warp_specialize([
            (_multiply, (y, epilogue, memory, slots, signals, geometry, grid, items, images, 0,
                         TILE, RING, PRODUCT, ENDING)),
            (load, (x, w, memory, full, empty, geometry, grid, items, group, TILE, RING, CONSTANT)),
            (load_residual, (residual, slots, landed, freed, grid, items, TILE, RING,
                             RESIDUAL)),
        ], [1, 1], [REGISTERS[1], REGISTERS[1]])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (y, epilogue, memory, slots, signals, geometry, grid, items, images, 0,
                         TILE, RING, PRODUCT, ENDING)),
            (_multiply, (y, epilogue, memory, slots, signals, geometry, grid, items, images, 1,
                         TILE, RING, PRODUCT, ENDING)),
            (load, (x, w, memory, full, empty, geometry, grid, items, group, TILE, RING, CONSTANT)),
            (load_residual, (residual, slots, landed, freed, grid, items, TILE, RING,
                             RESIDUAL)),
        ], [num_warps, 1, 1], [REGISTERS[0], REGISTERS[1], REGISTERS[1]])  # fmt: skip
