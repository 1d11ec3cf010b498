"""Device code of two 1 × 1 convolutions in one kernel: the value between stays on the chip.

A block takes every so-many-th tile of pixels; each of its multiplying groups has BM of them. For
every CHUNK of channels of the value between::

    between = activation(scale · (x · Aᵀ) + bias + beta · residual)     [BM, CHUNK]
    total  += between · Bᵀ                                              [BM, OUT]

``between`` is written into the slot that its residual came in, and leaves from there twice: by TMA
to global memory, and into the tensor cores. ``_hand_out`` fills slots, ``_load_pixels`` brings x,
``_load_weights`` both weights: once and for all where they fit, else chunk after chunk, a ring that
the groups share.

Rings count uses: use u lies in place u % length, and is the (u // length)-th there, whose parity is
what a barrier can tell. Everything is freed one or two uses late, when it costs no waiting.
"""

# ruff: noqa: SIM113 (device code has no enumerate)
from __future__ import annotations

from typing import NamedTuple

from tessella.device.hopper import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    store_wait,
    wait_for_dependencies,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from tessella.kernels.epilogue.finish_device import finish_tile
from tessella.kernels.epilogue.gluon_device import channel_vector
from tessella.kernels.epilogue.int8_device import by_channel, sorted_layout
from tessella.kernels.shared.ring_device import barriers


class Ring(NamedTuple):
    """How shared memory is used; constants of the compiler.

    Attributes:
        GROUPS: of warps that multiply.
        BUFFERS, STAGES, SLOTS: the lengths of the rings for x, for weights, and for a group's
            chunks (three or more).
        RESIDENT: STAGES hold all chunks' weights, which are loaded once.
    """

    GROUPS: int
    BUFFERS: int
    STAGES: int
    SLOTS: int
    RESIDENT: bool


class Flow(NamedTuple):
    """What comes in and goes out besides.

    Attributes:
        RESIDUAL: something is added to the first's result.
        UNSCALED: beta is one.
        KEEP: ``between`` is written to memory.
    """

    RESIDUAL: bool
    UNSCALED: bool
    KEEP: bool


