"""Device code of the Hopper matrix product: three roles that work at the same time.

One warp, the producer, has TMA bring tiles of A and B into a ring in shared memory. Two warpgroups,
the consumers, multiply them with WGMMA, apply the epilogue and have TMA store the result, in one
of three ways. Cooperative: in step, on the upper and the lower half of one tile. Staggered: the
same halves, each at its own pace, so that one has the tensor cores to itself while the other is in
its epilogue. Ping-pong: alternate tiles. Or a block has one consumer, and two blocks share a
multiprocessor: paired.

Words: WM, WN, what one warpgroup accumulates; BK, a tile's length along K; a unit, one tile of C
over all of K or a range of it; STAGES, of the ring; BUFFERS, where a warpgroup's results wait.
Arguments travel in groups: ``ring`` (A's tiles, B's tiles, barriers "full" and "empty" of each
stage, the turns of ping-pong), ``out`` (C's descriptor, buffers), ``extra`` (residual's descriptor,
its barriers, scale, bias, N, gamma), ``work`` (units, tiles computed whole, tiles whose K is split,
tiles along M, N and K, tiles along K of one range).
"""

from __future__ import annotations

from typing import NamedTuple

from tessella.device.hopper import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    reinterpret,
    store_tile,
    store_wait,
    wait_for_dependencies,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tessella.kernels.epilogue.finish_device import finish_tile
from tessella.kernels.epilogue.gluon_device import channel_vector, finish
from tessella.kernels.epilogue.int8_device import by_channel, sorted_layout
from tessella.kernels.shared.ring_device import barriers, next_stage, several, skip, stage_before


class Form(NamedTuple):
    """Tiles and how they lie in memory; constants of the compiler.

    Attributes:
        WM, WN: what one warpgroup accumulates.
        BK: a tile's length along K.
        A_K_MAJOR, B_K_MAJOR: rows of A, columns of B, lie along K.
        GROUP: tiles down a column before the next column.
        SPREAD: B's tiles are [1, rows / 64, 8, 8, K], an 8 × 8 transpose of every 64 rows, so that
            a thread gets 16 neighbours of a row of C, which are one store where C has 8 bits.
        LET_START: of ``wait_for_dependencies``.
    """

    WM: int
    WN: int
    BK: int
    A_K_MAJOR: bool
    B_K_MAJOR: bool
    STAGES: int
    GROUP: int
    SPREAD: bool
    LET_START: bool


class Roles(NamedTuple):
    """Who does what; constants of the compiler.

    Attributes:
        BUFFERS: of a warpgroup, for its results on their way out.
        PROMOTE: fp8 products of one BK are summed in float32 outside the tensor cores, whose own
            sums keep about 14 bits.
        PRODUCER: registers of a thread of the producer.
    """

    SCHEDULE: str
    BUFFERS: int
    PROMOTE: bool
    PRODUCER: int


class Epilogue(NamedTuple):
    """What is done to sums: with factors, an ``Ending`` of ``finish_device``."""

    ALPHA: float
    BETA: float
    ACTIVATION: str | None
    FOLDED: bool = False
    SMALL: bool = False
    SPREAD: bool = False
    SIXTEEN_BITS: bool = False


