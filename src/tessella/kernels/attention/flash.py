"""Attention in one pass over the keys, in plain Triton: any sizes, strides, masks and head groups.

A block has a tile of queries and sees the keys tile by tile; the softmax is taken as it goes, with
the largest product so far as its base (Milakov and Gimelshein 2018), so that the weights are never
in memory: FlashAttention (Dao 2022; the order of loops is that of FlashAttention-2, Dao 2023). It
runs wherever Triton does, and in its interpreter: what the kernel for Hopper is compared with.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.dtype import FLOATS
from tessella.device.launch import launch
from tessella.device.machine import stages_that_fit
from tessella.device.overlap import await_earlier
from tessella.kernels.attention.shapes import (
    Tile,
    factor,
    operands,
    padded,
    refusal,
    result,
    settings,
    sizes,
)
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.triton_device import cast
from tessella.operations.problem import Problem

WIDEST = 256
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)  # finite numbers of a mask stay finite, as large as they may be


@triton.jit
def _flash_kernel(
    q, k, v, mask, out, sizes, strides, scale, gamma,
    TILE: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr, BY_KEY: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, INDEX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``scale`` includes log₂ e; ``gamma``, of the result, is None for 1. ``masks``: how many.

    ``strides`` of q, k, v, mask and out: along batch, heads, rows and columns.
    WHOLE: heads are as wide as tiles. BY_KEY: one mask for all rows.
    INDEX: of the offsets inside a tile; tiles begin at 64-bit addresses.
    """
    BM: tl.constexpr = TILE.BM
    BN: tl.constexpr = TILE.BN
    BE: tl.constexpr = TILE.BE
    BV: tl.constexpr = TILE.BV
    L, S, heads, group, width, value_width, masks = sizes
    q_batch, q_head, q_row, q_column = strides[0]
    k_batch, k_head, k_row, k_column = strides[1]
    v_batch, v_head, v_row, v_column = strides[2]
    m_batch, m_head, m_row, m_column = strides[3]
    out_batch, out_head, out_row, out_column = strides[4]
    tiles = tl.cdiv(L, BM)
    tile, place = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if CAUSAL:
        tile = tiles - 1 - tile  # those that see most keys begin first
    batch, head = (place // heads).to(tl.int64), (place % heads).to(tl.int64)
    row0 = tile * BM
    rows, keys, columns = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BE)
    value_columns = tl.arange(0, BV)
    row_in = (rows < L - row0)[:, None]
    q += batch * q_batch + head * q_head + row0.to(tl.int64) * q_row
    k += batch * k_batch + head // group * k_head
    v += batch * v_batch + head // group * v_head
    out += batch * out_batch + head * out_head + row0.to(tl.int64) * out_row
    q_at = q + (rows.to(INDEX)[:, None] * q_row + columns.to(INDEX)[None, :] * q_column)
    k_at = columns.to(INDEX)[:, None] * k_column + keys.to(INDEX)[None, :] * k_row
    v_at = keys.to(INDEX)[:, None] * v_row + value_columns.to(INDEX)[None, :] * v_column
    if mask is not None:
        mask += batch % masks * m_batch + head * m_head
        mask_at = keys.to(INDEX)[None, :] * m_column
        if not BY_KEY:
            mask += row0.to(tl.int64) * m_row
            mask_at += rows.to(INDEX)[:, None] * m_row
    # keys that some row sees; and tiles of keys that every row sees
    last, seen_by_all = S, S
    if CAUSAL:
        last, seen_by_all = tl.minimum(S, row0 + BM), tl.minimum(S, row0 + 1)
    inner, steps = seen_by_all // BN, tl.cdiv(last, BN)
    depth = tl.full((), BN, tl.int64)

    await_earlier(OVERLAP)

    if WHOLE:
        queries = tl.load(q_at, mask=row_in, other=0.0)
    else:
        queries = tl.load(q_at, mask=row_in & (columns < width)[None, :], other=0.0)
    if WIDEN:
        queries = queries.to(tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BV), tl.float32)
    for EDGE in tl.static_range(2):
        for step in range(0 if EDGE == 0 else inner, inner if EDGE == 0 else steps):
            key_in = keys < S - step * BN
            if WHOLE and EDGE == 0:
                k_tile = tl.load(k + k_at)
                v_tile = tl.load(v + v_at)
            else:
                k_tile = tl.load(
                    k + k_at, mask=key_in[None, :] & (columns < width)[:, None], other=0.0
                )
                v_tile = tl.load(
                    v + v_at, mask=key_in[:, None] & (value_columns < value_width)[None, :],
                    other=0.0,
                )  # fmt: skip
            if WIDEN:
                k_tile, v_tile = k_tile.to(tl.float32), v_tile.to(tl.float32)
            weights = tl.dot(queries, k_tile, input_precision=PRECISION) * scale
            if mask is not None:
                mask_in = key_in[None, :]
                if not BY_KEY:
                    mask_in = mask_in & row_in
                added = tl.load(mask + mask_at, mask=mask_in, other=0)
                if mask.dtype.element_ty == tl.uint8:
                    weights = tl.where(added != 0, weights, float("-inf"))
                else:
                    finite = tl.maximum(added.to(tl.float32), _LOWEST) * _LOG2_E
                    weights += tl.where(added == float("-inf"), float("-inf"), finite)
                mask += m_column * depth
            if EDGE == 1:
                seen = key_in[None, :]
                if CAUSAL:
                    seen = seen & (keys[None, :] + step * BN <= rows[:, None] + row0)
                weights = tl.where(seen, weights, float("-inf"))
            new_top = tl.maximum(top, tl.max(weights, 1))
            base = new_top
            if mask is not None:  # no key so far: nothing, not NaN
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(weights - base[:, None])
            fade = tl.exp2(top - base)
            total = total * fade + tl.sum(weights, 1)
            acc = tl.dot(
                weights.to(v_tile.dtype), v_tile, acc * fade[:, None], input_precision=PRECISION
            )
            top = new_top
            k += k_row * depth
            v += v_row * depth

    made = (
        acc / tl.where(total == 0, 1.0, total)[:, None]
    )  # a row that sees no key is 0, as torch's
    if gamma is not None:
        made = made * gamma
    inside = row_in if WHOLE else row_in & (value_columns < value_width)[None, :]
    out_at = rows.to(INDEX)[:, None] * out_row + value_columns.to(INDEX)[None, :] * out_column
    tl.store(out + out_at, cast(made, out.dtype.element_ty), mask=inside)


