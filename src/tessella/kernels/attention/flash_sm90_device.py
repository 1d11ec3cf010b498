"""Device code of attention on Hopper: a producer, and two consumers of 64 queries each.

The producer, one warp, has TMA bring queries, and tiles of keys and values into a ring in shared
memory. Each consumer, a warpgroup, multiplies its queries with a tile of keys (WGMMA) and, while
the tensor cores go on with the weights of the tile before and its values, takes the softmax of the
products: FlashAttention-3 (Shah et al. 2024), its pipeline inside a warpgroup. In ping-pong the
consumers ask for products in turns, so that one multiplies while the other is in its exponentials;
else each goes at its own pace. Weights never leave the registers. Blocks are persistent: the
producer is a unit of work ahead.

Words: BM, queries of a tile, both consumers'; BN, keys of a tile; a unit, tiles of queries of one
head that follow each other and read its keys from shared memory once. Keys pass from the last to
the first, so that the first tile is the one that is cut off. Arguments travel in groups: ``rings``
(queries, keys, values, each with its barriers "full" and "empty"), ``work`` (units, units of a
head, tiles of a unit, tiles of queries, tiles of keys, keys, heads, heads that share keys),
``masking`` (mask, its four strides), ``own`` (a consumer's mask in shared memory, the
barriers of the turns, its turns so far).
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
    store_tile,
    store_wait,
    wait_for_dependencies,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tessella.kernels.epilogue.gluon_device import quantize
from tessella.kernels.shared.ring_device import barriers, several

HALF = gl.constexpr(64)  # queries of one consumer
CONSUMERS = gl.constexpr(2)
SLOTS = gl.constexpr(2)  # for tiles of queries
LOWEST = gl.constexpr(-1e30)  # finite numbers of a mask stay finite, as large as they may be
NOTHING = gl.constexpr(float("-inf"))
LOG2_E = gl.constexpr(1.4426950408889634)


class Form(NamedTuple):
    """How the work is done; constants of the compiler.

    Attributes:
        BN: keys of a tile.
        STAGES: tiles of keys, and of values, in shared memory.
        RAGGED: the last tile of keys is not full.
        BY_KEY: there is a mask, the same for all queries.
        PING_PONG: the consumers ask for products in turns.
    """

    BN: int
    STAGES: int
    CAUSAL: bool
    RAGGED: bool
    BY_KEY: bool
    PING_PONG: bool


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
def _produce(q, k, v, rings, work, FORM: gl.constexpr):
    """Loads queries, keys and values, unit after unit, as fast as their places become empty."""
    BN: gl.constexpr = FORM.BN
    STAGES: gl.constexpr = FORM.STAGES
    CAUSAL: gl.constexpr = FORM.CAUSAL
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
def _mask_by_key(masking, place, key0, work, FORM: gl.constexpr):
    """The mask of a tile of keys, a thread one of them, and whether it changes anything.

    0 and False where it is not one for all queries.
    """
    BN: gl.constexpr = FORM.BN
    BY_KEY: gl.constexpr = FORM.BY_KEY
    mask, m_batch, m_head, _, m_column = masking
    added = gl.to_tensor(0.0)
    hides = gl.to_tensor(False)
    if BY_KEY:
        mask += place[0].to(gl.int64) * m_batch + place[1].to(gl.int64) * m_head
        mask += key0.to(gl.int64) * m_column
        keys = gl.arange(0, BN, gl.BlockedLayout([1], [32], [4], [0]))
        inside = keys < work[5] - key0
        added = gl.where(inside, _added(gl.load(mask + keys * m_column, mask=inside, other=0)), 0.0)
        hides = gl.max((added != 0.0).to(gl.int32), 0) != 0
    return added, hides


@gluon.jit
def _masked(s, added, hides, masking, shared_mask, place, key0, work, scale, FORM: gl.constexpr):
    """Products with the mask, and the factor that they still want.

    A mask that is one for all queries lies in shared memory, and is left out where it is 0 for all
    of a tile's keys, as it is but for the ends of padded sequences. Behind a mask products are
    scaled: one multiply-add an element then does for both.
    """
    BY_KEY: gl.constexpr = FORM.BY_KEY
    LS: gl.constexpr = s.type.layout
    mask, m_batch, m_head, m_row, m_column = masking
    factor = scale
    if BY_KEY:
        if hides:
            shared_mask.store(added)
            barrier()
            s = s * scale + shared_mask.load(gl.SliceLayout(0, LS)).expand_dims(0)
            factor = gl.to_tensor(1.0)
            barrier()  # before the next one is stored
    elif mask is not None:
        BN: gl.constexpr = FORM.BN
        batch, head, row0, L = place
        mask += batch.to(gl.int64) * m_batch + head.to(gl.int64) * m_head
        mask += row0.to(gl.int64) * m_row + key0.to(gl.int64) * m_column
        keys = gl.arange(0, BN, gl.SliceLayout(0, LS)).expand_dims(0)
        rows = gl.arange(0, HALF, gl.SliceLayout(1, LS)).expand_dims(1)
        inside = (keys < work[5] - key0) & (rows < L - row0)
        at = mask + rows * m_row + keys * m_column
        s = s * scale + _added(gl.load(at, mask=inside, other=0))
        factor = gl.to_tensor(1.0)
    return s, factor


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
def _weigh(s, top, factor, GUARDED: gl.constexpr):
    """Products ``s`` of a tile → their weights, the largest so far, the old sums' factor.

    The largest is that of ``s · factor``, which includes log₂ e. GUARDED: there may be no key so
    far, whose weight is 0, not NaN. Where a mask holds numbers like LOWEST the factor is 1: with
    another one a fused s · factor - least would leave a huge rest.
    """
    new_top = gl.maximum(top, gl.max(s, 1) * factor)
    least = new_top
    if GUARDED:
        least = gl.where(new_top == NOTHING, 0.0, new_top)
    return gl.exp2(s * factor - least.expand_dims(1)), new_top, gl.exp2(top - least)


@gluon.jit
def _step(
    queries, rings, acc, held, top, total, place, key0, position, work, masking, own, scale, last,
    WHO: gl.constexpr, FORM: gl.constexpr, LS: gl.constexpr,
):  # fmt: skip
    """The tile of keys at a position of the ring, and the values of the tile before it."""
    BN: gl.constexpr = FORM.BN
    STAGES: gl.constexpr = FORM.STAGES
    CAUSAL: gl.constexpr = FORM.CAUSAL
    k_ring, k_full, k_empty = rings[1]
    v_ring, v_full, v_empty = rings[2]
    PING_PONG: gl.constexpr = FORM.PING_PONG
    LO: gl.constexpr = acc.type.layout
    shared_mask, turns, so_far = own
    stage, turn = _place(position, STAGES)
    before, _ = _place(position - 1, STAGES)
    keys = k_ring.index(stage).reshape([BN, queries.shape[1]]).permute((1, 0))
    values = v_ring.index(before).reshape([BN, acc.shape[1]])
    mbarrier.wait(k_full.index(stage), turn)
    if PING_PONG:
        mbarrier.wait(turns.index(WHO), (so_far & 1) ^ (1 - WHO))
    s = gl.zeros((HALF, BN), dtype=gl.float32, layout=LS)
    s = warpgroup_mma(queries, keys, s, use_acc=False, is_async=True)
    acc = warpgroup_mma(held, values, acc, is_async=True)
    if PING_PONG:
        barrier()
        mbarrier.arrive(turns.index(1 - WHO), count=1)
    added, hides = _mask_by_key(masking, place, key0, work, FORM)
    s = warpgroup_mma_wait(1, deps=(s,))
    barrier()
    mbarrier.arrive(k_empty.index(stage), count=1, pred=last)
    s, factor = _masked(s, added, hides, masking, shared_mask, place, key0, work, scale, FORM)
    if CAUSAL and key0 + BN - 1 > place[2]:
        s = _seen(s, key0, place[2], work[5], CAUSAL)
    weights, top, fade = _weigh(s, top, factor, CAUSAL or masking[0] is not None)
    total = total * fade + gl.sum(weights, 1)
    fresh = gl.convert_layout(weights.to(held.dtype), held.type.layout)
    # the next step's values; a loop, over which ptxas does not move the exponentials: the wait for
    # the products would come before them, and nothing would overlap
    mbarrier.wait(v_full.index(stage), turn)
    acc, held, fresh = warpgroup_mma_wait(0, deps=(acc, held, fresh))
    barrier()
    mbarrier.arrive(v_empty.index(before), count=1, pred=last)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, LO)).expand_dims(1)
    return acc, fresh, top, total


@gluon.jit
def _consume(
    out, buffers, rings, work, masking, mask_buffers, turns, scale, gamma, L,
    WHO: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Every second half of a tile of queries: products, softmax, products, and the result out."""
    BN: gl.constexpr = FORM.BN
    STAGES: gl.constexpr = FORM.STAGES
    CAUSAL: gl.constexpr = FORM.CAUSAL
    RAGGED: gl.constexpr = FORM.RAGGED
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
    wait_for_dependencies()
    tiles_before = gl.to_tensor(0)
    keys_before = gl.to_tensor(0)
    so_far = gl.to_tensor(0)
    for u in range(gl.program_id(0), work[0], gl.num_programs(0)):
        batch, head, first, end = _unit(u, work, CAUSAL)
        loaded = _steps(end - 1, work, BN, CAUSAL)
        for tile in range(first, end):
            last = tile == end - 1
            steps = _steps(tile, work, BN, CAUSAL)
            row0 = (tile * CONSUMERS + WHO) * HALF
            place = (batch, head, row0, L)
            begin = keys_before + loaded - 1  # position of the first tile of keys
            slot, phase = _place(tiles_before, SLOTS)
            at = slot * CONSUMERS + WHO
            queries = q_ring.index(at).reshape([HALF, BE])

            key0 = (steps - 1) * BN
            stage, turn = _place(begin - (steps - 1), STAGES)
            mbarrier.wait(q_full.index(at), phase)
            mbarrier.wait(k_full.index(stage), turn)
            keys = k_ring.index(stage).reshape([BN, BE]).permute((1, 0))
            s = gl.zeros((HALF, BN), dtype=gl.float32, layout=LS)
            s = warpgroup_mma(queries, keys, s, use_acc=False, is_async=True)
            added, hides = _mask_by_key(masking, place, key0, work, FORM)
            s = warpgroup_mma_wait(0, deps=(s,))
            barrier()
            mbarrier.arrive(k_empty.index(stage), count=1, pred=last)
            top = gl.full((HALF,), NOTHING, gl.float32, gl.SliceLayout(1, LS))
            s, factor = _masked(
                s, added, hides, masking, shared_mask, place, key0, work, scale, FORM
            )
            if CAUSAL or RAGGED:
                s = _seen(s, key0, row0, S, CAUSAL)
            weights, top, _ = _weigh(s, top, factor, CAUSAL or masking[0] is not None)
            total = gl.sum(weights, 1)
            held = gl.convert_layout(weights.to(q_ring.dtype), HELD)
            acc = gl.zeros((HALF, BV), dtype=gl.float32, layout=LO)
            mbarrier.wait(v_full.index(stage), turn)

            for i in range(1, steps):
                j = steps - 1 - i
                acc, held, top, total = _step(
                    queries, rings, acc, held, top, total, place, j * BN, begin - j,
                    work, masking, (shared_mask, turns, so_far), scale, last, WHO, FORM, LS,
                )  # fmt: skip
                so_far += 1

            barrier()  # all products with these queries are done
            mbarrier.arrive(q_empty.index(at), count=1)
            stage, _ = _place(begin, STAGES)
            values = v_ring.index(stage).reshape([BN, BV])
            acc = warpgroup_mma(held, values, acc, is_async=True)
            acc, held = warpgroup_mma_wait(0, deps=(acc, held))
            barrier()
            mbarrier.arrive(v_empty.index(stage), count=1, pred=last)
            if masking[0] is not None:  # a row that sees no key is 0, as torch's
                total = gl.where(total == 0.0, 1.0, total)
            share = 1.0 / total
            if gamma is not None:
                share = share * gamma
            share = gl.convert_layout(share, gl.SliceLayout(1, LO)).expand_dims(1)
            store_wait(0)
            barrier()
            buffers.index(WHO).reshape([HALF, BV]).store(quantize(acc * share, out.dtype))
            fence_async_shared()
            barrier()
            store_tile(out, [batch, head, row0, 0], buffers.index(WHO))
            tiles_before += 1
        keys_before += loaded
    store_wait(0)


