"""Device code of attention on Hopper: a producer, and two consumers of 64 queries each.

The producer, one warp, has TMA bring queries, and tiles of keys and values into a ring in shared
memory. Each consumer, a warpgroup, goes in steps. A step multiplies its queries with a tile of keys
(WGMMA) and, while the tensor cores go on with the weights of the step before and its values, takes
the softmax of the products: FlashAttention-3 (Shah et al. 2024), its pipeline inside a warpgroup.
The steps of all tiles of queries are one sequence, so that the last values of a tile overlap with
the first softmax of the next. In ping-pong the consumers ask for products in turns, so that one
multiplies while the other is in its exponentials; else each goes at its own pace. Weights never
leave the registers. Blocks are persistent: the producer is a unit of work ahead.

What bounds it is the way of one warpgroup from products to products. All that can wait is done
while these are made: meeting the other warps, giving back what the step before has read, the mask.

Words: BM, queries of a tile, both consumers'; BN, keys of a tile; a unit, tiles of queries of one
head that follow each other and read its keys from shared memory once. Keys pass from the last to
the first, so that the first tile is the one that is cut off. Arguments travel in groups: ``rings``
(queries, keys, values, each with its barriers "full" and "empty"), ``work`` (units, units of a
head, tiles of a unit, tiles of queries, tiles of keys, keys, heads, heads that share keys),
``masking`` (mask, its four strides).
"""

from __future__ import annotations

from tessella.kernels.epilogue_device import quantize
from tessella.kernels.hopper import (
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
    warpgroup_mma_wait,
)

HALF = gl.constexpr(64)  # queries of one consumer
CONSUMERS = gl.constexpr(2)
SLOTS = gl.constexpr(2)  # for tiles of queries
LOWEST = gl.constexpr(-1e30)  # finite numbers of a mask stay finite, as large as they may be
NOTHING = gl.constexpr(float("-inf"))
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def _several(count, shape):
    return [count, *shape]