@gluon.jit
def _tile(t, m_tiles, n_tiles, GROUP: gl.constexpr):
    """Tile ``t`` → batch, m, n, counted in tiles.

    Neighbours in time share rows of A and columns of B in the L2 cache: GROUP tiles down, then one
    to the right.
    """
    batch = t // (m_tiles * n_tiles)
    t = t % (m_tiles * n_tiles)
    width = GROUP * n_tiles
    first = (t // width) * GROUP
    rows = gl.minimum(m_tiles - first, GROUP)
    return batch, first + (t % width) % rows, (t % width) // rows


@gluon.jit
def unit_of(u, work, GROUP: gl.constexpr):
    """Unit ``u`` → batch, m, n (in tiles), its first tile along K and their number.

    The first ``whole`` units are tiles over all of K; then come ranges of K of the other tiles.
    """
    _, whole, split, m_tiles, n_tiles, k_tiles, k_each = work
    part = gl.maximum(u - whole, 0)
    begin = (part // split) * k_each
    batch, m, n = _tile(gl.minimum(u, whole + part % split), m_tiles, n_tiles, GROUP)
    count = gl.where(u < whole, k_tiles, gl.minimum(k_each, k_tiles - begin))
    return batch, m, n, begin, count


@gluon.jit
def produce(a, b, ring, work, b_batched, PARTS: gl.constexpr, FORM: gl.constexpr):
    """Loads A's and B's tiles, unit after unit, as fast as stages become empty."""
    WM: gl.constexpr = FORM.WM
    WN: gl.constexpr = FORM.WN
    BK: gl.constexpr = FORM.BK
    A_K_MAJOR: gl.constexpr = FORM.A_K_MAJOR
    B_K_MAJOR: gl.constexpr = FORM.B_K_MAJOR
    STAGES: gl.constexpr = FORM.STAGES
    GROUP: gl.constexpr = FORM.GROUP
    SPREAD: gl.constexpr = FORM.SPREAD
    BYTES: gl.constexpr = PARTS * a.block_type.nbytes + b.block_type.nbytes
    a_ring, b_ring, full, empty, _ = ring
    wait_for_dependencies(FORM.LET_START)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # an empty ring: the first round does not wait
    for u in range(gl.program_id(0), work[0], gl.num_programs(0)):
        batch, m, n, begin, count = unit_of(u, work, GROUP)
        m0 = m * (PARTS * WM)
        n0 = n * WN
        batch_b = batch * b_batched
        for k in range(begin, begin + count):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, BYTES)
            k0 = k * BK
            for part in gl.static_range(PARTS):
                into = a_ring.index(stage * PARTS + part)
                if A_K_MAJOR:
                    load_tile(a, [batch, m0 + part * WM, k0], ready, into)
                else:
                    load_tile(a, [batch, k0, m0 + part * WM], ready, into)
            if SPREAD:
                load_tile(b, [batch_b, n0 // 64, 0, 0, k0], ready, b_ring.index(stage))
            elif B_K_MAJOR:
                load_tile(b, [batch_b, n0, k0], ready, b_ring.index(stage))
            else:
                load_tile(b, [batch_b, k0, n0], ready, b_ring.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def factors(ring, stage, part, FORM: gl.constexpr):
    """A's tile [WM, BK] and B's [BK, WN] in a stage, however they lie."""
    WM: gl.constexpr = FORM.WM
    WN: gl.constexpr = FORM.WN
    BK: gl.constexpr = FORM.BK
    A_K_MAJOR: gl.constexpr = FORM.A_K_MAJOR
    B_K_MAJOR: gl.constexpr = FORM.B_K_MAJOR
    if A_K_MAJOR:
        a = ring[0].index(part).reshape([WM, BK])
    else:
        a = ring[0].index(part).reshape([BK, WM]).permute((1, 0))
    if B_K_MAJOR:
        b = ring[1].index(stage).reshape([WN, BK]).permute((1, 0))
    else:
        b = ring[1].index(stage).reshape([BK, WN])
    return a, b


@gluon.jit
def load_residual(extra, buffers, place, m0, n0, BUFFER: gl.constexpr):
    r = extra[0]
    r_full = extra[1]
    ready = r_full.index(BUFFER)
    mbarrier.expect(ready, r.block_type.nbytes)
    load_tile(r, [place, m0, n0], ready, buffers.index(BUFFER))


@gluon.jit
def _store_columns(
    x, out, extra, place, m0, n0, r_phase,
    COLUMN: gl.constexpr, FIRST: gl.constexpr, BUFFERS: gl.constexpr, PIECES: gl.constexpr,
    EPILOGUE: gl.constexpr,
):  # fmt: skip
    """The epilogue of a tile's columns ``x``, in pieces as wide as one buffer."""
    WM: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    c, buffers = out
    r, r_full, scale, bias, N, gamma = extra
    EN: gl.constexpr = c.block_type.shape[2]
    if WIDTH > EN:
        left, right = x.reshape([WM, 2, WIDTH // 2]).permute((0, 2, 1)).split()
        _store_columns(
            left, out, extra, place, m0, n0, r_phase,
            COLUMN, FIRST, BUFFERS, PIECES, EPILOGUE,
        )  # fmt: skip
        _store_columns(
            right, out, extra, place, m0, n0, r_phase,
            COLUMN + WIDTH // 2, FIRST, BUFFERS, PIECES, EPILOGUE,
        )  # fmt: skip
    else:
        PIECE: gl.constexpr = COLUMN // EN
        BUFFER: gl.constexpr = FIRST + PIECE % BUFFERS
        ALPHA: gl.constexpr = EPILOGUE.ALPHA
        BETA: gl.constexpr = EPILOGUE.BETA
        DTYPE: gl.constexpr = c.dtype
        if EPILOGUE.SPREAD:
            SORTED: gl.constexpr = sorted_layout(by_channel(x).type.layout)
            x = gl.convert_layout(by_channel(x), SORTED)
        L: gl.constexpr = x.type.layout
        tile = buffers.index(BUFFER).reshape([WM, EN])
        V: gl.constexpr = gl.SliceLayout(0, L)
        s = channel_vector(scale, n0 + COLUMN, N, EN, V)
        v = channel_vector(bias, n0 + COLUMN, N, EN, V)
        if r is None:
            y = finish_tile(x, s, v, None, ALPHA, BETA, gamma, EPILOGUE, DTYPE)
            store_wait(BUFFERS - 1)
        else:
            mbarrier.wait(r_full.index(BUFFER), (r_phase + PIECE // BUFFERS) & 1)
            old = tile.load(L)
            y = finish_tile(x, s, v, old, ALPHA, BETA, gamma, EPILOGUE, DTYPE)
        barrier()
        tile.store(y)
        fence_async_shared()
        barrier()
        store_tile(c, [place, m0, n0 + COLUMN], buffers.index(BUFFER))
        if r is not None and PIECE + BUFFERS < PIECES:
            # the buffer's next residual, when its result has left
            store_wait(0)
            barrier()
            load_residual(extra, buffers, place, m0, n0 + COLUMN + BUFFERS * EN, BUFFER)


@gluon.jit
def _consume(
    ring, out, sums, extra, work,
    WHO: gl.constexpr, PARTS: gl.constexpr, PING_PONG: gl.constexpr, WARPS: gl.constexpr,
    BUFFERS: gl.constexpr, PROMOTE: gl.constexpr, FORM: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Multiplies, finishes and stores: every unit, half of every unit, or every other unit."""
    WM: gl.constexpr = FORM.WM
    WN: gl.constexpr = FORM.WN
    STAGES: gl.constexpr = FORM.STAGES
    GROUP: gl.constexpr = FORM.GROUP
    PART: gl.constexpr = WHO % PARTS
    ROW: gl.constexpr = PART * WM  # in the block's tile
    full = ring[2]
    empty = ring[3]
    turns = ring[4]
    c, buffers = out
    INTEGER: gl.constexpr = ring[0].dtype.is_int()
    WIDEST: gl.constexpr = 128 if INTEGER else 256  # s8 with N = 256 does not pass Triton 3.6
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[WARPS, 1],
        instr_shape=[16, WN if WN < WIDEST else WIDEST, 256 // ring[0].dtype.primitive_bitwidth],
    )
    ACC: gl.constexpr = gl.int32 if INTEGER else gl.float32
    EN: gl.constexpr = c.block_type.shape[2]
    FIRST: gl.constexpr = WHO * BUFFERS
    PIECES: gl.constexpr = WN // EN
    BARE: gl.constexpr = Epilogue(1.0, 1.0, None, False, False, False, False)
    wait_for_dependencies(FORM.LET_START)
    start = gl.program_id(0)
    step = gl.num_programs(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    if PING_PONG:
        if WHO == 1:
            _, _, _, _, others = unit_of(start, work, GROUP)
            stage, phase = skip(stage, phase, others, STAGES)
            start += step
        step *= 2
    v = gl.to_tensor(0)  # this consumer's units so far
    r_phase = gl.to_tensor(0)
    for u in range(start, work[0], step):
        batch, m, n, _, count = unit_of(u, work, GROUP)
        m0 = m * (PARTS * WM) + ROW
        n0 = n * WN
        if extra[0] is not None:
            store_wait(0)
            barrier()
            if u < work[1]:
                for piece in gl.static_range(BUFFERS):
                    load_residual(extra, buffers, batch, m0, n0 + piece * EN, FIRST + piece)
        acc = gl.zeros((WM, WN), dtype=ACC, layout=L)
        if PING_PONG:
            # a wait two rounds of the ring ahead would take an old phase for the awaited one
            mbarrier.wait(turns.index(WHO), (v & 1) ^ (1 - WHO))
        for k in range(count):
            mbarrier.wait(full.index(stage), phase)
            a, b = factors(ring, stage, stage * PARTS + PART, FORM)
            if PROMOTE:
                fresh = gl.zeros((WM, WN), dtype=ACC, layout=L)
                fresh = warpgroup_mma(a, b, fresh, use_acc=False, is_async=True)
                fresh = warpgroup_mma_wait(0, deps=(fresh,))
                barrier()
                mbarrier.arrive(empty.index(stage), count=1)
                acc += fresh
            else:
                acc = warpgroup_mma(a, b, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                # the product before this one is done: its stage goes back
                barrier()
                mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1, pred=k > 0)
            stage, phase = next_stage(stage, phase, STAGES)
        if PING_PONG:
            barrier()
            mbarrier.arrive(turns.index(1 - WHO), count=1)
            v += 1
        if not PROMOTE:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            barrier()
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
        if PING_PONG:  # over the other warpgroup's unit
            _, _, _, _, others = unit_of(u + gl.num_programs(0), work, GROUP)
            stage, phase = skip(stage, phase, others, STAGES)
        if sums[0] is None or u < work[1]:
            _store_columns(
                acc, out, extra, batch, m0, n0, r_phase, 0, FIRST, BUFFERS, PIECES, EPILOGUE
            )
            r_phase += PIECES // BUFFERS
        else:
            _store_columns(
                acc, sums, (None, None, None, None, None, None), u - work[1], ROW, 0, 0,
                0, FIRST, BUFFERS, PIECES, BARE,
            )  # fmt: skip
    store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "N", "units", "whole", "split", "m_tiles", "n_tiles", "k_tiles", "k_each", "b_batched",
    ]
)  # fmt: skip
def multiply(
    a, b, c, p, r, vectors, N,
    units, whole, split, m_tiles, n_tiles, k_tiles, k_each, b_batched,
    FORM: gl.constexpr, ROLES: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """C[batch] = epilogue(A[batch] · B[batch]); descriptors are [batch, rows, columns].

    A's and B's tiles are [1, rows, K] (K_MAJOR) or [1, K, rows]; C's and R's [1, WM, buffer width].
    P, or None: the workspace [ranges of K · split tiles, rows, columns of a tile], which gets the
    partial sums of the tiles whose K is split, in pieces of as many bytes as C's.
    ``vectors`` are scale, bias and gamma.
    """
    PROMOTE: gl.constexpr = ROLES.PROMOTE
    scale, bias, gamma = vectors
    STAGES: gl.constexpr = FORM.STAGES
    BUFFERS: gl.constexpr = ROLES.BUFFERS
    PARTS: gl.constexpr = 2 if ROLES.SCHEDULE == "staggered" else 1
    PING_PONG: gl.constexpr = ROLES.SCHEDULE == "ping_pong"
    CONSUMERS: gl.constexpr = 2 if PING_PONG or ROLES.SCHEDULE == "staggered" else 1
    WARPS: gl.constexpr = 8 if ROLES.SCHEDULE == "cooperative" else 4
    A_SHAPE: gl.constexpr = several(STAGES * PARTS, a.block_type.shape)
    B_SHAPE: gl.constexpr = several(STAGES, b.block_type.shape)
    C_SHAPE: gl.constexpr = several(CONSUMERS * BUFFERS, c.block_type.shape)
    a_ring = gl.allocate_shared_memory(a.dtype, A_SHAPE, a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, B_SHAPE, b.layout)
    buffers = gl.allocate_shared_memory(c.dtype, C_SHAPE, c.layout)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, PARTS)
    r_full = full  # where nobody asks: 3.6 puts no None into a tuple
    if r is not None:
        r_full = barriers(CONSUMERS * BUFFERS, 1)
    turns = full
    if PING_PONG:
        turns = barriers(CONSUMERS, 1)
    fence_async_shared()
    barrier()
    ring = (a_ring, b_ring, full, empty, turns)
    out = (c, buffers)
    sums = (p, buffers)
    if p is not None:
        P_SHAPE: gl.constexpr = several(CONSUMERS * BUFFERS, p.block_type.shape)
        sums = (p, reinterpret(buffers, p.dtype, P_SHAPE, p.layout))
    extra = (r, r_full, scale, bias, N, gamma)
    work = (units, whole, split, m_tiles, n_tiles, k_tiles, k_each)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (ring, out, sums, extra, work, 0, PARTS, PING_PONG, WARPS, BUFFERS,
                            PROMOTE, FORM, EPILOGUE)),
                (produce, (a, b, ring, work, b_batched, PARTS, FORM)),
            ],
            [1],
            [ROLES.PRODUCER],  # the consumer gets the rest, 232
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (ring, out, sums, extra, work, 0, PARTS, PING_PONG, WARPS, BUFFERS,
                            PROMOTE, FORM, EPILOGUE)),
                (_consume, (ring, out, sums, extra, work, 1, PARTS, PING_PONG, WARPS, BUFFERS,
                            PROMOTE, FORM, EPILOGUE)),
                (produce, (a, b, ring, work, b_batched, PARTS, FORM)),
            ],
            [4, 1],
            [240, ROLES.PRODUCER],  # the first consumer gets the rest, 240
        )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "whole", "split", "m_tiles", "n_tiles"])
def add_ranges(
    p, c, r, scale, bias, gamma, M, N, whole, split, m_tiles, n_tiles,
    RANGES: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, ROWS: gl.constexpr,
    GROUP: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """The tiles whose K was split: C = epilogue(sum of P over the ranges, always in one order).

    A block does ROWS rows of one tile. Pointers; P as ``multiply`` leaves it.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    V: gl.constexpr = gl.SliceLayout(0, L)
    t = gl.program_id(0) // (TILE_M // ROWS)
    row = (gl.program_id(0) % (TILE_M // ROWS)) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L))
    column = gl.arange(0, TILE_N, V)
    at = (t * TILE_M + row).to(gl.int64).expand_dims(1) * TILE_N + column.expand_dims(0)
    x = gl.load(p + at)
    for i in gl.static_range(1, RANGES):
        x += gl.load(p + at + i * (split.to(gl.int64) * (TILE_M * TILE_N)))
    batch, m, n = _tile(whole + t, m_tiles, n_tiles, GROUP)
    row += m * TILE_M
    column += n * TILE_N
    inside = (row < M).expand_dims(1) & (column < N).expand_dims(0)
    to = (batch.to(gl.int64) * M + row).expand_dims(1) * N + column.expand_dims(0)
    s = channel_vector(scale, n * TILE_N, N, TILE_N, V)
    v = channel_vector(bias, n * TILE_N, N, TILE_N, V)
    old = r
    if r is not None:
        old = gl.load(r + to, mask=inside, other=0.0)
    y = finish(x, s, v, old, ALPHA, BETA, gamma, ACTIVATION, c.dtype.element_ty)
    gl.store(c + to, y, mask=inside)
