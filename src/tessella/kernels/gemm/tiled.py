"""Matrix products in plain Triton: any sizes, strides, transposes, batches and element types.

Every block makes one tile of the result from tiles of A and B that asynchronous copies bring to
shared memory some steps ahead. It runs wherever Triton does, and in its interpreter: what the
kernels for Hopper are compared with.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.dtype import FP8
from tessella.device.launch import launch
from tessella.device.machine import multiprocessors, stages_that_fit
from tessella.device.overlap import await_earlier, overlapping
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.triton_device import cast, finish
from tessella.kernels.shared.matrix_product import (
    Sizes,
    arguments,
    operands,
    ranked,
    refusal,
    sides,
    sizes,
)
from tessella.operations.problem import Problem

PROMOTE_AFTER = 128  # fp8 tensor cores keep 14 bits: products summed before float32 takes over


@triton.jit
def _tiled_kernel(
    a, b, bias, residual, scale, out, sizes, strides, factors,
    TILE: tl.constexpr, BK: tl.constexpr,
    EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    SUM: tl.constexpr, IMPRECISE: tl.constexpr, WIDEN: tl.constexpr, INDEX: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """``strides`` are those of A, of B, of bias, residual and scale, and of the result.

    TILE: its rows and columns, and how many tiles go down before the next column.
    """
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    GROUP: tl.constexpr = TILE[2]
    M, N, K = sizes
    a_batch, a_row, a_k = strides[0]
    b_batch, b_k, b_column = strides[1]
    bias_stride, residual_batch, residual_row, residual_column, scale_stride = strides[2]
    out_batch, out_row, out_column = strides[3]
    alpha, beta, gamma = factors
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tile = tl.program_id(0)
    batch = (tile // (tiles_m * tiles_n)).to(tl.int64)
    tile = tile % (tiles_m * tiles_n)
    # GROUP rows of tiles share their columns of B while these are in L2
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    row = first + tile % (GROUP * tiles_n) % height
    column = tile % (GROUP * tiles_n) // height

    # a tile starts at a 64-bit address; inside it, offsets are INDEX numbers
    a += batch * a_batch + (row * BM).to(tl.int64) * a_row
    b += batch * b_batch + (column * BN).to(tl.int64) * b_column
    out += batch * out_batch + (row * BM).to(tl.int64) * out_row
    out += (column * BN).to(tl.int64) * out_column
    rows, columns, ks = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    row_in, column_in = (rows < M - row * BM)[:, None], (columns < N - column * BN)[None, :]
    rows, columns, k_at = rows.to(INDEX)[:, None], columns.to(INDEX)[None, :], ks.to(INDEX)
    a_at = rows * a_row + k_at[None, :] * a_k
    b_at = k_at[:, None] * b_k + columns * b_column

    depth = tl.full((), BK, tl.int64)
    acc = tl.zeros((BM, BN), dtype=SUM)
    await_earlier(OVERLAP)
    for step in range(tl.cdiv(K, BK)):
        if EVEN_K:
            a_tile = tl.load(a + a_at, mask=row_in, other=0.0)
            b_tile = tl.load(b + b_at, mask=column_in, other=0.0)
        else:
            k_in = ks < K - step * BK
            a_tile = tl.load(a + a_at, mask=row_in & k_in[None, :], other=0.0)
            b_tile = tl.load(b + b_at, mask=column_in & k_in[:, None], other=0.0)
        if WIDEN:
            a_tile, b_tile = a_tile.to(tl.float32), b_tile.to(tl.float32)
        acc = tl.dot(
            a_tile, b_tile, acc,
            input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=SUM,
        )  # fmt: skip
        a += a_k * depth
        b += b_k * depth

    inside = row_in & column_in
    out_at = out + (rows * out_row + columns * out_column)
    if out.dtype.element_ty == tl.int32:
        tl.store(out_at, acc, mask=inside)
    else:
        at = columns.to(tl.int64) + column * BN
        scales = None if scale is None else tl.load(scale + at * scale_stride, column_in)
        biases = None if bias is None else tl.load(bias + at * bias_stride, column_in)
        if residual is None:
            residuals = None
        else:
            residual += batch * residual_batch + (row * BM).to(tl.int64) * residual_row
            residual += (column * BN).to(tl.int64) * residual_column
            residual_at = residual + (rows * residual_row + columns * residual_column)
            residuals = tl.load(residual_at, inside)
        made = finish(acc, scales, biases, residuals, alpha, beta, gamma, ACTIVATION)
        tl.store(out_at, cast(made, out.dtype.element_ty), mask=inside)


def fits(problem: Problem) -> str | None:
    return refusal(problem)


# tile_m, tile_n, bytes of tile_k, warps, stages
_LARGE = ((128, 256, 128, 8, 3), (128, 128, 128, 4, 3))  # 128 sums a thread
_TILES = ((128, 128, 128, 8, 4), (64, 128, 128, 4, 4), (64, 64, 128, 4, 4), (16, 64, 256, 4, 4))
# Of products that would leave most of a GPU idle: longer steps, and narrower tiles. By the second
# one 300 × 256 × 2048 takes 9.9 µs on an H200, with the tiles above 11.5
_SMALL = ((64, 64, 256, 4, 3), (64, 32, 256, 4, 4))
_UNALIGNED = ((128, 64, 64, 8, 3), (64, 64, 64, 4, 3), (16, 64, 64, 4, 3))
_IEEE = ((128, 128, 128, 8, 3), (128, 64, 64, 4, 3), (16, 64, 128, 4, 3))
_LIGHT = (None, "relu", "relu6")


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    """Large tiles where they fill the GPU, smaller ones where there would be too few.

    Sums of 128 a thread leave no registers for a heavy epilogue or for promoted fp8; neither do
    large tiles of which every element is copied by itself.
    """
    made, dtype = sizes(problem), problem["input"].dtype
    promoted = dtype in FP8 and not problem.attr("fast_accumulation")
    tiles: tuple[tuple[int, int, int, int, int], ...]
    if dtype == "float32" and problem.math == "ieee":
        tiles = _IEEE
    elif any(t.format == "strided" or t.shape[-1] % 16 for t in sides(problem)):
        tiles = _UNALIGNED
    elif promoted or problem.epilogue.activation not in _LIGHT:
        tiles = _TILES
    else:
        tiles = (*_LARGE, *_TILES)
    if tiles[-1] == _TILES[-1] and _is_small(made):
        tiles = (*tiles, *_SMALL)

    keys = ("tile_m", "tile_n", "tile_k", "num_warps", "num_stages")
    itemsize = problem["input"].itemsize
    return tuple(
        dict(zip(keys, (tm, tn, tk // itemsize, warps, fitting), strict=True))
        for tm, tn, tk, warps, stages in ranked(tiles, made, loading=64)
        if (fitting := stages_that_fit(stages, (tm + tn) * tk))
    )


def _is_small(made: Sizes) -> bool:
    """Whether tiles of 64 × 64 are too few to fill a GPU twice."""
    tiles: int = made.batch * triton.cdiv(made.m, 64) * triton.cdiv(made.n, 64)
    return tiles <= 2 * multiprocessors()


def settings(problem: Problem, depth: int) -> dict[str, Any]:
    """What kernels in plain Triton are compiled with, whose steps have so many numbers of K."""
    dtype = problem["input"].dtype
    promotes = dtype in FP8 and not problem.attr("fast_accumulation")
    return {
        "BK": depth,
        "EVEN_K": sizes(problem).k % depth == 0,
        "ACTIVATION": problem.epilogue.activation,
        "PRECISION": problem.math,
        "SUM": tl.int32 if dtype == "int8" else tl.float32,
        "IMPRECISE": min(PROMOTE_AFTER, depth) if promotes else None,
        # the interpreter's bfloat16 products are garbage
        "WIDEN": dtype == "bfloat16" and triton.knobs.runtime.interpret,
    }


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    bm, bn, bk = (tile[name] for name in ("tile_m", "tile_n", "tile_k"))
    made = sizes(problem)
    blocks = made.batch * triton.cdiv(made.m, bm) * triton.cdiv(made.n, bn)
    options = {
        "TILE": (bm, bn, 8),
        **settings(problem, bk),
        "num_warps": tile["num_warps"],
        "num_stages": tile["num_stages"],
    }

    def call(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        given = arguments(problem, operands(problem, constants, inputs, out), made)
        wide = max(bm, bn, bk) * max(itertools.chain(*given[-2])) >= 2**31
        index = tl.int64 if wide else tl.int32
        launch(_tiled_kernel, (blocks,), *given, INDEX=index, **overlapping(), **options)
        return out

    return call
