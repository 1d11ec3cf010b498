"""Matrix products in true float32 by fused multiply-adds, in Gluon.

A thread makes 64 products of 16 numbers, read from shared memory four at a time: along the depth
where an operand's rows are contiguous there, else along the operand's other axis. Copies run some
steps ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton

from tessella.device.hopper import barrier, commit_copies, copy_elements, gl, gluon, wait_for_copies
from tessella.device.launch import launch
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.gluon_device import finish
from tessella.kernels.shared.matrix_product import (
    a_by_rows,
    arguments,
    b_by_rows,
    operands,
    ranked,
    refusal,
    sizes,
)
from tessella.operations.problem import Problem


@gluon.constexpr_function
def _copy_layout(rows, columns, warps):
    """Threads of a [rows, columns] tile whose rows are contiguous: four numbers each."""
    across = min(columns // 4, 32)
    return gl.BlockedLayout([1, 4], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def _ring_layout(depth_inner, depth):
    """Shared memory in which neighbours along the outer axis lie in other banks."""
    if not depth_inner:
        return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.SwizzledSharedLayout(4, max(1, 32 // depth), min(8, depth // 4), [1, 0])


@gluon.jit
def _pointers(
    x, first, SIZE, outer_stride, k_stride,
    BLOCK: gl.constexpr, BK: gl.constexpr, DEPTH_INNER: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Addresses of the first tile, which of them exist along the outer axis, and their depths."""
    SHAPE: gl.constexpr = [BLOCK, BK] if DEPTH_INNER else [BK, BLOCK]
    LAYOUT: gl.constexpr = _copy_layout(SHAPE[0], SHAPE[1], WARPS)
    OUTER: gl.constexpr = 1 if DEPTH_INNER else 0
    outer = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(OUTER, LAYOUT))
    k = gl.arange(0, BK, layout=gl.SliceLayout(1 - OUTER, LAYOUT))
    outer = gl.expand_dims(outer, OUTER)
    k = gl.expand_dims(k, 1 - OUTER)
    return x + outer.to(gl.int64) * outer_stride + k.to(gl.int64) * k_stride, outer < SIZE, k


