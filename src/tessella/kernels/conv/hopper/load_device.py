"""Device code: the warps of the Hopper convolution that load, each through TMA.

``load`` fills the ring of stages with pixels and weights, ``load_residual`` brings residuals into
the buffers that the outputs leave from. Letters as in ``implicit_gemm_device``.
"""

# ruff: noqa: SIM113 (device code has no enumerate)
from __future__ import annotations

from tessella.device.hopper import (
    gl,
    gluon,
    load_tile,
    mbarrier,
    reinterpret,
    wait_for_dependencies,
)
from tessella.kernels.conv.hopper.walk_device import (
    channel,
    first_channel,
    first_tile,
    next_step,
    next_tile,
    terms,
)


@gluon.jit
def _load_x(x, n0, h, w, c, full, stage, TILE: gl.constexpr):
    """One tap's pixels. A stride of two reads the view of x that has this row's parity."""
    SH: gl.constexpr = TILE.SH
    SW: gl.constexpr = TILE.SW
    if SH == 1 and SW == 1:
        load_tile(x[0], [h, n0, w, c], full, stage)
    else:
        view = (h & (SH - 1)) * 2 + (w & (SW - 1))
        h = h >> (SH - 1)
        w = w >> (SW - 1)
        if view == 0:
            load_tile(x[0], [h, n0, w, c], full, stage)
        elif view == 1:
            load_tile(x[1], [h, n0, w, c], full, stage)
        elif view == 2:
            load_tile(x[2], [h, n0, w, c], full, stage)
        else:
            load_tile(x[3], [h, n0, w, c], full, stage)


