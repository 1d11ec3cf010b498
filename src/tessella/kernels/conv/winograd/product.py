"""The batched products of Winograd's algorithm: m[p] = a[p] · b[p], one matrix a product p.

Two kernels. ``multiply`` (plain Triton) takes rows of depth, as tensor cores want them;
``multiply_fma`` (Gluon) takes true float32 with the depth outermost, so that both operands are read
from shared memory four numbers at a time, 64 products of a thread for 16 numbers.
All extents are whole blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tessella.device.hopper import barrier, commit_copies, copy_elements, gl, gluon, wait_for_copies


@triton.jit
def multiply(
    a, b, m, I, J,
    DEPTH: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """a [p, I, DEPTH] · b [p, J, DEPTH] → m [p, I, J] float32; PRECISION is tl.dot's."""
    block = tl.program_id(0)
    blocks_i, blocks_j = I // BLOCK_I, J // BLOCK_J
    p = block // (blocks_i * blocks_j)
    i = (block // blocks_j) % blocks_i * BLOCK_I + tl.arange(0, BLOCK_I)
    j = block % blocks_j * BLOCK_J + tl.arange(0, BLOCK_J)
    d = tl.arange(0, BLOCK_D)
    p = p.to(tl.int64)
    a += p * I * DEPTH + i[:, None] * DEPTH + d[None, :]
    b += p * J * DEPTH + j[None, :] * DEPTH + d[:, None]
    product = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    for k in range(0, DEPTH, BLOCK_D):
        product = tl.dot(tl.load(a + k), tl.load(b + k), product, input_precision=PRECISION)
    tl.store(m + p * I * J + i[:, None] * J + j[None, :], product)


@gluon.jit
def multiply_fma(
    a, b, m, I, J, DEPTH,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, WARPS_I: gl.constexpr,
):  # fmt: skip
    """a [p, DEPTH, I]ᵀ · b [p, DEPTH, J] → m [p, I, J], float32 by fused multiply-adds."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    # a warp's threads, 4 × 8 of 4 × 4 products, read 16 and 32 neighbours: no bank conflicts
    LAYOUT: gl.constexpr = gl.BlockedLayout([4, 4], [4, 8], [WARPS_I, NUM_WARPS // WARPS_I], [1, 0])
    ACROSS_I: gl.constexpr = min(BLOCK_I // 4, 32)
    ACROSS_J: gl.constexpr = min(BLOCK_J // 4, 32)
    COPY_I: gl.constexpr = gl.BlockedLayout(
        [1, 4], [32 // ACROSS_I, ACROSS_I], [NUM_WARPS, 1], [1, 0]
    )
    COPY_J: gl.constexpr = gl.BlockedLayout(
        [1, 4], [32 // ACROSS_J, ACROSS_J], [NUM_WARPS, 1], [1, 0]
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    a_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_D, BLOCK_I], PLAIN)
    b_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_D, BLOCK_J], PLAIN)

    block = gl.program_id(0)
    blocks_i = I // BLOCK_I
    blocks_j = J // BLOCK_J
    p = (block // (blocks_i * blocks_j)).to(gl.int64)
    i0 = (block // blocks_j) % blocks_i * BLOCK_I
    j0 = block % blocks_j * BLOCK_J
    a_d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(1, COPY_I))[:, None]
    a_i = gl.arange(0, BLOCK_I, layout=gl.SliceLayout(0, COPY_I))[None, :]
    b_d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(1, COPY_J))[:, None]
    b_j = gl.arange(0, BLOCK_J, layout=gl.SliceLayout(0, COPY_J))[None, :]
    a += p * DEPTH * I
    b += p * DEPTH * J
    from_a = i0 + a_d * I + a_i  # offsets of 32 bits: fewer registers than pointers
    from_b = j0 + b_d * J + b_j
    steps = DEPTH // BLOCK_D
    for first in gl.static_range(STAGES - 1):
        if first < steps:
            copy_elements(a_ring.index(first), a + from_a)
            copy_elements(b_ring.index(first), b + from_b)
        commit_copies()
        from_a += BLOCK_D * I
        from_b += BLOCK_D * J
    product = gl.zeros([BLOCK_I, BLOCK_J], gl.float32, layout=LAYOUT)
    for step in range(steps):
        wait_for_copies(STAGES - 2)
        barrier()
        if step + STAGES - 1 < steps:
            slot = (step + STAGES - 1) % STAGES
            copy_elements(a_ring.index(slot), a + from_a)
            copy_elements(b_ring.index(slot), b + from_b)
        commit_copies()
        from_a += BLOCK_D * I
        from_b += BLOCK_D * J
        a_tile = a_ring.index(step % STAGES)
        b_tile = b_ring.index(step % STAGES)
        for d in gl.static_range(BLOCK_D):
            left = a_tile.slice(d, 1, dim=0).permute((1, 0)).load(LAYOUT)
            product += left * b_tile.slice(d, 1, dim=0).load(LAYOUT)
    i = gl.arange(0, BLOCK_I, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, BLOCK_J, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(m + p * I * J + (i0 + i) * J + j0 + j, product)
