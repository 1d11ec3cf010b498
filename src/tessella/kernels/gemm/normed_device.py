"""Device code of a matrix product whose rows are normalized before they leave the chip.

A block has the roles of ``wgmma_device``, in ping-pong: one producer, two consumers with alternate
tiles. A tile has WN of a row's columns, so each consumer writes what its tile knows of its rows,
their mean and the sum of squares around it, and waits until the other tiles of these rows have done
so (``announce``, ``wait_for_all``: each launch adds SLOTS to the counter of these rows, a power of
two, so that nobody has to set it back). Its sums stay in registers meanwhile, and the other
consumer multiplies. Then it normalizes its own tile.

No block waits for one that cannot run: tiles of the same rows are neighbours in the order of work,
and the grid is a multiple of their number, so the same few blocks meet in every round; and blocks
have started in order wherever this ran, so whoever is missing starts next.

Means are merged as by Chan, Golub and LeVeque, 1979, always in the same order: the same result in
every run.

Words as in ``wgmma_device``. Arguments travel in groups: ``ring`` and ``work`` as there, ``out``
(descriptors of sums, of normalized rows and of these rows quantized, each or None; the buffers of
results, and those of quantized results),
``extra`` (residual's descriptor, its barriers, scale, bias, None, gamma), ``norm`` (weight, bias,
the scale of quantized values, epsilon), ``meeting`` (the sums that tiles exchange for their rows,
[2, rows of all tiles, SLOTS]; the counters of rows; tiles along M).
"""

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
from tessella.kernels.epilogue.gluon_device import channel_vector, finish, quantize
from tessella.kernels.gemm.wgmma_device import factors, load_residual, produce, unit_of
from tessella.kernels.shared.ring_device import barriers, next_stage, several, skip, stage_before

CONSUMERS = gl.constexpr(2)
PIECES = gl.constexpr(2)  # of a tile's columns: each is as wide as a buffer
THREADS = gl.constexpr(128)  # of a consumer