def fits(problem: Problem) -> str | None:
    return refusal(problem, FLOATS, WIDEST)


# tile_m, tile_n, warps, stages: by bytes of a head's row, at most
_TILES = {
    128: ((128, 128, 8, 2), (128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (64, 128, 4, 2)),
    256: ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 4, 3)),
    512: ((64, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2)),
    1024: ((64, 32, 8, 2), (32, 32, 4, 2)),
}
_IEEE = {
    256: ((64, 32, 8, 2), (32, 32, 4, 2)),
    512: ((16, 32, 4, 2),),
    1024: ((32, 16, 8, 2), (16, 32, 8, 2)),
}
_FEW = (16, 64, 4, 3)


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    """Tiles that hold a head in shared memory and sums in registers, no taller than the queries.

    Without tensor cores, the registers hold the factors too.
    """
    made, itemsize = sizes(problem), problem["query"].itemsize
    row_bytes = padded(max(made.width, made.value_width)) * itemsize
    ieee = problem["query"].dtype == "float32" and problem.math == "ieee"
    table = _IEEE if ieee else _TILES
    tiles = next(tiles for most, tiles in table.items() if row_bytes <= most)
    rows = max(16, triton.next_power_of_2(made.queries))
    low = tuple(tile for tile in tiles if tile[0] <= rows) or (_FEW,)
    keys = ("tile_m", "tile_n", "num_warps", "num_stages")
    # a stage of keys and values; the queries stay in registers
    return tuple(
        dict(zip(keys, (tm, tn, warps, fitting), strict=True))
        for tm, tn, warps, stages in low
        if (fitting := stages_that_fit(stages, 2 * tn * row_bytes))
    )


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    tile_m, tile_n = tile["tile_m"], tile["tile_n"]
    made = sizes(problem)
    blocks = made.batch * made.heads * triton.cdiv(made.queries, tile_m)
    wide, value_wide = padded(made.width), padded(made.value_width)
    options: dict[str, Any] = {
        **settings(problem, Tile(BM=tile_m, BN=tile_n, BE=wide, BV=value_wide)),
        "WHOLE": (wide, value_wide) == (made.width, made.value_width),
        "num_warps": tile["num_warps"],
        "num_stages": tile["num_stages"],
    }
    scale = factor(problem) * _LOG2_E.value

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        o = operands(problem, constants, inputs)
        out, shaped = result(problem, o.q)
        strides = o.strides(out)
        far = max(tile_m, tile_n, wide, value_wide) * max(itertools.chain(*strides)) >= 2**31
        launch(
            _flash_kernel, (blocks,),
            o.q, o.k, o.v, o.mask, out,
            (made.queries, made.keys, made.heads, o.group, made.width, made.value_width,
             1 if o.mask is None else o.mask.shape[0]),
            strides, scale, problem.gamma,
            BY_KEY=o.mask_strides[2] == 0, INDEX=tl.int64 if far else tl.int32, **options,
        )  # fmt: skip
        return shaped

    return call