@gluon.jit
def _unit(u, work, CAUSAL: gl.constexpr):
    """Unit ``u`` → batch, head, its first tile of queries and the one after its last.

    Causal ones differ in length: of all heads, those that see most keys come first.
    """
    units, runs, run, tiles, _, _, heads, _ = work
    if CAUSAL:
        places = units // runs
        place = u % places
        first = (runs - 1 - u // places) * run
    else:
        place = u // runs
        first = (u % runs) * run
    return place // heads, place % heads, first, gl.minimum(first + run, tiles)


@gluon.jit
def _steps(tile, work, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """Tiles of keys that some query of a tile sees."""
    k_tiles = work[4]
    if CAUSAL:
        k_tiles = gl.minimum(k_tiles, ((tile + 1) * (CONSUMERS * HALF) + BN - 1) // BN)
    return k_tiles


@gluon.jit
def _place(position, COUNT: gl.constexpr):
    """Where a ring's tile lies, and the parity of its round."""
    return position % COUNT, (position // COUNT) & 1


@gluon.jit
def _next(stage, turn, COUNT: gl.constexpr):
    """The place after a place."""
    ends = stage + 1 == COUNT
    return gl.where(ends, 0, stage + 1), gl.where(ends, turn ^ 1, turn)


@gluon.jit
def _produce(q, k, v, rings, work, LOOK: gl.constexpr):
    """Loads queries, keys and values, unit after unit, as fast as their places become empty."""
    BN: gl.constexpr = LOOK[0]
    STAGES: gl.constexpr = LOOK[1]
    CAUSAL: gl.constexpr = LOOK[2]
    q_ring, q_full, q_empty = rings[0]
    k_ring, k_full, k_empty = rings[1]
    v_ring, v_full, v_empty = rings[2]
    wait_for_dependencies()
    tiles_before = gl.to_tensor(0)
    keys_before = gl.to_tensor(0)
    for u in range(gl.program_id(0), work[0], gl.num_programs(0)):
        batch, head, first, end = _unit(u, work, CAUSAL)
        shared_head = head // work[7]
        steps = _steps(end - 1, work, BN, CAUSAL)
        for tile in range(first, end):
            slot, phase = _place(tiles_before, SLOTS)
            for who in gl.static_range(CONSUMERS):
                at = slot * CONSUMERS + who
                mbarrier.wait(q_empty.index(at), phase ^ 1)
                mbarrier.expect(q_full.index(at), q.block_type.nbytes)
                row = (tile * CONSUMERS + who) * HALF
                load_tile(q, [batch, head, row, 0], q_full.index(at), q_ring.index(at))
            tiles_before += 1
            if tile == first:
                for i in range(steps):
                    stage, turn = _place(keys_before + i, STAGES)
                    row = (steps - 1 - i) * BN
                    mbarrier.wait(k_empty.index(stage), turn ^ 1)
                    mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
                    load_tile(
                        k, [batch, shared_head, row, 0], k_full.index(stage), k_ring.index(stage)
                    )
                    mbarrier.wait(v_empty.index(stage), turn ^ 1)
                    mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
                    load_tile(
                        v, [batch, shared_head, row, 0], v_full.index(stage), v_ring.index(stage)
                    )
        keys_before += steps


@gluon.jit
def _added(mask):
    """Bytes of a mask as what is added to products, or numbers, to products that are scaled."""
    if mask.dtype == gl.uint8:
        added = gl.where(mask != 0, 0.0, NOTHING)
    else:
        number = mask.to(gl.float32)
        added = gl.where(number == NOTHING, NOTHING, gl.maximum(number, LOWEST) * LOG2_E)
    return added


@gluon.jit
def _mask_by_key(masking, place, key0, work, LOOK: gl.constexpr):
    """The mask of a tile of keys, a thread one of them; 0 where it is not one for all queries."""
    BN: gl.constexpr = LOOK[0]
    BY_KEY: gl.constexpr = LOOK[4]
    mask, m_batch, m_head, _, m_column = masking
    added = gl.to_tensor(0.0)
    if BY_KEY:
        mask += place[0].to(gl.int64) * m_batch + place[1].to(gl.int64) * m_head
        mask += key0.to(gl.int64) * m_column
        keys = gl.arange(0, BN, gl.BlockedLayout([1], [32], [4], [0]))
        added = _added(gl.load(mask + keys * m_column, mask=keys < work[5] - key0, other=0))
    return added


@gluon.jit
def _mask(masking, shared_mask, place, key0, work, LS: gl.constexpr, LOOK: gl.constexpr):
    """What is added to products; one row, from shared memory, where it is one for all queries."""
    BN: gl.constexpr = LOOK[0]
    BY_KEY: gl.constexpr = LOOK[4]
    mask, m_batch, m_head, m_row, m_column = masking
    added = gl.to_tensor(0.0)
    if BY_KEY:
        added = shared_mask.load(gl.SliceLayout(0, LS)).expand_dims(0)
    elif mask is not None:
        batch, head, row0, L = place
        mask += batch.to(gl.int64) * m_batch + head.to(gl.int64) * m_head
        mask += row0.to(gl.int64) * m_row + key0.to(gl.int64) * m_column
        keys = gl.arange(0, BN, gl.SliceLayout(0, LS)).expand_dims(0)
        rows = gl.arange(0, HALF, gl.SliceLayout(1, LS)).expand_dims(1)
        inside = (keys < work[5] - key0) & (rows < L - row0)
        at = mask + rows * m_row + keys * m_column
        added = _added(gl.load(at, mask=inside, other=0))
    return added


@gluon.jit
def _masked(s, added, mask, scale):
    """Behind numbers they are scaled: one multiply-add an element then does for both."""
    if mask is not None:
        s = s + added if mask.dtype.element_ty == gl.uint8 else s * scale + added
    return s


@gluon.jit
def _seen(s, key0, row0, S, CAUSAL: gl.constexpr):
    """Products with keys that their query may see; the others are hidden."""
    LS: gl.constexpr = s.type.layout
    keys = (key0 + gl.arange(0, s.shape[1], gl.SliceLayout(0, LS))).expand_dims(0)
    seen = keys < S
    if CAUSAL:
        rows = (row0 + gl.arange(0, HALF, gl.SliceLayout(1, LS))).expand_dims(1)
        seen = seen & (keys <= rows)
    return gl.where(seen, s, NOTHING)


@gluon.jit
def _folded(s, LARGEST: gl.constexpr):
    """Columns by twos until they are eight: sums, or the largest, of what a thread has itself.

    Neighbours first: they are added while the exponentials after them are taken.
    """
    for _ in gl.static_range(_halvings(s.shape[1])):
        a, b = s.reshape([HALF, s.shape[1] // 16, 2, 8]).permute((0, 1, 3, 2)).split()
        s = (gl.maximum(a, b) if LARGEST else a + b).reshape([HALF, s.shape[1] // 2])
    return s


@gluon.constexpr_function
def _halvings(columns):
    return (columns // 8).bit_length() - 1


@gluon.jit
def _weigh(s, top, scale, mask, CAUSAL: gl.constexpr):
    """Products ``s`` of a tile → their weights, the largest product so far, the old sums' factor.

    ``scale`` includes log₂ e. Where there may be no key so far, its weight is 0, not NaN.
    """
    new_top = gl.max(_folded(s, True), 1)
    new_top = gl.maximum(top, gl.convert_layout(new_top, top.type.layout))
    if mask is None:
        weights, fade = _powers(s, top, new_top, scale, CAUSAL)
    elif mask.dtype.element_ty == gl.uint8:
        weights, fade = _powers(s, top, new_top, scale, True)
    else:  # scaled before: of numbers like LOWEST a fused s · scale - base leaves a huge rest
        least = gl.where(new_top == NOTHING, 0.0, new_top)
        weights = gl.exp2(s - least.expand_dims(1))
        fade = gl.exp2(top - least)
    return weights, new_top, fade


@gluon.jit
def _powers(s, top, new_top, scale, GUARDED: gl.constexpr):
    base = new_top * scale
    if GUARDED:
        base = gl.where(new_top == NOTHING, 0.0, base)
    return gl.exp2(s * scale - base.expand_dims(1)), gl.exp2(top * scale - base)


@gluon.jit
def _by_row(x, like):
    """A number of each row as a column beside ``like``; threads that have the row have it."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout)).expand_dims(1)


@gluon.jit
def _share(sums, masking, gamma):
    """What products with values are multiplied with, when the sums of their weights are known."""
    total = gl.sum(sums, 1)
    if masking[0] is not None:  # a row that sees no key is 0, as torch's
        total = gl.where(total == 0.0, 1.0, total)
    share = 1.0 / total
    if gamma is not None:
        share = share * gamma
    return share


@gluon.jit
def _store(out, buffer, acc, share, batch, head, row0):
    """A tile's result out, by way of a buffer that is free."""
    buffer.reshape(acc.shape).store(quantize(acc * _by_row(share, acc), out.dtype))
    fence_async_shared()
    barrier()
    store_tile(out, [batch, head, row0, 0], buffer)


@gluon.jit
def _consume(
    out, buffers, rings, work, masking, mask_buffers, turns, scale, gamma, L,
    WHO: gl.constexpr, LOOK: gl.constexpr,
):  # fmt: skip
    """Every second half of a tile of queries: products, softmax, products, and the result out.

    Names with "before" are the step's before this one, "spent" are values that one has read, "made"
    is the tile of queries that ends in the first step of the next.
    """
    BN: gl.constexpr = LOOK[0]
    STAGES: gl.constexpr = LOOK[1]
    CAUSAL: gl.constexpr = LOOK[2]
    RAGGED: gl.constexpr = LOOK[3]
    BY_KEY: gl.constexpr = LOOK[4]
    PING_PONG: gl.constexpr = LOOK[5]
    q_ring, q_full, q_empty = rings[0]
    k_ring, k_full, k_empty = rings[1]
    v_ring, v_full, v_empty = rings[2]
    BE: gl.constexpr = q_ring.shape[4]
    BV: gl.constexpr = v_ring.shape[4]
    LS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    LO: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BV, 16]
    )
    HELD: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    S = work[5]
    shared_mask = mask_buffers.index(WHO)
    buffer = buffers.index(WHO)
    wait_for_dependencies()
    tiles_before = gl.to_tensor(0)
    keys_before = gl.to_tensor(0)
    my_turn = gl.to_tensor(1 - WHO)
    # before the first step there is none; it multiplies its own values with nothing instead
    _, _, tile, end = _unit(gl.program_id(0), work, CAUSAL)
    position = _steps(end - 1, work, BN, CAUSAL) - _steps(tile, work, BN, CAUSAL)
    before, turn_before = _place(position, STAGES)
    spent = gl.to_tensor(
        0
    )  # not ``before``: Triton 3.6 would not carry it through the loop over units
    # whether this was in the last tile of queries that reads it; whether products are added
    last_before, last_spent, adds = tile < 0, tile < 0, tile < 0
    made_batch, made_head, made_row0 = tile, tile, tile
    none = gl.zeros((HALF, BN), dtype=gl.float32, layout=LS)
    held = gl.convert_layout(none.to(q_ring.dtype), HELD)
    acc = gl.zeros((HALF, BV), dtype=gl.float32, layout=LO)
    sums = _folded(none, False)
    share = gl.sum(sums, 1)
    for u in range(gl.program_id(0), work[0], gl.num_programs(0)):
        batch, head, first, end = _unit(u, work, CAUSAL)
        loaded = _steps(end - 1, work, BN, CAUSAL)
        for tile in range(first, end):
            last = tile == end - 1
            steps = _steps(tile, work, BN, CAUSAL)
            row0 = (tile * CONSUMERS + WHO) * HALF
            place = (batch, head, row0, L)
            seen = gl.minimum(row0 + 1, S) if CAUSAL else S  # keys that all of the queries see
            slot, phase = _place(tiles_before, SLOTS)
            at = slot * CONSUMERS + WHO
            queries = q_ring.index(at).reshape([HALF, BE])
            stage, turn = _place(keys_before + loaded - steps, STAGES)
            top = gl.full((HALF,), NOTHING, gl.float32, gl.SliceLayout(1, LS))
            mbarrier.wait(q_full.index(at), phase)
            for i in range(steps):
                key0 = (steps - 1 - i) * BN
                keys = k_ring.index(stage).reshape([BN, BE]).permute((1, 0))
                values = v_ring.index(before).reshape([BN, BV])
                added = _mask_by_key(masking, place, key0, work, LOOK)
                mbarrier.wait(v_full.index(before), turn_before)
                mbarrier.wait(k_full.index(stage), turn)
                if PING_PONG:
                    mbarrier.wait(turns.index(WHO), my_turn)
                s = gl.zeros((HALF, BN), dtype=gl.float32, layout=LS)
                s = warpgroup_mma(queries, keys, s, use_acc=False, is_async=True)
                acc = warpgroup_mma(held, values, acc, use_acc=adds, is_async=True)

                # while these are made
                store_wait(0)
                if BY_KEY:
                    shared_mask.store(added)
                barrier()  # all are done with the step before, and with the buffer
                if PING_PONG:
                    mbarrier.arrive(turns.index(1 - WHO), count=1)
                mbarrier.arrive(k_empty.index(before), count=1, pred=last_before & (i > 0))
                mbarrier.arrive(v_empty.index(spent), count=1, pred=last_spent)
                barrier()  # Triton sets one before what follows an arrival: let it be here
                if i == 0:
                    share = _share(sums, masking, gamma)
                    sums = _folded(none, False)
                added = _mask(masking, shared_mask, place, key0, work, LS, LOOK)

                s = warpgroup_mma_wait(1, deps=(s,))
                s = _masked(s, added, masking[0], scale)
                if (CAUSAL or RAGGED) and key0 + BN > seen:
                    s = _seen(s, key0, row0, S, CAUSAL)
                weights, top, fade = _weigh(s, top, scale, masking[0], CAUSAL)
                sums = sums * _by_row(fade, sums) + _folded(weights, False)
                # long over; but a loop, over which ptxas does not move the exponentials: the wait
                # for the products would come before them, and nothing would overlap
                mbarrier.wait(q_full.index(at), phase)
                acc, held, weights = warpgroup_mma_wait(0, deps=(acc, held, weights))
                # only now, into the registers of those before; else all of them were copied
                held = gl.convert_layout(weights.to(q_ring.dtype), HELD)
                if i == 0 and tiles_before > 0:
                    _store(out, buffer, acc, share, made_batch, made_head, made_row0)
                acc = acc * _by_row(fade, acc)
                adds = i > 0  # a tile's first step ended another tile: the next one starts anew
                my_turn ^= 1
                spent, last_spent = before, last_before
                before, turn_before, last_before = stage, turn, last
                stage, turn = _next(stage, turn, STAGES)
            barrier()
            mbarrier.arrive(q_empty.index(at), count=1)
            # not in the next step, which may be waiting for keys in this very place
            mbarrier.arrive(k_empty.index(before), count=1, pred=last)
            made_batch, made_head, made_row0 = batch, head, row0
            tiles_before += 1
        keys_before += loaded
    mbarrier.wait(v_full.index(before), turn_before)
    values = v_ring.index(before).reshape([BN, BV])
    acc = warpgroup_mma(held, values, acc, use_acc=adds, is_async=True)
    store_wait(0)
    barrier()
    share = _share(sums, masking, gamma)
    acc, held = warpgroup_mma_wait(0, deps=(acc, held))
    _store(out, buffer, acc, share, made_batch, made_head, made_row0)
    store_wait(0)


@gluon.jit(
    do_not_specialize=["L", "S", "units", "runs", "run", "tiles", "k_tiles", "heads", "group"]
)
def attend(
    q, k, v, out, mask, m_batch, m_head, m_row, m_column, L, S, scale, gamma,
    units, runs, run, tiles, k_tiles, heads, group,
    BN: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
    BY_KEY: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """out = gamma · softmax(scale · q · kᵀ + mask) · v; descriptors of [N, heads, rows, columns].

    Tiles are [1, 1, HALF, width] of q and out, [1, 1, BN, width] of k and v. ``mask`` is a pointer,
    of bytes or numbers, or None; BY_KEY: there is one, the same for all queries. ``scale`` is
    positive and includes log₂ e; ``gamma`` is None for 1. ``out`` may be codes, which saturate.
    RAGGED: the last tile of keys is not full.
    """
    LOOK: gl.constexpr = (BN, STAGES, CAUSAL, RAGGED, BY_KEY, PING_PONG)
    Q_SHAPE: gl.constexpr = _several(SLOTS * CONSUMERS, q.block_type.shape)
    K_SHAPE: gl.constexpr = _several(STAGES, k.block_type.shape)
    V_SHAPE: gl.constexpr = _several(STAGES, v.block_type.shape)
    OUT_SHAPE: gl.constexpr = _several(CONSUMERS, out.block_type.shape)
    q_ring = gl.allocate_shared_memory(q.dtype, Q_SHAPE, q.layout)
    k_ring = gl.allocate_shared_memory(k.dtype, K_SHAPE, k.layout)
    v_ring = gl.allocate_shared_memory(v.dtype, V_SHAPE, v.layout)
    buffers = gl.allocate_shared_memory(out.dtype, OUT_SHAPE, out.layout)
    LM: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    mask_buffers = gl.allocate_shared_memory(gl.float32, [CONSUMERS, BN], LM)
    LB: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], LB)
    q_empty = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], LB)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LB)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LB)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LB)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LB)
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], LB)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(SLOTS * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    barrier()
    rings = (
        (q_ring, q_full, q_empty),
        (k_ring, k_full, k_empty),
        (v_ring, v_full, v_empty),
    )
    work = (units, runs, run, tiles, k_tiles, S, heads, group)
    masking = (mask, m_batch, m_head, m_row, m_column)
    gl.warp_specialize(
        [
            (
                _consume,
                (out, buffers, rings, work, masking, mask_buffers, turns, scale, gamma, L, 0, LOOK),
            ),
            (
                _consume,
                (out, buffers, rings, work, masking, mask_buffers, turns, scale, gamma, L, 1, LOOK),
            ),
            (_produce, (q, k, v, rings, work, LOOK)),
        ],
        [4, 1],
        [240, 24],  # the first consumer gets the rest, 240
    )