@gluon.constexpr_function
def _by_thread():
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def announce(counter, share):
    """A tile has come: what its consumer's threads have stored is seen by who waits for it."""
    barrier()
    thread = gl.arange(0, THREADS, _by_thread())
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        setp.eq.s32 first, $2, 0;
        @first red.release.gpu.global.add.u32 [$1], $3;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r",
        [counter + thread * 0, thread, thread * 0 + share],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_for_all(counter, complete):
    """Waits until a counter, which may wrap, is ``complete``: what all have stored can be read."""
    thread = gl.arange(0, THREADS, _by_thread())
    gl.inline_asm_elementwise(
        """{
        .reg .pred missing;
        .reg .u32 here;
        again:
        ld.acquire.gpu.global.u32 here, [$1];
        sub.u32 here, here, $2;
        setp.lt.s32 missing, here, 0;
        @missing bra again;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [counter + thread * 0, thread * 0 + complete],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _summed(
    x, extra, buffers, n0, r_phase, PIECE: gl.constexpr, FIRST: gl.constexpr,
    EPILOGUE: gl.constexpr,
):  # fmt: skip
    """What is normalized: a piece of a tile with scale, bias, residual and activation, float32."""
    ACTIVATION: gl.constexpr = EPILOGUE.ACTIVATION
    r, r_full, scale, bias, _, gamma = extra
    WM: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    L: gl.constexpr = x.type.layout
    V: gl.constexpr = gl.SliceLayout(0, L)
    s = channel_vector(scale, n0 + PIECE * WIDTH, None, WIDTH, V)
    b = channel_vector(bias, n0 + PIECE * WIDTH, None, WIDTH, V)
    old = None
    if r is not None:
        mbarrier.wait(r_full.index(FIRST + PIECE), r_phase)
        old = buffers.index(FIRST + PIECE).reshape([WM, WIDTH]).load(L)
    return finish(x, s, b, old, EPILOGUE.ALPHA, EPILOGUE.BETA, gamma, ACTIVATION, gl.float32)


@gluon.jit
def _store(left, right, target, buffers, batch, m0, n0, FIRST: gl.constexpr):
    """Both pieces out, when the buffers' last content has left."""
    WM: gl.constexpr = left.shape[0]
    WIDTH: gl.constexpr = left.shape[1]
    store_wait(0)
    barrier()
    buffers.index(FIRST).reshape([WM, WIDTH]).store(quantize(left, target.dtype))
    buffers.index(FIRST + 1).reshape([WM, WIDTH]).store(quantize(right, target.dtype))
    fence_async_shared()
    barrier()
    store_tile(target, [batch, m0, n0], buffers.index(FIRST))
    store_tile(target, [batch, m0, n0 + WIDTH], buffers.index(FIRST + 1))


@gluon.jit
def _tell(left, right, meeting, m, n, share, SLOTS: gl.constexpr):
    """Writes what a tile knows of its rows: their means, and the squares around them."""
    partials, counters, m_tiles = meeting
    WM: gl.constexpr = left.shape[0]
    WN: gl.constexpr = PIECES * left.shape[1]
    mean = (gl.sum(left, 1) + gl.sum(right, 1)) * (1.0 / WN)
    x = left - mean.expand_dims(1)
    y = right - mean.expand_dims(1)
    squares = gl.sum(x * x, 1) + gl.sum(y * y, 1)
    rows = m * WM + gl.arange(0, WM, gl.SliceLayout(1, left.type.layout))
    gl.store(partials + rows * SLOTS + n, mean)
    gl.store(partials + (m_tiles * WM + rows) * SLOTS + n, squares)
    announce(counters + m, share)


@gluon.jit
def _moments(
    meeting, m, count, complete, epsilon,
    WM: gl.constexpr, WN: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Of rows, over the columns of all tiles: 1 / deviation, and minus the mean times that."""
    partials, counters, m_tiles = meeting
    wait_for_all(counters + m, complete)
    # a thread has a row: what all tiles know of it lies side by side
    L: gl.constexpr = gl.BlockedLayout([1, SLOTS], [32, 1], [4, 1], [1, 0])
    rows = (m * WM + gl.arange(0, WM, gl.SliceLayout(1, L))).expand_dims(1)
    slots = gl.arange(0, SLOTS, gl.SliceLayout(0, L)).expand_dims(0)
    there = (slots < count) & (rows >= 0)
    means = gl.load(partials + rows * SLOTS + slots)
    squares = gl.load(partials + (m_tiles * WM + rows) * SLOTS + slots)
    mean = gl.sum(gl.where(there, means, 0.0), 1) / count
    apart = gl.where(there, means - mean.expand_dims(1), 0.0)
    within = gl.sum(gl.where(there, squares, 0.0), 1)
    variance = (within + WN * gl.sum(apart * apart, 1)) / (count * WN)
    inverse = gl.rsqrt(variance + epsilon)
    shift = gl.convert_layout(-mean * inverse, ROWS).expand_dims(1)
    return gl.convert_layout(inverse, ROWS).expand_dims(1), shift


@gluon.jit
def _normalized(x, inverse, shift, norm, n0, PIECE: gl.constexpr):
    WIDTH: gl.constexpr = x.shape[1]
    V: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    weight = channel_vector(norm[0], n0 + PIECE * WIDTH, None, WIDTH, V)
    bias = channel_vector(norm[1], n0 + PIECE * WIDTH, None, WIDTH, V)
    return (x * inverse + shift) * weight + bias


@gluon.jit
def _consume(
    ring, out, extra, norm, meeting, work,
    WHO: gl.constexpr, SLOTS: gl.constexpr, FORM: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Every other tile: multiplies, meets the other tiles of its rows, normalizes and stores."""
    WM: gl.constexpr = FORM.WM
    WN: gl.constexpr = FORM.WN
    STAGES: gl.constexpr = FORM.STAGES
    GROUP: gl.constexpr = FORM.GROUP
    FIRST: gl.constexpr = WHO * PIECES
    full = ring[2]
    empty = ring[3]
    turns = ring[4]
    sums, normed, quantized, buffers, quantized_buffers = out
    count = work[4]
    ACC: gl.constexpr = gl.int32 if ring[0].dtype.is_int() else gl.float32
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[4, 1],
        instr_shape=[16, WN, 256 // ring[0].dtype.primitive_bitwidth],
    )
    wait_for_dependencies(FORM.LET_START)
    inverse_step = 1.0
    if quantized is not None:
        inverse_step = 1.0 / gl.load(norm[2]).to(gl.float32)
    start = gl.program_id(0)
    step = gl.num_programs(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    if WHO == 1:
        stage, phase = skip(stage, phase, work[5], STAGES)
        start += step
    v = gl.to_tensor(0)  # this consumer's units so far
    for u in range(start, work[0], 2 * step):
        batch, m, n, _, k_tiles = unit_of(u, work, GROUP)
        m0 = m * WM
        n0 = n * WN
        if extra[0] is not None:
            store_wait(0)
            barrier()
            for piece in gl.static_range(PIECES):
                load_residual(extra, buffers, batch, m0, n0 + piece * (WN // 2), FIRST + piece)
        # some tiles of these rows may have come, but not all, as this one has not
        complete = (gl.load(meeting[1] + m) & -SLOTS) + SLOTS
        acc = gl.zeros((WM, WN), dtype=ACC, layout=L)
        mbarrier.wait(turns.index(WHO), (v & 1) ^ (1 - WHO))
        for k in range(k_tiles):
            mbarrier.wait(full.index(stage), phase)
            a, b = factors(ring, stage, stage, FORM)
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # the product before this one is done: its stage goes back
            barrier()
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1, pred=k > 0)
            stage, phase = next_stage(stage, phase, STAGES)
        barrier()
        mbarrier.arrive(turns.index(1 - WHO), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        barrier()
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
        stage, phase = skip(stage, phase, work[5], STAGES)  # over the other consumer's unit

        x, y = acc.reshape([WM, 2, WN // 2]).permute((0, 2, 1)).split()
        x = _summed(x, extra, buffers, n0, v & 1, 0, FIRST, EPILOGUE)
        y = _summed(y, extra, buffers, n0, v & 1, 1, FIRST, EPILOGUE)
        _tell(x, y, meeting, m, n, gl.where(n == 0, SLOTS - count + 1, 1), SLOTS)
        if sums is not None:
            _store(x, y, sums, buffers, batch, m0, n0, FIRST)
        ROWS: gl.constexpr = gl.SliceLayout(1, x.type.layout)
        inverse, shift = _moments(meeting, m, count, complete, norm[3], WM, WN, SLOTS, ROWS)
        x = _normalized(x, inverse, shift, norm, n0, 0)
        y = _normalized(y, inverse, shift, norm, n0, 1)
        if normed is not None:
            _store(x, y, normed, buffers, batch, m0, n0, FIRST)
        if quantized is not None:  # in the first of the buffers
            _store(
                x * inverse_step,
                y * inverse_step,
                quantized,
                quantized_buffers,
                batch,
                m0,
                n0,
                2 * FIRST,
            )
        v += 1
    store_wait(0)


@gluon.jit(do_not_specialize=["units", "m_tiles", "n_tiles", "k_tiles"])
def multiply_and_normalize(
    a, b, sums, normed, quantized, r, vectors, norm, partials, counters,
    units, m_tiles, n_tiles, k_tiles,
    FORM: gl.constexpr, SLOTS: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """s = epilogue(A · Bᵀ) → sums; (s - mean) / deviation · weight + bias → normed, and quantized.

    Descriptors of [1, rows, columns]; A's and B's tiles are [1, rows, BK], those of results and of
    the residual [1, WM, WN / 2]. Each of ``sums``, ``normed``, ``quantized`` and the residual ``r``
    may be None, but not all that have 16 bits. ``vectors`` are scale, bias and gamma; ``norm`` the
    norm's weight and bias, the number that is divided by before rounding, and epsilon.
    ``partials``: float32 [2, m_tiles · WM, SLOTS], of any content; ``counters``: int32 [m_tiles],
    zeros before the first launch. SLOTS: a power of two, n_tiles at least. The grid is a multiple
    of n_tiles, and no larger than the GPU.
    """
    scale, bias, gamma = vectors
    STAGES: gl.constexpr = FORM.STAGES
    half = r
    if sums is not None:
        half = sums
    if normed is not None:
        half = normed
    A_SHAPE: gl.constexpr = several(STAGES, a.block_type.shape)
    B_SHAPE: gl.constexpr = several(STAGES, b.block_type.shape)
    C_SHAPE: gl.constexpr = several(CONSUMERS * PIECES, half.block_type.shape)
    a_ring = gl.allocate_shared_memory(a.dtype, A_SHAPE, a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, B_SHAPE, b.layout)
    buffers = gl.allocate_shared_memory(half.dtype, C_SHAPE, half.layout)
    quantized_buffers = buffers
    if quantized is not None:
        QUANTIZED_SHAPE: gl.constexpr = several(2 * CONSUMERS * PIECES, quantized.block_type.shape)
        quantized_buffers = reinterpret(buffers, quantized.dtype, QUANTIZED_SHAPE, quantized.layout)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 1)
    r_full = full  # where nobody asks: 3.6 puts no None into a tuple
    if r is not None:
        r_full = barriers(CONSUMERS * PIECES, 1)
    turns = barriers(CONSUMERS, 1)
    fence_async_shared()
    barrier()
    ring = (a_ring, b_ring, full, empty, turns)
    out = (sums, normed, quantized, buffers, quantized_buffers)
    extra = (r, r_full, scale, bias, None, gamma)  # no tile reaches beyond a row
    meeting = (partials, counters, m_tiles)
    work = (units, units, 1, m_tiles, n_tiles, k_tiles, k_tiles)
    gl.warp_specialize(
        [
            (_consume, (ring, out, extra, norm, meeting, work, 0, SLOTS, FORM, EPILOGUE)),
            (_consume, (ring, out, extra, norm, meeting, work, 1, SLOTS, FORM, EPILOGUE)),
            (produce, (a, b, ring, work, 0, 1, FORM)),
        ],
        [4, 1],
        [240, 24],  # the first consumer gets the rest, 240
    )
