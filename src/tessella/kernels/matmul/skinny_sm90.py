"""Matrix products of few rows (M ≤ 64) on Hopper: TMA streams the weights past the tensor cores.

As ``skinny``, with the ring in shared memory in our hands: weights that are constant are asked for
before the kernel in front has ended, so that memory is not idle between two products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton

from tessella.core.errors import KernelError
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue_device import channel_vector, finish
from tessella.kernels.hopper import (
    barrier,
    descriptor,
    gl,
    gluon,
    launch_dependents,
    load_tile,
    mbarrier,
    wait_for_dependencies,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tessella.kernels.launch import launch
from tessella.kernels.matmul import skinny
from tessella.kernels.matmul.shapes import FP8, operands, sizes, strides
from tessella.kernels.packing import packed
from tessella.kernels.problem import Problem

WRITES_OUT = True


@gluon.jit
def _request(w, x, w_ring, x_ring, ready, n0, k0, stage, WEIGHTS: gl.constexpr, ROWS: gl.constexpr):
    """Have TMA bring a step's weights, its rows, or both."""
    if WEIGHTS:
        mbarrier.expect(ready.index(stage), w.block_type.nbytes + x.block_type.nbytes)
        load_tile(w, [n0, k0], ready.index(stage), w_ring.index(stage))
    if ROWS:
        load_tile(x, [0, k0], ready.index(stage), x_ring.index(stage))


