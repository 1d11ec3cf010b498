"""Matrix products of few rows (M ≤ 64): bound by the weights, which are read once.

The roles are swapped, outᵀ = W · xᵀ, so that the tensor cores' 64 rows are rows of W. Blocks share
the work along N and, where there are too few of them, along K: then each leaves its sums in the
workspace, and a second kernel adds them in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.kernels.catalog import Call
from tessella.kernels.epilogue_triton import cast, finish
from tessella.kernels.launch import launch
from tessella.kernels.matmul.shapes import FP8, operands, refusal, sizes
from tessella.kernels.problem import Problem

WRITES_OUT = True

MAX_ROWS = 64


@triton.jit
def _skinny_kernel(
    x, w, bias, residual, scale, out, partial, counters,
    M, N, K,
    x_row, x_k, w_k, w_column,
    bias_stride, residual_row, residual_column, scale_stride, out_row, out_column,
    alpha, beta,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    SUM: tl.constexpr, IMPRECISE: tl.constexpr, WIDEN: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    split, splits = tl.program_id(1), tl.num_programs(1)
    columns, rows = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM)
    ks = tl.arange(0, BK)
    column_in, row_in = (columns < N)[:, None], (rows < M)[None, :]
    columns_at, rows_at = columns.to(tl.int64)[:, None], rows.to(tl.int64)[None, :]
    steps = tl.cdiv(K, BK)
    start, stop = split * steps // splits, (split + 1) * steps // splits
    k_at = (start * BK + ks).to(tl.int64)
    w_at = w + columns_at * w_column + k_at[None, :] * w_k
    x_at = x + rows_at * x_row + k_at[:, None] * x_k

    acc = tl.zeros((BN, BM), dtype=SUM)
    for step in range(start, stop):
        if EVEN_K:
            w_tile = tl.load(w_at, mask=column_in, other=0.0, eviction_policy="evict_first")
            x_tile = tl.load(x_at, mask=row_in, other=0.0)
        else:
            k_in = ks < K - step * BK
            w_in = column_in & k_in[None, :]
            w_tile = tl.load(w_at, mask=w_in, other=0.0, eviction_policy="evict_first")
            x_tile = tl.load(x_at, mask=row_in & k_in[:, None], other=0.0)
        if WIDEN:
            w_tile, x_tile = w_tile.to(tl.float32), x_tile.to(tl.float32)
        acc = tl.dot(
            w_tile, x_tile, acc,
            input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=SUM,
        )  # fmt: skip
        w_at += BK * w_k
        x_at += BK * x_k

    inside = column_in & row_in
    if REDUCE == "pass":
        tl.store(partial + split * M * N + rows_at * N + columns_at, acc, mask=inside)
    else:
        last = True
        if REDUCE == "last":
            tl.store(partial + split * M * N + rows_at * N + columns_at, acc, mask=inside)
            tl.debug_barrier()
            last = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel") == splits - 1
        if last:
            if REDUCE == "last":
                at = partial + rows_at * N + columns_at
                acc = tl.zeros((BN, BM), dtype=SUM)
                tl.store(counters + tl.program_id(0), 0)
                for i in range(splits):
                    acc += tl.load(at + i * M * N, mask=inside, other=0, cache_modifier=".cg")
            _store(
                acc, bias, residual, scale, out, columns[:, None], columns_at, rows_at, inside,
                bias_stride, residual_row, residual_column, scale_stride, out_row, out_column,
                alpha, beta, column_in, ACTIVATION,
            )  # fmt: skip


@triton.jit
def _reduce_kernel(
    partial, bias, residual, scale, out,
    M, N,
    bias_stride, residual_row, residual_column, scale_stride, out_row, out_column,
    alpha, beta,
    SPLITS: tl.constexpr, BN: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = columns < N
    at = partial + row * N + columns
    acc = tl.load(at, mask=inside, other=0)
    for i in tl.static_range(1, SPLITS):
        acc += tl.load(at + i * M * N, mask=inside, other=0)
    _store(
        acc, bias, residual, scale, out, columns, columns.to(tl.int64), row, inside,
        bias_stride, residual_row, residual_column, scale_stride, out_row, out_column,
        alpha, beta, inside, ACTIVATION,
    )  # fmt: skip


@triton.jit
def _store(
    acc, bias, residual, scale, out, columns, columns_at, rows_at, inside,
    bias_stride, residual_row, residual_column, scale_stride, out_row, out_column,
    alpha, beta, column_in, ACTIVATION: tl.constexpr,
):  # fmt: skip
    out_at = out + rows_at * out_row + columns_at * out_column
    if out.dtype.element_ty == tl.int32:
        tl.store(out_at, acc, mask=inside)
    else:
        scales = None if scale is None else tl.load(scale + columns * scale_stride, column_in)
        biases = None if bias is None else tl.load(bias + columns * bias_stride, column_in)
        if residual is None:
            residuals = None
        else:
            residuals = tl.load(
                residual + rows_at * residual_row + columns_at * residual_column, inside
            )
        made = finish(acc, scales, biases, residuals, alpha, beta, ACTIVATION)
        tl.store(out_at, cast(made, out.dtype.element_ty), mask=inside)


def fits(problem: Problem) -> str | None:
    refused = refusal(problem)
    if refused:
        return refused
    made = sizes(problem)
    if made.batch != 1 or made.m > MAX_ROWS:
        return f"one product of at most {MAX_ROWS} rows, not {made.batch} of {made.m}"
    return None


# tile_n, bytes of tile_k, warps, stages
_TILES = ((64, 256, 4, 5), (32, 256, 4, 6), (128, 128, 4, 5), (16, 512, 4, 5))
_SMS = 132


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    """Tiles of weights, and as many splits of K as fill the GPU once or twice."""
    made, itemsize = sizes(problem), getattr(torch, problem.inputs[0].dtype).itemsize
    keys = ("tile_n", "tile_k", "num_warps", "num_stages")
    found = []
    for tile_n, tile_k, warps, stages in _TILES:
        tile = dict(zip(keys, (tile_n, tile_k // itemsize, warps, stages), strict=True))
        tiles, steps = triton.cdiv(made.n, tile_n), triton.cdiv(made.k, tile["tile_k"])
        for blocks in (_SMS, 2 * _SMS):
            config = {**tile, "splits": max(1, min(blocks // max(tiles, 1), steps))}
            if config not in found:
                found.append(config)
    return tuple(found)


def workspace_bytes(problem: Problem, *, splits: int = 1, **_: Any) -> int:
    made = sizes(problem)
    return splits * made.m * made.n * 4 if splits > 1 else 0


def bind(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    *,
    tile_n: int = 64,
    tile_k: int = 64,
    splits: int = 1,
    num_warps: int = 4,
    num_stages: int = 4,
    reduce: str = "pass",
    pdl: bool = True,
    own: bool = False,
    bm: int = 0,
) -> Call:
    made, dtype = sizes(problem), problem.inputs[0].dtype
    promote = dtype in FP8 and not problem.attr("fast_accumulation")
    interpreted = triton.knobs.runtime.interpret
    tiles = triton.cdiv(made.n, tile_n)
    options = {
        "BM": bm or max(16, triton.next_power_of_2(made.m)),
        "BN": tile_n,
        "BK": tile_k,
        "EVEN_K": made.k % tile_k == 0,
        "ACTIVATION": problem.attr("activation"),
        "PRECISION": problem.math,
        "SUM": tl.int32 if dtype == "int8" else tl.float32,
        "IMPRECISE": min(128, tile_k) if promote else None,
        # the interpreter's bfloat16 products are garbage
        "WIDEN": dtype == "bfloat16" and interpreted,
        "REDUCE": reduce if splits > 1 else "no",
        "num_warps": num_warps,
        "num_stages": num_stages,
    }
    sum_dtype = torch.int32 if dtype == "int8" else torch.float32
    alpha, beta = float(problem.attr("alpha")), float(problem.attr("beta"))
    held = torch.zeros(tiles, dtype=torch.int32, device="cuda") if own else None

    def call(*inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None):
        o = operands(problem, constants, inputs, out)
        partial = None if workspace is None else workspace.view(sum_dtype)
        counters = held
        if reduce == "last" and splits > 1 and not own:
            counters = partial[splits * made.m * made.n :].view(torch.int32)
            counters.zero_()
        ends = (
            0 if o.bias is None else o.bias.stride(0),
            *((0, 0) if o.residual is None else o.residual.stride()[1:]),
            0 if o.scale is None else o.scale.stride(0),
            *o.out.stride()[1:],
            alpha,
            beta,
        )
        epilogue = (o.bias, o.residual, o.scale, o.out)
        launch(
            _skinny_kernel, (tiles, splits),
            o.a, o.b, *epilogue, partial, counters,
            made.m, made.n, made.k, *o.a.stride()[1:], *o.b.stride()[1:], *ends,
            **options,
        )  # fmt: skip
        if splits > 1 and reduce == "pass":
            launch(
                _reduce_kernel, (triton.cdiv(made.n, 512), made.m),
                partial, *epilogue, made.m, made.n, *ends,
                SPLITS=splits, BN=512, ACTIVATION=problem.attr("activation"),
                PDL=pdl and not interpreted, launch_pdl=pdl and not interpreted, num_warps=4,
            )  # fmt: skip
        return out

    return call