@gluon.jit
def _load_w(w, k0, tap, c, full, stage, TILE: gl.constexpr):
    """One tap's weights; INTERLEAVE: with output channels in the order that the epilogue wants."""
    if TILE.INTERLEAVE > 1:
        load_tile(w, [k0 // (8 * TILE.INTERLEAVE), 0, 0, tap, c], full, stage)
    else:
        load_tile(w, [k0, tap, c], full, stage)


@gluon.jit
def _load_weights(x, w, w_ring, ready, i, k0, r, s, c, S, TILE: gl.constexpr):
    """A stage's weights, and word of all bytes that it will get."""
    TAPS: gl.constexpr = TILE.TAPS
    if TAPS == 1:
        mbarrier.expect(ready, x[0].block_type.nbytes + w.block_type.nbytes)
        _load_w(w, k0, r * S + s, c, ready, w_ring.index(i), TILE)
    else:  # x[1] describes the rows below the tile that its last taps reach
        BYTES: gl.constexpr = (
            x[0].block_type.nbytes + x[1].block_type.nbytes + TAPS * w.block_type.nbytes
        )
        mbarrier.expect(ready, BYTES)
        for t in gl.static_range(TAPS):
            _load_w(w, k0, (r * TAPS + t) * S + s, c, ready, w_ring.index(i * TAPS + t), TILE)


@gluon.jit
def _load_held(w, w_ring, ready, k0, chunks, TILE: gl.constexpr, RING: gl.constexpr):
    """All weights of a tile's output channels: taps, and the chunks of each."""
    for i in range(RING.HELD):
        mbarrier.expect(ready, w.block_type.nbytes)
        _load_w(w, k0, i // chunks, i % chunks * TILE.BK, ready, w_ring.index(i), TILE)


@gluon.jit
def _expect_pixels(x, ready, TAPS: gl.constexpr):
    """Word of a stage's bytes where the weights are held."""
    if TAPS == 1:
        mbarrier.expect(ready, x[0].block_type.nbytes)
    else:
        mbarrier.expect(ready, x[0].block_type.nbytes + x[1].block_type.nbytes)


@gluon.jit
def load(
    x,
    w,
    memory,
    full,
    empty,
    geometry,
    grid,
    items,
    group,
    TILE: gl.constexpr,
    RING: gl.constexpr,
    CONSTANT: gl.constexpr,
):
    x_ring, w_ring = memory
    UNIT: gl.constexpr = 16 * TILE.BCO * TILE.BK // w.block_type.nbytes
    C, chunks, _, _, R, S, pad_h, pad_w, dil_h, dil_w = geometry
    k, q, p, n = first_tile(grid)
    early = 0  # stages whose weights are on their way while the kernel before this one runs
    if RING.HELD > 0:  # all tiles of this block have the same channels
        if not CONSTANT:
            wait_for_dependencies()
        k0 = channel(k, grid, TILE.BCO)
        _load_held(w, w_ring, full.index(RING.STAGES), k0, chunks, TILE, RING)
    elif CONSTANT:
        steps, r, s, c, s_low, s_high = terms(p, q, grid, geometry, TILE)
        early = gl.minimum(steps, RING.STAGES)
        for i in range(early):
            k0 = channel(k, grid, TILE.BCO)
            _load_weights(x, w, w_ring, full.index(i), i, k0, r, s, c, S, TILE)
            r, s, c = next_step(r, s, c, s_low, s_high, C, TILE.BK)
    wait_for_dependencies()
    g = 0
    for _ in range(gl.program_id(0), items, gl.num_programs(0)):
        steps, r, s, c, s_low, s_high = terms(p, q, grid, geometry, TILE)
        k0 = channel(k, grid, TILE.BCO)
        c0 = first_channel(k0, group[0], group[1], UNIT)
        for _ in range(steps):
            i = g % RING.STAGES
            ready = full.index(i)
            mbarrier.wait(empty.index(i), ((g // RING.STAGES) & 1) ^ 1)
            n_at = n * TILE.BN
            row = r
            if TILE.DEPTH > 1:
                rows = R // TILE.DEPTH
                n_at += r // rows - TILE.DEPTH // 2
                row = r % rows
            h_at = p * (TILE.BH * TILE.SH) + row * dil_h - pad_h
            w_at = q * (TILE.BW * TILE.SW) + s * dil_w - pad_w
            if RING.HELD > 0:
                _expect_pixels(x, ready, TILE.TAPS)
            elif g >= early:
                _load_weights(x, w, w_ring, ready, i, k0, r, s, c, S, TILE)
            if TILE.TAPS == 1:
                _load_x(x, n_at, h_at, w_at, c0 + c, ready, x_ring.index(i), TILE)
            else:
                top = x_ring.index(i * (TILE.BH + TILE.TAPS - 1))
                top = reinterpret(top, x[0].dtype, x[0].block_type.shape, x[0].layout)
                load_tile(x[0], [h_at, n_at, w_at, c0 + c], ready, top)
                end = x_ring.index(i * (TILE.BH + TILE.TAPS - 1) + TILE.BH)
                end = reinterpret(end, x[1].dtype, x[1].block_type.shape, x[1].layout)
                load_tile(x[1], [h_at + TILE.BH, n_at, w_at, c0 + c], ready, end)
            r, s, c = next_step(r, s, c, s_low, s_high, C, TILE.BK)
            g += 1
        k, q, p, n = next_tile(k, q, p, n, grid)


@gluon.jit
def load_residual(
    residual,
    slots,
    landed,
    freed,
    grid,
    items,
    TILE: gl.constexpr,
    RING: gl.constexpr,
    RESIDUAL: gl.constexpr,
):
    wait_for_dependencies()
    u = 0
    k, q, p, n = first_tile(grid)
    count = items if RESIDUAL else 0
    for _ in range(gl.program_id(0), count, gl.num_programs(0)):
        v = u // RING.GROUPS
        slot = (u % RING.GROUPS) * RING.SLOTS + v % RING.SLOTS
        mbarrier.wait(freed.index(slot), ((v // RING.SLOTS) & 1) ^ 1)
        mbarrier.expect(landed.index(slot), residual.block_type.nbytes)
        at = [p * TILE.BH, n * TILE.BN, q * TILE.BW, channel(k, grid, TILE.BCO)]
        load_tile(residual, at, landed.index(slot), slots.index(slot))
        u += 1
        k, q, p, n = next_tile(k, q, p, n, grid)
