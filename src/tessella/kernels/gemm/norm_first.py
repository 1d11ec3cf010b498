"""A layer norm and the product of its rows in one launch, in plain Triton.

The rows are multiplied as they are, by weights that hold the norm's factors; what their mean adds
to each product, and their deviation, is known when they have all been read once:
``Σ w·(x − mean)/σ = (Σ w·x − mean · Σ w) / σ``. For few rows, where a launch counts more than
reading them in every block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.dtype import SIXTEEN_BIT
from tessella.device.launch import launch
from tessella.device.machine import stages_that_fit
from tessella.device.overlap import await_earlier, overlapping
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.triton_device import cast, finish
from tessella.kernels.shared.matrix_product import Sizes, ranked
from tessella.operations.problem import Problem

MOST_ROWS = 4096  # above, a norm by itself is a small part of what the product takes


@triton.jit
def _norm_first_kernel(
    x, weight, sums, shift, out, sizes, eps, gamma,
    TILE: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr,
    WIDEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x [M, K], weight [N, K] with the norm's factors, and for each column of the result: the sum
    of its weights, and what is added.

    A row's numbers are counted from its first one, so that squares of a mean far from zero do not
    swallow the deviation.
    """
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    GROUP: tl.constexpr = TILE[2]
    M, N, K = sizes
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tile = tl.program_id(0)
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    rows = (first + tile % (GROUP * tiles_n) % height) * BM + tl.arange(0, BM)
    columns = tile % (GROUP * tiles_n) // height * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    row_in, column_in = rows < M, columns < N
    x_at = x + rows[:, None] * K + ks[None, :]
    w_at = weight + columns[None, :] * K + ks[:, None]
    await_earlier(OVERLAP)
    origin = tl.load(x + rows * K, mask=row_in, other=0.0).to(tl.float32)
    total, squares = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(K, BK)):
        if EVEN_K:
            x_tile = tl.load(x_at, mask=row_in[:, None], other=0.0)
            w_tile = tl.load(w_at, mask=column_in[None, :], other=0.0)
            apart = x_tile.to(tl.float32) - origin[:, None]
        else:
            k_in = ks < K - step * BK
            x_tile = tl.load(x_at, mask=row_in[:, None] & k_in[None, :], other=0.0)
            w_tile = tl.load(w_at, mask=column_in[None, :] & k_in[:, None], other=0.0)
            apart = tl.where(k_in[None, :], x_tile.to(tl.float32) - origin[:, None], 0.0)
        total += tl.sum(apart, 1)
        squares += tl.sum(apart * apart, 1)
        if WIDEN:
            x_tile, w_tile = x_tile.to(tl.float32), w_tile.to(tl.float32)
        acc = tl.dot(x_tile, w_tile, acc)
        x_at += BK
        w_at += BK
    mean = total / K
    variance = squares / K - mean * mean
    variance = tl.where(variance < 0, 0.0, variance)  # NaN stays NaN
    scale = 1.0 / tl.sqrt(variance + eps)
    of_columns = tl.load(sums + columns, mask=column_in, other=0.0)[None, :]
    added = tl.load(shift + columns, mask=column_in, other=0.0)[None, :]
    made = (acc - (origin + mean)[:, None] * of_columns) * scale[:, None]
    made = finish(made, None, added, None, 1.0, 1.0, gamma, ACTIVATION)
    inside = row_in[:, None] & column_in[None, :]
    out_at = out + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(out_at, cast(made, out.dtype.element_ty), mask=inside)


def fits(problem: Problem) -> str | None:
    x, weight = problem["input"], problem["weight"]
    if {x.dtype, weight.dtype, problem.output.dtype} != {x.dtype} or x.dtype not in SIXTEEN_BIT:
        return "float16 or bfloat16 alone"
    if any(m.format != "contiguous" for m in (x, weight, problem.output)):
        return "dense rows"
    if {"weight", "norm_weight", "norm_bias"} - {*problem.constants}:
        return "weights that are known when the plan is built"
    if problem.get("bias") is not None and not problem.is_constant("bias"):
        return "a bias that is known when the plan is built"
    if problem.epilogue.alpha != 1 or {"residual", "scale"} & set(_named(problem)):
        return "no residual, and no factor of the product"
    made = _sizes(problem)
    if not 0 < made.m <= MOST_ROWS:
        return f"1 to {MOST_ROWS} rows, not {made.m}"
    return "indices have 32 bits" if max(made.m, made.n) * made.k >= 2**31 else None


def _named(problem: Problem) -> list[str]:
    """The operands that are given."""
    return list(problem.operation.shapes(problem.inputs))


def _sizes(problem: Problem) -> Sizes:
    n, k = problem["weight"].shape
    m = problem["input"].nbytes // (problem["input"].itemsize * k) if k else 0
    return Sizes(batch=1, m=m, n=n, k=k, folded=True, shared=True)


# tile_m, tile_n, bytes of tile_k, warps, stages
_TILES = (
    (128, 128, 128, 8, 4), (64, 128, 128, 4, 4), (128, 64, 128, 4, 4), (64, 64, 128, 4, 4),
    (64, 64, 256, 4, 3), (64, 128, 256, 8, 3), (64, 32, 256, 4, 3),
)  # fmt: skip


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    keys = ("tile_m", "tile_n", "tile_k", "num_warps", "num_stages")
    itemsize = problem["input"].itemsize
    return tuple(
        dict(zip(keys, (tm, tn, tk // itemsize, warps, fitting), strict=True))
        for tm, tn, tk, warps, stages in ranked(_TILES, _sizes(problem), loading=64)
        if (fitting := stages_that_fit(stages, (tm + tn) * tk))
    )


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    made = _sizes(problem)
    held = {name: constants[problem.operation.position(name)] for name in problem.constants}
    weight, sums, shift = _with_norm(held)
    blocks = triton.cdiv(made.m, tile["tile_m"]) * triton.cdiv(made.n, tile["tile_n"])
    settings: dict[str, Any] = {
        "TILE": (tile["tile_m"], tile["tile_n"], 8),
        "BK": tile["tile_k"],
        "EVEN_K": made.k % tile["tile_k"] == 0,
        "ACTIVATION": problem.epilogue.activation,
        "WIDEN": weight.dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
        "num_warps": tile["num_warps"],
        "num_stages": tile["num_stages"],
    }
    eps, sides = float(problem.attr("eps")), (made.m, made.n, made.k)

    def call(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        launch(
            _norm_first_kernel, (blocks,), x, weight, sums, shift, out, sides, eps, problem.gamma,
            **overlapping(), **settings,
        )  # fmt: skip
        return out

    return call


def _with_norm(held: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Weights times the norm's factors [N, K], their sums [N], and what is added [N]."""
    weight = held["weight"].float()
    factors = (weight * held["norm_weight"].float()).to(held["weight"].dtype).contiguous()
    shift = weight @ held["norm_bias"].float()
    if "bias" in held:
        shift = shift + held["bias"].float()
    return factors, factors.float().sum(1), shift