@gluon.jit
def _load_pixels(x, pixels, tiles, GROUPS: gl.constexpr, BUFFERS: gl.constexpr):
    """x of a tile for all groups: [BM, C] each."""
    ring, full, empty = pixels
    BM: gl.constexpr = x.block_type.shape[0]
    wait_for_dependencies()
    t = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        i = t % BUFFERS
        mbarrier.wait(empty.index(i), ((t // BUFFERS) & 1) ^ 1)
        mbarrier.expect(full.index(i), GROUPS * x.block_type.nbytes)
        for group in gl.static_range(GROUPS):
            row = (tile * GROUPS + group) * BM
            load_tile(x, [row, 0], full.index(i), ring.index(i * GROUPS + group))
        t += 1


@gluon.jit
def _load_weights(
    a, b, weights, tiles, chunks, CHUNK: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr
):
    """A's rows and B's columns of one chunk a stage. They are constants: nobody waits for them."""
    a_ring, b_ring, full, empty = weights
    last = tiles
    if RESIDENT:
        last = gl.minimum(tiles, gl.program_id(0) + 1)
    u = 0
    for _ in range(gl.program_id(0), last, gl.num_programs(0)):
        for chunk in range(chunks):
            i = u % STAGES
            mbarrier.wait(empty.index(i), ((u // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(i), a.block_type.nbytes + b.block_type.nbytes)
            load_tile(a, [chunk * CHUNK, 0], full.index(i), a_ring.index(i))
            load_tile(b, [0, chunk * CHUNK], full.index(i), b_ring.index(i))
            u += 1


@gluon.jit
def _hand_out(
    residual,
    held,
    tiles,
    chunks,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    RING: gl.constexpr,
    RESIDUAL: gl.constexpr,
):
    """The slots of COUNT groups, in turn: with a chunk's residual in them, if there is one."""
    slots, landed, freed = held
    BM: gl.constexpr = residual.block_type.shape[0]
    CHUNK: gl.constexpr = residual.block_type.shape[1]
    wait_for_dependencies()
    u = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for chunk in range(chunks):
            for group in gl.static_range(FIRST, FIRST + COUNT):
                row = (tile * RING.GROUPS + group) * BM
                i = group * RING.SLOTS + u % RING.SLOTS
                mbarrier.wait(freed.index(i), ((u // RING.SLOTS) & 1) ^ 1)
                if RESIDUAL:
                    mbarrier.expect(landed.index(i), residual.block_type.nbytes)
                    load_tile(residual, [row, chunk * CHUNK], landed.index(i), slots.index(i))
                else:
                    mbarrier.arrive(landed.index(i))
            u += 1


@gluon.jit
def _multiply(
    between, y, first, second, beta, pixels, weights, held, results, tiles, chunks,
    GROUP: gl.constexpr, RING: gl.constexpr, FLOW: gl.constexpr, FIRST: gl.constexpr,
    THEN: gl.constexpr,
):  # fmt: skip
    x_ring, x_full, x_empty = pixels
    a_ring, b_ring, w_full, w_empty = weights
    slots, landed, freed = held
    BM: gl.constexpr = y.block_type.shape[0]
    OUT: gl.constexpr = b_ring.shape[1]
    WIDTH: gl.constexpr = y.block_type.shape[1]
    CHUNK: gl.constexpr = between.block_type.shape[1]
    INTEGER: gl.constexpr = x_ring.dtype == gl.int8
    SUM: gl.constexpr = gl.int32 if INTEGER else gl.float32
    DEPTH: gl.constexpr = 32 if INTEGER else 16
    WIDEST: gl.constexpr = 128 if INTEGER else 256  # s8 with N = 256 does not pass Triton 3.6
    PART: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[4, 1],
        instr_shape=[16, CHUNK if CHUNK < WIDEST else WIDEST, DEPTH],
    )
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[4, 1],
        instr_shape=[16, OUT if OUT < WIDEST else WIDEST, DEPTH],
    )
    # tiles of ``between`` that may be on their way out: only the newest
    PENDING: gl.constexpr = 1 if FLOW.KEEP else 0
    wait_for_dependencies()
    t = 0
    u = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = (tile * RING.GROUPS + GROUP) * BM
        at = t % RING.BUFFERS
        mbarrier.wait(x_full.index(at), (t // RING.BUFFERS) & 1)
        x = x_ring.index(at * RING.GROUPS + GROUP)
        total = warpgroup_mma_init(gl.zeros((BM, OUT), dtype=SUM, layout=TOTAL))
        for chunk in range(chunks):
            stage = u % RING.STAGES
            if RING.RESIDENT:
                mbarrier.wait(w_full.index(stage), 0)
            else:
                mbarrier.wait(w_full.index(stage), (u // RING.STAGES) & 1)
            part = gl.zeros((BM, CHUNK), dtype=SUM, layout=PART)
            a = a_ring.index(stage).permute((1, 0))
            part = warpgroup_mma(x, a, part, use_acc=False, is_async=True)
            # this product, and the one that adds the chunk before this one to the total
            part, total = warpgroup_mma_wait(0, deps=(part, total))
            store_wait(PENDING)
            barrier()
            mbarrier.arrive(
                freed.index(GROUP * RING.SLOTS + (u + RING.SLOTS - 2) % RING.SLOTS), pred=u > 1
            )
            mbarrier.arrive(x_empty.index(at), pred=chunk == chunks - 1)
            if not RING.RESIDENT:
                mbarrier.arrive(w_empty.index((u + RING.STAGES - 1) % RING.STAGES), pred=u > 0)
            slot = GROUP * RING.SLOTS + u % RING.SLOTS
            mbarrier.wait(landed.index(slot), (u // RING.SLOTS) & 1)
            staged = slots.index(slot)
            _finish(part, staged, first, chunk * CHUNK, beta, FLOW, FIRST)
            fence_async_shared()
            barrier()
            if FLOW.KEEP:
                store_tile(between, [row, chunk * CHUNK], staged)
            b = b_ring.index(stage).permute((1, 0))
            total = warpgroup_mma(staged, b, total, is_async=True)
            u += 1
        total = warpgroup_mma_wait(0, deps=(total,))
        store_wait(PENDING)  # the result before this one has left
        barrier()
        _store_result(total, y, results, second, row, GROUP * (OUT // WIDTH), 0, THEN)
        t += 1
    store_wait(0)


@gluon.jit
def _store_result(
    total, y, results, vectors, row, PLACE: gl.constexpr, COLUMN: gl.constexpr, THEN: gl.constexpr
):
    """The result's columns from COLUMN on, in pieces: those of one fit a thread's registers."""
    ROWS: gl.constexpr = total.shape[0]
    HALF: gl.constexpr = total.shape[1] // 2
    BESIDE: gl.constexpr = PLACE + HALF // y.block_type.shape[1]
    if total.shape[1] > y.block_type.shape[1]:
        left, right = total.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        _store_result(left, y, results, vectors, row, PLACE, COLUMN, THEN)
        _store_result(right, y, results, vectors, row, BESIDE, COLUMN + HALF, THEN)
    else:
        result = results.index(PLACE)
        ALONE: gl.constexpr = Flow(False, True, False)
        _finish(total, result, vectors, COLUMN, 1.0, ALONE, THEN)
        fence_async_shared()
        barrier()
        store_tile(y, [row, COLUMN], result)


@gluon.jit
def _finish(sums, staged, vectors, channel, beta, FLOW: gl.constexpr, ENDING: gl.constexpr):
    """The epilogue of sums whose first column is ``channel``, into shared memory."""
    scale, bias, channels = vectors
    EIGHT_BITS: gl.constexpr = staged.dtype == gl.int8
    if EIGHT_BITS:
        FINAL: gl.constexpr = sorted_layout(by_channel(sums).type.layout)
        sums = gl.convert_layout(by_channel(sums), FINAL)
    L: gl.constexpr = sums.type.layout
    V: gl.constexpr = gl.SliceLayout(0, L)
    s = channel_vector(scale, channel, channels, sums.shape[1], V)
    b = channel_vector(bias, channel, channels, sums.shape[1], V)
    added = None
    if FLOW.RESIDUAL:
        added = staged.load(L)
    DTYPE: gl.constexpr = staged.dtype
    if FLOW.UNSCALED:
        made = finish_tile(sums, s, b, added, 1.0, 1.0, None, ENDING, DTYPE)
    else:
        made = finish_tile(sums, s, b, added, 1.0, beta, None, ENDING, DTYPE)
    staged.store(made)


@gluon.jit(do_not_specialize=["tiles", "chunks"])
def convolve_twice(
    x, a, b, residual, between, y, epilogue, tiles, chunks,
    RING: gl.constexpr, FLOW: gl.constexpr, FIRST: gl.constexpr, THEN: gl.constexpr,
):  # fmt: skip
    """Two 1 × 1 convolutions, [pixels, C] → [pixels, between_channels] → [pixels, y_channels].

    Args:
        x, residual, between, y: descriptors of pixels × channels; their boxes are a group's tile:
            BM × (C, CHUNK, CHUNK, a part of OUT: half of it or all).
        a, b: descriptors of the weights, boxes CHUNK × C and OUT × CHUNK.
        epilogue: scale and bias of the first (a number a channel, or None), beta, scale and bias of
            the second, channels between and of y.
        tiles: of GROUPS · BM pixels; ``chunks``: of the channels between.
    """
    GROUPS: gl.constexpr = RING.GROUPS
    RESIDENT: gl.constexpr = RING.RESIDENT
    RESIDUAL: gl.constexpr = FLOW.RESIDUAL
    HELD: gl.constexpr = RING.GROUPS * RING.SLOTS
    BUFFERS: gl.constexpr = RING.BUFFERS
    STAGES: gl.constexpr = RING.STAGES
    BM: gl.constexpr = y.block_type.shape[0]
    CHUNK: gl.constexpr = between.block_type.shape[1]
    OUT: gl.constexpr = b.block_type.shape[0]
    WIDTH: gl.constexpr = y.block_type.shape[1]
    C: gl.constexpr = x.block_type.shape[1]
    x_ring = gl.allocate_shared_memory(x.dtype, [BUFFERS * GROUPS, BM, C], x.layout)
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES, CHUNK, C], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, OUT, CHUNK], b.layout)
    slots = gl.allocate_shared_memory(x.dtype, [HELD, BM, CHUNK], between.layout)
    results = gl.allocate_shared_memory(y.dtype, [GROUPS * OUT // WIDTH, BM, WIDTH], y.layout)
    pixels = (x_ring, barriers(BUFFERS, 1), barriers(BUFFERS, GROUPS))
    weights = (a_ring, b_ring, barriers(STAGES, 1), barriers(STAGES, GROUPS))
    held = (slots, barriers(HELD, 1), barriers(HELD, 1))
    fence_async_shared()
    barrier()
    scale, bias, beta, next_scale, next_bias, between_channels, y_channels = epilogue
    first = (scale, bias, between_channels)
    second = (next_scale, next_bias, y_channels)
    # fmt: off
    if GROUPS == 1:
        gl.warp_specialize([
            (_multiply, (between, y, first, second, beta, pixels, weights, held, results, tiles,
                         chunks, 0, RING, FLOW, FIRST, THEN)),
            (_load_pixels, (x, pixels, tiles, GROUPS, BUFFERS)),
            (_load_weights, (a, b, weights, tiles, chunks, CHUNK, STAGES, RESIDENT)),
            (_hand_out, (residual, held, tiles, chunks, 0, 1, RING, RESIDUAL)),
        ], [1, 1, 1], [88, 88, 88])  # of 168 · 2; the group gets the rest
    elif GROUPS == 2:
        gl.warp_specialize([
            (_multiply, (between, y, first, second, beta, pixels, weights, held, results, tiles,
                         chunks, 0, RING, FLOW, FIRST, THEN)),
            (_multiply, (between, y, first, second, beta, pixels, weights, held, results, tiles,
                         chunks, 1, RING, FLOW, FIRST, THEN)),
            (_load_pixels, (x, pixels, tiles, GROUPS, BUFFERS)),
            (_load_weights, (a, b, weights, tiles, chunks, CHUNK, STAGES, RESIDENT)),
            (_hand_out, (residual, held, tiles, chunks, 0, 1, RING, RESIDUAL)),
            (_hand_out, (residual, held, tiles, chunks, 1, 1, RING, RESIDUAL)),
        ], [4, 1, 1, 1, 1], [240, 24, 24, 24, 24])
    else:
        gl.warp_specialize([
            (_multiply, (between, y, first, second, beta, pixels, weights, held, results, tiles,
                         chunks, 0, RING, FLOW, FIRST, THEN)),
            (_multiply, (between, y, first, second, beta, pixels, weights, held, results, tiles,
                         chunks, 1, RING, FLOW, FIRST, THEN)),
            (_multiply, (between, y, first, second, beta, pixels, weights, held, results, tiles,
                         chunks, 2, RING, FLOW, FIRST, THEN)),
            (_load_pixels, (x, pixels, tiles, GROUPS, BUFFERS)),
            (_load_weights, (a, b, weights, tiles, chunks, CHUNK, STAGES, RESIDENT)),
            (_hand_out, (residual, held, tiles, chunks, 0, 3, RING, RESIDUAL)),
        ], [4, 4, 1, 1, 1], [160, 160, 24, 24, 24])  # one warp hands out: 16 in all
    # fmt: on