@gluon.jit
def _stream_kernel(
    w, x, bias, residual, scale, out, partial,
    M, N, K,
    residual_row, out_row, alpha, beta,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, CONSTANT: gl.constexpr, PROMOTE: gl.constexpr,
    SUM: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    BN: gl.constexpr = w.block_type.shape[0]
    BK: gl.constexpr = w.block_type.shape[1]
    BM: gl.constexpr = x.block_type.shape[0]
    BITS: gl.constexpr = w.dtype.primitive_bitwidth
    n0 = gl.program_id(0) * BN
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    steps = gl.cdiv(K, BK)
    start = split * steps // splits
    count = (split + 1) * steps // splits - start

    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(STAGES):
        mbarrier.init(ready.index(j), count=1)
    barrier()
    launch_dependents()
    if CONSTANT:
        for j in gl.static_range(STAGES):
            if j < count:
                _request(w, x, w_ring, x_ring, ready, n0, (start + j) * BK, j, True, False)
    wait_for_dependencies()
    for j in gl.static_range(STAGES):
        if j < count:
            _request(w, x, w_ring, x_ring, ready, n0, (start + j) * BK, j, not CONSTANT, True)

    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 256 // BITS])
    acc = gl.zeros([BN, BM], SUM, layout=SUMS)
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        x_tile = x_ring.index(stage).permute((1, 0))
        if PROMOTE:
            acc = warpgroup_mma(
                w_ring.index(stage), x_tile, acc, is_async=True, max_num_imprecise_acc=128
            )
        else:
            acc = warpgroup_mma(w_ring.index(stage), x_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        if i + STAGES < count:
            k0 = (start + i + STAGES) * BK
            _request(w, x, w_ring, x_ring, ready, n0, k0, stage, True, True)
    for j in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(j))

    # results lie along N: neighbours of a warp write neighbours
    LAYOUT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    acc = gl.convert_layout(acc, LAYOUT)
    columns = n0 + gl.arange(0, BN, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    rows = gl.arange(0, BM, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    inside = (columns < N) & (rows < M)
    if SPLIT:
        gl.store(partial + (split * M + rows) * N + columns, acc, mask=inside)
    else:
        VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
        scales = None
        biases = None
        residuals = None
        if scale is not None:
            scales = channel_vector(scale, n0, N, BN, VECTOR)[:, None]
        if bias is not None:
            biases = channel_vector(bias, n0, N, BN, VECTOR)[:, None]
        if residual is not None:
            residuals = gl.load(residual + rows * residual_row + columns, mask=inside, other=0.0)
        dtype: gl.constexpr = out.dtype.element_ty
        made = finish(acc, scales, biases, residuals, alpha, beta, ACTIVATION, dtype)
        gl.store(out + rows * out_row + columns, made, mask=inside)


def fits(problem: Problem) -> str | None:
    refused = skinny.fits(problem)
    if refused:
        return refused
    if problem.inputs[0].dtype == "float32" and problem.math == "ieee":
        return "tensor cores have no true float32"
    if problem.inputs[0].dtype != problem.inputs[1].dtype:
        return "one element type on both sides"
    tensors = (*problem.inputs, problem.output)
    if any(t is not None and t.format != "contiguous" for t in tensors):
        return "needs dense tensors"
    made = sizes(problem)
    if problem.attr("transpose_a") or not (_by_rows(problem) or 1 in problem.constant):
        return "needs K innermost in both operands"
    if 0 in (made.m, made.n, made.k):
        return "nothing to stream"
    if made.k * _itemsize(problem) % 16:
        return f"needs rows of a multiple of 16 bytes, not K = {made.k}"
    if made.m * made.n * 16 >= 2**31:
        return "offsets have 32 bits"
    return None


# tile_n, bytes of tile_k, stages: what won on an H200, oftenest first
_TILES = (
    (64, 512, 3),
    (64, 256, 5),
    (64, 256, 4),
    (64, 256, 8),
    (64, 256, 3),
    (128, 256, 5),
    (128, 128, 5),
)
_SMS = 132
_SHARED_BYTES = 227 * 1024 - 1024  # all that a multiprocessor has, less what barriers take
_MOST_SPLITS = 32


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    """Tiles of weights, and as many splits of K as fill the GPU once or twice."""
    made, itemsize = sizes(problem), _itemsize(problem)
    found: list[dict[str, Any]] = []
    for tile_n, width, stages in _TILES:
        tiles, steps = triton.cdiv(made.n, tile_n), triton.cdiv(made.k * itemsize, width)
        for resident in (2, 1):
            if resident * stages * (tile_n + _rows(made.m)) * width > _SHARED_BYTES:
                continue
            splits = max(1, min(resident * _SMS // tiles, steps, _MOST_SPLITS))
            tile = {"tile_n": tile_n, "tile_k": width // itemsize, "num_stages": stages}
            if {**tile, "splits": splits} not in found:
                found.append({**tile, "splits": splits})
    return tuple(found[:12])


workspace_bytes = skinny.workspace_bytes


def bind(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    *,
    tile_n: int = 64,
    tile_k: int = 64,
    splits: int = 1,
    num_stages: int = 4,
) -> Call:
    made, dtype = sizes(problem), problem.inputs[0].dtype
    ready = dict(constants)
    if 1 in ready and not _by_rows(problem):
        ready[1] = packed(ready[1], ("by rows",), lambda w: w.mT.contiguous()).mT
    alpha, beta = float(problem.attr("alpha")), float(problem.attr("beta"))
    tiles, rows = triton.cdiv(made.n, tile_n), _rows(made.m)
    options = {
        "STAGES": num_stages,
        "SPLIT": splits > 1,
        "CONSTANT": 1 in constants,
        "PROMOTE": dtype in FP8 and not problem.attr("fast_accumulation"),
        "SUM": gl.int32 if dtype == "int8" else gl.float32,
        "ACTIVATION": problem.attr("activation"),
        "num_warps": 4,
        "launch_pdl": True,
    }

    def call(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        o = operands(problem, ready, inputs, out)
        bias_stride, _, row, column, scale_stride = strides(o)
        partial = None if splits == 1 else workspace.view(skinny.sums_dtype(problem))
        launch(
            _stream_kernel, (tiles, splits),
            _tiles(o.b[0].mT, (tile_n, tile_k)), _tiles(o.a[0], (rows, tile_k)),
            o.bias, o.residual, o.scale, o.out, partial,
            made.m, made.n, made.k, row, o.out.stride(1), alpha, beta, **options,
        )  # fmt: skip
        if splits > 1:
            ends = (bias_stride, row, column, scale_stride, *o.out.stride()[1:], alpha, beta)
            skinny.add_splits(problem, o, partial, splits, ends)
        return out

    return call


def _tiles(matrix: torch.Tensor, box: tuple[int, int]) -> Any:
    """TMA's view of a matrix."""
    if matrix.data_ptr() % 16:
        raise KernelError(
            "a tensor is not aligned to 16 bytes, as TMA wants it",
            seen=f"address {matrix.data_ptr():#x}, shape {tuple(matrix.shape)}",
            fix="pass a copy of it (tensor.clone())",
        )
    return descriptor(matrix, box)


def _rows(m: int) -> int:
    return max(8, triton.next_power_of_2(m))


def _by_rows(problem: Problem) -> bool:
    return problem.op == "linear" or bool(problem.attr("transpose_b"))


def _itemsize(problem: Problem) -> int:
    return int(getattr(torch, problem.inputs[0].dtype).itemsize)