@gluon.jit
def _fma_kernel(
    a, b, bias, residual, scale, out, sizes, strides, factors,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    WARPS_M: gl.constexpr, A_BY_DEPTH: gl.constexpr, B_BY_DEPTH: gl.constexpr,
    GROUP: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """``strides`` are those of A, of B, of bias, residual and scale, and of the result."""
    M, N, K = sizes
    a_batch, a_row, a_k = strides[0]
    b_batch, b_k, b_column = strides[1]
    bias_stride, residual_batch, residual_row, residual_column, scale_stride = strides[2]
    out_batch, out_row, out_column = strides[3]
    alpha, beta, gamma = factors
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1 if A_BY_DEPTH else 4, 1 if B_BY_DEPTH else 4],
        [4, 8],
        [WARPS_M, WARPS // WARPS_M],
        [1, 0],
    )
    tiles_m = gl.cdiv(M, BM)
    tiles_n = gl.cdiv(N, BN)
    tile = gl.program_id(0)
    batch = (tile // (tiles_m * tiles_n)).to(gl.int64)
    tile = tile % (tiles_m * tiles_n)
    top = tile // (GROUP * tiles_n) * GROUP
    height = gl.minimum(tiles_m - top, GROUP)
    i0 = (top + tile % (GROUP * tiles_n) % height) * BM
    j0 = tile % (GROUP * tiles_n) // height * BN

    A_SHAPE: gl.constexpr = [STAGES, BM, BK] if A_BY_DEPTH else [STAGES, BK, BM]
    B_SHAPE: gl.constexpr = [STAGES, BN, BK] if B_BY_DEPTH else [STAGES, BK, BN]
    a_ring = gl.allocate_shared_memory(gl.float32, A_SHAPE, _ring_layout(A_BY_DEPTH, BK))
    b_ring = gl.allocate_shared_memory(gl.float32, B_SHAPE, _ring_layout(B_BY_DEPTH, BK))
    a_at, a_in, a_depth = _pointers(
        a + batch * a_batch, i0, M, a_row, a_k, BM, BK, A_BY_DEPTH, WARPS
    )
    b_at, b_in, b_depth = _pointers(
        b + batch * b_batch, j0, N, b_column, b_k, BN, BK, B_BY_DEPTH, WARPS
    )

    steps = gl.cdiv(K, BK)
    for first in gl.static_range(STAGES - 1):
        if first < steps:
            copy_elements(a_ring.index(first), a_at, mask=a_in & (a_depth < K - first * BK))
            copy_elements(b_ring.index(first), b_at, mask=b_in & (b_depth < K - first * BK))
        commit_copies()
        a_at += BK * a_k
        b_at += BK * b_k
    acc = gl.zeros([BM, BN], gl.float32, layout=LAYOUT)
    for step in range(steps):
        wait_for_copies(STAGES - 2)
        barrier()
        ahead = step + STAGES - 1
        if ahead < steps:
            slot = ahead % STAGES
            copy_elements(a_ring.index(slot), a_at, mask=a_in & (a_depth < K - ahead * BK))
            copy_elements(b_ring.index(slot), b_at, mask=b_in & (b_depth < K - ahead * BK))
        commit_copies()
        a_at += BK * a_k
        b_at += BK * b_k
        left = a_ring.index(step % STAGES)
        right = b_ring.index(step % STAGES)
        if not A_BY_DEPTH:
            left = left.permute((1, 0))
        if B_BY_DEPTH:
            right = right.permute((1, 0))
        acc = gl.dot_fma(
            left.load(gl.DotOperandLayout(0, LAYOUT, 0)),
            right.load(gl.DotOperandLayout(1, LAYOUT, 0)),
            acc,
        )

    rows = i0 + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
    columns = j0 + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
    column_in = columns < N
    inside = (rows < M)[:, None] & column_in[None, :]
    scales = None
    biases = None
    residuals = None
    if scale is not None:
        scales = gl.load(scale + columns * scale_stride, mask=column_in, other=0.0)
        scales = scales.to(gl.float32)[None, :]
    if bias is not None:
        biases = gl.load(bias + columns * bias_stride, mask=column_in, other=0.0)
        biases = biases.to(gl.float32)[None, :]
    rows_at = rows.to(gl.int64)[:, None]
    columns_at = columns.to(gl.int64)[None, :]
    if residual is not None:
        residual_at = residual + batch * residual_batch
        residual_at += rows_at * residual_row + columns_at * residual_column
        residuals = gl.load(residual_at, mask=inside, other=0.0)
    dtype: gl.constexpr = out.dtype.element_ty
    made = finish(acc, scales, biases, residuals, alpha, beta, gamma, ACTIVATION, dtype)
    out_at = out + batch * out_batch + rows_at * out_row + columns_at * out_column
    gl.store(out_at, made, mask=inside)


def fits(problem: Problem) -> str | None:
    dtype = problem["input"].dtype
    if dtype != "float32":
        return f"float32 products only, not {dtype}"
    if problem.math != "ieee":
        return "for true float32; TF32 is allowed here"
    return refusal(problem)


# tile_m, tile_n, tile_k, warps, stages, warps along M
_TILES = (
    (128, 128, 32, 8, 3, 4),
    (128, 128, 16, 4, 4, 2),
    (128, 128, 16, 8, 4, 4),
    (64, 128, 16, 4, 4, 2),
    (64, 64, 16, 2, 4, 1),
    (64, 64, 32, 4, 3, 2),
    (32, 64, 32, 2, 4, 1),
)
# these spill where both operands are read along their outer axes
_SPILL_BY_COLUMNS = ((128, 128, 32, 8, 3, 4), (64, 64, 16, 2, 4, 1))
_KEYS = ("tile_m", "tile_n", "tile_k", "num_warps", "num_stages", "warps_m")


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    """Large tiles where they fill the GPU, smaller ones where there would be too few."""
    made, by_depth = sizes(problem), a_by_rows(problem) or b_by_rows(problem)
    tiles = [t for t in _TILES if by_depth or t not in _SPILL_BY_COLUMNS]

    return tuple(dict(zip(_KEYS, tile, strict=True)) for tile in ranked(tiles, made, 16))


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    made = sizes(problem)
    blocks = made.batch * triton.cdiv(made.m, tile["tile_m"]) * triton.cdiv(made.n, tile["tile_n"])
    options: dict[str, Any] = {
        "BM": tile["tile_m"],
        "BN": tile["tile_n"],
        "BK": tile["tile_k"],
        "STAGES": tile["num_stages"],
        "WARPS_M": tile["warps_m"],
        "A_BY_DEPTH": a_by_rows(problem),
        "B_BY_DEPTH": b_by_rows(problem),
        "GROUP": 8,
        "ACTIVATION": problem.epilogue.activation,
        "num_warps": tile["num_warps"],
    }

    def call(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        given = arguments(problem, operands(problem, constants, inputs, out), made)
        launch(_fma_kernel, (blocks,), *given, **options)
        return out

    return call