@gluon.jit(
    do_not_specialize=["L", "S", "units", "runs", "run", "tiles", "k_tiles", "heads", "group"]
)
def attend(
    q, k, v, out, masking, L, S, scale, gamma,
    units, runs, run, tiles, k_tiles, heads, group, FORM: gl.constexpr,
):  # fmt: skip
    """out = gamma · softmax(scale · q · kᵀ + mask) · v; descriptors of [N, heads, rows, columns].

    Tiles are [1, 1, HALF, width] of q and out, [1, 1, BN, width] of k and v. ``masking`` is a mask,
    a pointer to bytes or numbers, or None, and its strides along batch, heads, rows and columns.
    ``scale`` is positive and includes log₂ e; ``gamma`` is None for 1. ``out`` may hold
    quantized values, which saturate.
    """
    BN: gl.constexpr = FORM.BN
    STAGES: gl.constexpr = FORM.STAGES
    Q_SHAPE: gl.constexpr = several(SLOTS * CONSUMERS, q.block_type.shape)
    K_SHAPE: gl.constexpr = several(STAGES, k.block_type.shape)
    V_SHAPE: gl.constexpr = several(STAGES, v.block_type.shape)
    OUT_SHAPE: gl.constexpr = several(CONSUMERS, out.block_type.shape)
    q_ring = gl.allocate_shared_memory(q.dtype, Q_SHAPE, q.layout)
    k_ring = gl.allocate_shared_memory(k.dtype, K_SHAPE, k.layout)
    v_ring = gl.allocate_shared_memory(v.dtype, V_SHAPE, v.layout)
    buffers = gl.allocate_shared_memory(out.dtype, OUT_SHAPE, out.layout)
    LM: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    mask_buffers = gl.allocate_shared_memory(gl.float32, [CONSUMERS, BN], LM)
    rings = (
        (q_ring, barriers(SLOTS * CONSUMERS, 1), barriers(SLOTS * CONSUMERS, 1)),
        (k_ring, barriers(STAGES, 1), barriers(STAGES, CONSUMERS)),
        (v_ring, barriers(STAGES, 1), barriers(STAGES, CONSUMERS)),
    )
    turns = rings[0][1]  # a name for nobody, as 3.6 puts no None into a tuple
    if FORM.PING_PONG:
        turns = barriers(CONSUMERS, 1)
    fence_async_shared()
    barrier()
    work = (units, runs, run, tiles, k_tiles, S, heads, group)
    gl.warp_specialize(
        [
            (
                _consume,
                (out, buffers, rings, work, masking, mask_buffers, turns, scale, gamma, L, 0, FORM),
            ),
            (
                _consume,
                (out, buffers, rings, work, masking, mask_buffers, turns, scale, gamma, L, 1, FORM),
            ),
            (_produce, (q, k, v, rings, work, FORM)),
        ],
        [4, 1],
        [240, 24],  # the first consumer gets the rest, 240
    )
