"""Matrix products of few rows (M ≤ 64): bound by the weights, which are read once.

The roles are swapped, outᵀ = W · xᵀ, so that the tensor cores' 64 rows are rows of W. Blocks share
the work along N and, where there are too few of them, along K: then each leaves its sums in the
workspace, and a second kernel adds them in a fixed order: faster than a last block that waits for
the others (H200, 4096²: 11.8 µs, not 13.1). Launches are programmatic: the next kernel is there
when this one ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.device.launch import launch
from tessella.device.machine import multiprocessors, stages_that_fit
from tessella.device.overlap import await_earlier, overlapping
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.triton_device import cast, finish
from tessella.kernels.gemm.tiled import settings
from tessella.kernels.shared.matrix_product import Operands, operands, refusal, sizes, strides
from tessella.operations.problem import Problem

MAX_ROWS = 64


@triton.jit
def _skinny_kernel(
    x, w, epilogue, partial, sizes, strides, ends,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    SUM: tl.constexpr, IMPRECISE: tl.constexpr, WIDEN: tl.constexpr, SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """``epilogue`` is bias, residual, scale, result; ``ends`` their strides, alpha, beta, gamma."""
    M, N, K = sizes
    x_row, x_k, w_k, w_column = strides
    split, splits = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    columns, rows = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM)
    ks = tl.arange(0, BK)
    column_in, row_in = (columns < N)[:, None], (rows < M)[None, :]
    columns_at, rows_at = columns.to(tl.int64)[:, None], rows.to(tl.int64)[None, :]
    steps = tl.cdiv(K, BK)
    start, stop = (
        (split * steps // splits).to(tl.int32),
        ((split + 1) * steps // splits).to(tl.int32),
    )
    k_at = (start * BK + ks).to(tl.int64)
    w_at = w + columns_at * w_column + k_at[None, :] * w_k
    x_at = x + rows_at * x_row + k_at[:, None] * x_k

    await_earlier(OVERLAP)

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
    if SPLIT:
        tl.store(partial + split * M * N + rows_at * N + columns_at, acc, mask=inside)
    else:
        _store(acc, epilogue, ends, columns_at, rows_at, column_in, inside, ACTIVATION)


@triton.jit
def _reduce_kernel(
    partial, epilogue, N, ends,
    SPLITS: tl.constexpr, BN: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_earlier(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    columns = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    inside = columns < N
    at = partial + row * N + columns
    acc = tl.load(at, mask=inside, other=0)
    for _ in tl.static_range(1, SPLITS):
        at += tl.num_programs(1).to(tl.int64) * N
        acc += tl.load(at, mask=inside, other=0)
    _store(acc, epilogue, ends, columns, row, inside, inside, ACTIVATION)


@triton.jit
def _store(acc, epilogue, ends, columns, rows, column_in, inside, ACTIVATION: tl.constexpr):
    """The epilogue of sums at (rows, columns), which broadcast to them."""
    bias, residual, scale, out = epilogue
    bias_stride, residual_row, residual_column, scale_stride = ends[:4]
    out_row, out_column, alpha, beta, gamma = ends[4:]
    out_at = out + rows * out_row + columns * out_column
    if out.dtype.element_ty == tl.int32:
        tl.store(out_at, acc, mask=inside)
    else:
        scales = None if scale is None else tl.load(scale + columns * scale_stride, column_in)
        biases = None if bias is None else tl.load(bias + columns * bias_stride, column_in)
        if residual is None:
            residuals = None
        else:
            residual_at = residual + rows * residual_row + columns * residual_column
            residuals = tl.load(residual_at, inside)
        made = finish(acc, scales, biases, residuals, alpha, beta, gamma, ACTIVATION)
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
_TILES = ((64, 256, 4, 5), (64, 256, 4, 3), (32, 256, 4, 6), (16, 512, 4, 5))


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    """Tiles of weights, and as many splits of K as fill the GPU once or twice."""
    made, itemsize = sizes(problem), problem["input"].itemsize
    keys = ("tile_n", "tile_k", "num_warps", "num_stages")
    found = []
    rows = max(16, triton.next_power_of_2(made.m))
    for tile_n, tile_k, warps, most in _TILES:
        stages = stages_that_fit(most, (tile_n + rows) * tile_k)
        if not stages:
            continue
        tile = dict(zip(keys, (tile_n, tile_k // itemsize, warps, stages), strict=True))
        tiles, steps = triton.cdiv(made.n, tile_n), triton.cdiv(made.k, tile["tile_k"])
        for blocks in (multiprocessors(), 2 * multiprocessors()):
            config = {**tile, "splits": max(1, min(blocks // max(tiles, 1), steps))}
            if config not in found:
                found.append(config)
    return tuple(found)


def workspace_bytes(problem: Problem, **config: Any) -> int:
    made, splits = sizes(problem), (config or configs(problem)[0])["splits"]
    return splits * made.m * made.n * 4 if splits > 1 else 0


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    bn, bk, splits = (tile[name] for name in ("tile_n", "tile_k", "splits"))
    made = sizes(problem)
    tiles = triton.cdiv(made.n, bn)
    options = {
        "BM": max(16, triton.next_power_of_2(made.m)),
        "BN": bn,
        **settings(problem, bk),
        "SPLIT": splits > 1,
        "num_warps": tile["num_warps"],
        "num_stages": tile["num_stages"],
        **overlapping(),
    }

    def call(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not out.numel():
            return out
        o = operands(problem, constants, inputs, out)
        partial = None
        if splits > 1:
            assert workspace is not None
            partial = workspace.view(sums_dtype(problem))
        epilogue, ends = _ending(problem, o)
        launch(
            _skinny_kernel, (tiles, splits),
            o.a, o.b, epilogue, partial, (made.m, made.n, made.k),
            (*o.a.stride()[1:], *o.b.stride()[1:]), ends,
            **options,
        )  # fmt: skip
        if partial is not None:
            add_splits(problem, o, partial, splits)
        return out

    return call


def sums_dtype(problem: Problem) -> torch.dtype:
    """The element type of the sums in the workspace."""
    return torch.int32 if problem["input"].dtype == "int8" else torch.float32


def _ending(problem: Problem, o: Operands) -> tuple[tuple[Any, ...], tuple[float | None, ...]]:
    """``epilogue`` and ``ends`` of the kernels."""
    added = o.epilogue
    bias_stride, _, row, column, scale_stride = strides(o)
    steps = (bias_stride, row, column, scale_stride, *o.out.stride()[1:])
    return (added.bias, added.residual, added.scale, o.out), (*steps, *problem.factors)


def add_splits(problem: Problem, o: Operands, partial: torch.Tensor, splits: int) -> None:
    """Launch the second kernel: sums [splits, M, N] in order, then the epilogue."""
    epilogue, ends = _ending(problem, o)
    launch(
        _reduce_kernel, (triton.cdiv(o.out.shape[2], 512), o.out.shape[1]),
        partial, epilogue, o.out.shape[2], ends,
        SPLITS=splits, BN=512, ACTIVATION=o.epilogue.activation, **overlapping(),
    )  # fmt: skip
