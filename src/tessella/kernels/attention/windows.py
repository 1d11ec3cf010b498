"""Attention over few keys, as in windows of an image (Swin): all of them in one tile.

There are thousands of small products and each has the same mask, which costs more to read than the
queries: a block takes one head and, one after the other, windows with the same mask, which stays
in registers. The next window's rows arrive meanwhile.
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
from tessella.device.machine import multiprocessors
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

# queries, and keys: 24,576 heads of 49 × 49 × 32 take 100 µs on an H200; with the tiles for long
# sequences 348 (Hopper's kernel) and 672 (the portable one); the bytes alone are 73
MOST = 64
WIDEST = 128
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)  # finite numbers of a mask stay finite, as large as they may be


@triton.jit
def _windows_kernel(
    q, k, v, mask, out, sizes, strides, scale, gamma,
    TILE: tl.constexpr, RUN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr, STAGES: tl.constexpr, INDEX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``scale`` includes log₂ e; ``gamma``, of the result, is None for 1. ``windows``: of a mask.

    A block has a head and the windows m + masks · i of a mask m, RUN numbers i. INDEX: of the
    offsets inside a window. ``strides`` of q, k, v, mask and out: of batch, heads, rows, columns.
    """
    BM: tl.constexpr = TILE.BM
    BN: tl.constexpr = TILE.BN
    BE: tl.constexpr = TILE.BE
    BV: tl.constexpr = TILE.BV
    L, S, windows, heads, group, width, value_width, masks = sizes
    q_batch, q_head, q_row, q_column = strides[0]
    k_batch, k_head, k_row, k_column = strides[1]
    v_batch, v_head, v_row, v_column = strides[2]
    m_batch, m_head, m_row, m_column = strides[3]
    out_batch, out_head, out_row, out_column = strides[4]
    head, place = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(0) // heads
    first, start = (place % masks).to(tl.int64), place // masks * RUN
    rows, keys = tl.arange(0, BM).to(INDEX), tl.arange(0, BN).to(INDEX)
    columns, value_columns = tl.arange(0, BE).to(INDEX), tl.arange(0, BV).to(INDEX)
    step = tl.full((), 1, tl.int64) * masks
    row_in, key_in = rows < L, keys < S
    q_in = row_in[:, None] & (columns < width)[None, :]
    k_in = (columns < width)[:, None] & key_in[None, :]
    v_in = key_in[:, None] & (value_columns < value_width)[None, :]
    out_in = row_in[:, None] & (value_columns < value_width)[None, :]
    q += head * q_head + rows[:, None] * q_row + columns[None, :] * q_column
    k += head // group * k_head + columns[:, None] * k_column + keys[None, :] * k_row
    v += head // group * v_head + keys[:, None] * v_row + value_columns[None, :] * v_column
    out += head * out_head + rows[:, None] * out_row + value_columns[None, :] * out_column
    seen = row_in[:, None] & key_in[None, :]

    await_earlier(OVERLAP)

    hidden = tl.where(key_in, 0.0, float("-inf"))[None, :] + tl.zeros((BM, BN), tl.float32)
    if CAUSAL:
        hidden = tl.where(keys[None, :] <= rows[:, None], hidden, float("-inf"))
    if mask is not None:
        at = first * m_batch + head * m_head + rows[:, None] * m_row + keys[None, :] * m_column
        added = tl.load(mask + at, mask=seen, other=0)
        if mask.dtype.element_ty == tl.uint8:
            hidden = tl.where((added != 0) | (rows >= L)[:, None], hidden, float("-inf"))
        else:
            finite = tl.maximum(added.to(tl.float32), _LOWEST) * _LOG2_E
            hidden += tl.where(added == float("-inf"), float("-inf"), finite)
    for i in tl.range(start, tl.minimum(start + RUN, windows), num_stages=STAGES):
        n = first + i * step
        queries = tl.load(q + n * q_batch, mask=q_in, other=0.0)
        k_tile = tl.load(k + n * k_batch, mask=k_in, other=0.0)
        v_tile = tl.load(v + n * v_batch, mask=v_in, other=0.0)
        if WIDEN:
            queries, k_tile = queries.to(tl.float32), k_tile.to(tl.float32)
            v_tile = v_tile.to(tl.float32)
        weights = tl.dot(queries, k_tile, input_precision=PRECISION) * scale + hidden
        top = tl.max(weights, 1)
        top = tl.where(top == float("-inf"), 0.0, top)  # a row that sees no key is 0, as torch's
        weights = tl.exp2(weights - top[:, None])
        total = tl.sum(weights, 1)
        made = tl.dot(weights.to(v_tile.dtype), v_tile, input_precision=PRECISION)
        made = made / tl.where(total == 0, 1.0, total)[:, None]
        if gamma is not None:
            made = made * gamma
        tl.store(out + n * out_batch, cast(made, out.dtype.element_ty), mask=out_in)


def fits(problem: Problem) -> str | None:
    refused = refusal(problem, FLOATS, WIDEST)
    if refused:
        return refused
    made = sizes(problem)
    if max(made.queries, made.keys) > MOST:
        return f"{MOST} queries and keys at most, not {made.queries} and {made.keys}"
    return None


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    """Long runs, where windows of a mask are many and there are blocks for every multiprocessor."""
    made, mask = sizes(problem), problem.get("attn_mask")
    ieee = problem["query"].dtype == "float32" and problem.math == "ieee"
    windows = made.batch
    if mask is not None and len(mask.shape) == 4 and mask.shape[0] > 1:
        windows //= mask.shape[0]
    blocks = made.batch * made.heads // (4 * multiprocessors())
    runs = [run for run in (16, 8, 4) if run <= min(windows, blocks)][:2]
    # two warps hold twice as much each: a wide head does not fit their registers
    narrow = max(made.width, made.value_width) <= 32
    return tuple(
        {"run": run, "num_warps": warps, "num_stages": 1 if ieee else 3}
        for run in (*runs, 1)
        for warps in ((4, 2) if narrow and not ieee else (4,))
    )


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    chosen = config or configs(problem)[0]
    run = chosen["run"]
    made = sizes(problem)
    wide, value_wide = padded(made.width), padded(made.value_width)
    options: dict[str, Any] = {
        **settings(
            problem, Tile(BM=padded(made.queries), BN=padded(made.keys), BE=wide, BV=value_wide)
        ),
        "RUN": run,
        "STAGES": chosen["num_stages"],
        "num_warps": chosen["num_warps"],
    }
    scale = factor(problem) * _LOG2_E.value

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        o = operands(problem, constants, inputs)
        out, shaped = result(problem, o.q)
        # windows of a mask that is one for all are one after the other
        masks = 1 if o.mask is None or o.mask_strides[0] == 0 else o.mask.shape[0]
        windows = made.batch // masks
        strides = o.strides(out)
        far = 4 * max(MOST, wide, value_wide) * max(itertools.chain(*strides)) >= 2**31
        launch(
            _windows_kernel, (made.heads * masks * triton.cdiv(windows, run),),
            o.q, o.k, o.v, o.mask, out,
            (made.queries, made.keys, windows, made.heads, o.group, made.width, made.value_width,
             masks),
            strides, scale, problem.gamma, INDEX=tl.int64 if far else tl.int32, **options,
        )  # fmt: skip
        return shaped

    return call
