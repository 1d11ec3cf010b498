"""Matrix products of few rows (M ≤ 64) on Hopper: TMA streams the weights past the tensor cores.

As ``skinny``, with the ring in shared memory in our hands: weights that are constant are asked for
before the kernel in front has ended, so that memory is not idle between two products. An epilogue
is the second kernel's, as where K is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton

from tessella.core.dtype import FP8
from tessella.core.integers import power_of_two
from tessella.device.hopper import (
    barrier,
    descriptor,
    gl,
    gluon,
    load_tile,
    mbarrier,
    wait_for_dependencies,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tessella.device.launch import launch
from tessella.device.machine import HOPPER, multiprocessors
from tessella.device.packing import with_packed
from tessella.kernels.catalog import Call
from tessella.kernels.gemm import skinny
from tessella.kernels.shared.matrix_product import (
    b_by_rows,
    operands,
    second,
    sides,
    sizes,
)
from tessella.kernels.shared.ring_device import barriers
from tessella.operations.problem import Problem


@gluon.jit
def _request(w, x, w_ring, x_ring, ready, n0, k0, stage, WEIGHTS: gl.constexpr, ROWS: gl.constexpr):
    """Have TMA bring a step's weights, its rows, or both."""
    if WEIGHTS:
        mbarrier.expect(ready.index(stage), w.block_type.nbytes + x.block_type.nbytes)
        load_tile(w, [n0, k0], ready.index(stage), w_ring.index(stage))
    if ROWS:
        load_tile(x, [0, k0], ready.index(stage), x_ring.index(stage))


@gluon.jit
def _stream_kernel(w, x, out, M, N, K, STAGES: gl.constexpr, CONSTANT: gl.constexpr):
    """w [N, K] · x [M, K]ᵀ → out [splits, M, N], in its element type."""
    BN: gl.constexpr = w.block_type.shape[0]
    BK: gl.constexpr = w.block_type.shape[1]
    BM: gl.constexpr = x.block_type.shape[0]
    n0 = gl.program_id(0) * BN
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    steps = gl.cdiv(K, BK)
    start = split * steps // splits
    count = (split + 1) * steps // splits - start

    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    ready = barriers(STAGES, 1)
    barrier()
    if CONSTANT:
        for j in gl.static_range(STAGES):
            if j < count:
                _request(w, x, w_ring, x_ring, ready, n0, (start + j) * BK, j, True, False)
    wait_for_dependencies()
    for j in gl.static_range(STAGES):
        if j < count:
            _request(w, x, w_ring, x_ring, ready, n0, (start + j) * BK, j, not CONSTANT, True)

    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    acc = gl.zeros([BN, BM], gl.float32, layout=SUMS)
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        x_tile = x_ring.index(stage).permute((1, 0))
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
    at = out + (split * M + rows) * N + columns
    gl.store(at, acc.to(out.dtype.element_ty), mask=(columns < N) & (rows < M))


def fits(problem: Problem) -> str | None:
    refused = skinny.fits(problem)
    if refused:
        return refused
    dtypes = {side.dtype for side in sides(problem)}
    if dtypes not in ({"float16"}, {"bfloat16"}):
        return f"16-bit products only, not {' × '.join(sorted(dtypes))}"
    tensors = (*problem.inputs, problem.output)
    if any(t is not None and t.format != "contiguous" for t in tensors):
        return "needs dense tensors"
    made = sizes(problem)
    turns_b = not b_by_rows(problem) and not problem.is_constant(second(problem))
    if problem.attr("transpose_a") or turns_b:
        return "needs K innermost in both operands"
    if 0 in (made.m, made.n, made.k):
        return "nothing to stream"
    if made.k * problem["input"].itemsize % 16:
        return f"needs rows of a multiple of 16 bytes, not K = {made.k}"
    if made.m * made.n * _MOST_SPLITS >= 2**31:
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
_SHARED_BYTES = HOPPER.shared_bytes_of_block() - 1024  # that is left to barriers
_MOST_SPLITS = 32


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    """Tiles of weights, and as many splits of K as fill the GPU once or twice."""
    made, itemsize = sizes(problem), problem["input"].itemsize
    found: list[dict[str, Any]] = []
    for tile_n, width, stages in _TILES:
        tiles, steps = triton.cdiv(made.n, tile_n), triton.cdiv(made.k * itemsize, width)
        for resident in (2, 1):
            if resident * stages * (tile_n + _rows(made.m)) * width > _SHARED_BYTES:
                continue
            splits = max(1, min(resident * multiprocessors() // tiles, steps, _MOST_SPLITS))
            tile = {"tile_n": tile_n, "tile_k": width // itemsize, "num_stages": stages}
            if {**tile, "splits": splits} not in found:
                found.append({**tile, "splits": splits})
    return tuple(found[:12])


def workspace_bytes(problem: Problem, **config: Any) -> int:
    made, splits = sizes(problem), (config or configs(problem)[0])["splits"]
    return splits * made.m * made.n * 4 if splits > 1 or _finishes(problem) else 0


def _finishes(problem: Problem) -> bool:
    """Whether a second kernel must follow, which knows the epilogue and the small types."""
    return not problem.epilogue.is_empty or problem.output.dtype in ("int8", *FP8)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    tile_n, tile_k, splits = (tile[name] for name in ("tile_n", "tile_k", "splits"))
    made = sizes(problem)
    ready = dict(constants)
    if not b_by_rows(problem):
        ready = with_packed(constants, ("by rows",), lambda w: w.mT.contiguous().mT)
    tiles, rows = triton.cdiv(made.n, tile_n), _rows(made.m)
    two_steps = splits > 1 or _finishes(problem)
    options: dict[str, Any] = {
        "STAGES": tile["num_stages"],
        "CONSTANT": 1 in constants,
        "num_warps": 4,
        "launch_pdl": True,
    }

    def call(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        o = operands(problem, ready, inputs, out)
        sums = out
        if two_steps:
            assert workspace is not None
            sums = workspace.view(torch.float32)
        launch(
            _stream_kernel, (tiles, splits),
            descriptor(o.b[0].mT, (tile_n, tile_k)), descriptor(o.a[0], (rows, tile_k)), sums,
            made.m, made.n, made.k, **options,
        )  # fmt: skip
        if two_steps:
            skinny.add_splits(problem, o, sums, splits)
        return out

    return call


def _rows(m: int) -> int:
    return max(8, power_of_two(m))
