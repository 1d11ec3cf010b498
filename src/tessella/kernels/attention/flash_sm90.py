"""Attention on Hopper's tensor cores: TMA, a ring in shared memory, WGMMA, specialized warps.

The host's side: what fits, which tiles are worth trying, descriptors and the launch. The device
code is ``flash_sm90_device``. For float16 and bfloat16, masks and head groups included; results
may be quantized, as the layer after attention wants them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tessella.core.dtype import SIXTEEN_BIT
from tessella.device.hopper import TensorDescriptor, descriptor
from tessella.device.launch import launch
from tessella.device.machine import ALIGNMENT, HOPPER, multiprocessors
from tessella.kernels.attention.flash_sm90_device import Form, attend
from tessella.kernels.attention.shapes import (
    QUANTIZED,
    factor,
    operands,
    padded,
    refusal,
    repeats,
    result,
    sizes,
)
from tessella.kernels.catalog import Call, Config
from tessella.operations.problem import Problem

WIDEST = 128
ROWS = 128  # queries of a block's tile
SMALL_BYTES = 2048  # room for barriers, a mask by key, and the alignment of what comes before
MOST_STAGES = 8
LOG2_E = 1.4426950408889634


def fits(problem: Problem) -> str | None:
    refused = refusal(problem, SIXTEEN_BIT, WIDEST)
    if refused:
        return refused
    made = sizes(problem)
    if made.width % 8 or made.value_width % 8:
        return f"rows of multiples of 16 bytes, as TMA wants them, not {made.width} numbers"
    if problem.output.dtype in QUANTIZED and (made.value_width % 16 or made.value_width == 16):
        return f"rows of quantized values of 32, 48, 64 … bytes, not {made.value_width}"
    if 0 in (made.batch, made.heads, made.queries, made.keys):
        return "empty"
    if repeats(problem) > 1:
        return "a mask for each image, or one for all, not one for every few"
    if factor(problem) <= 0:
        return f"a positive scale, not {problem.attr('scale')}"
    return None


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """One way to run the kernel.

    Attributes:
        tile_n: keys of a tile.
        stages: tiles of keys, and of values, in shared memory.
        run: tiles of queries that follow each other in a block and read the keys from there; with
            more than one, all keys must have room.
        ping_pong: the two warpgroups ask for products in turns.
    """

    tile_n: int
    stages: int
    run: int
    ping_pong: bool = False

    def shared_bytes(self, wide: int, value_wide: int) -> int:
        """Shared memory of a block: the ring, two tiles of queries and a tile of results."""
        rows = self.stages * self.tile_n
        return 2 * ((rows + 2 * ROWS) * wide + (rows + ROWS) * value_wide) + SMALL_BYTES


def configs(problem: Problem) -> tuple[Config, ...]:
    """Large tiles first; keys that stay for all queries of a head where there are heads enough.

    Taking turns pays where there are many; with the largest tiles both ways are tried.
    """
    made = sizes(problem)
    tiles, heads = -(-made.queries // ROWS), made.batch * made.heads
    found: list[Tiling] = []
    mask = problem.get("attn_mask")
    by_query = mask is not None and len(mask.shape) > 1 and mask.shape[-2] > 1
    for tile_n in (128, 64) if made.keys > 64 and not by_query else (64,):
        if mask is not None and tile_n * max(_padded(problem)) > 128 * 64:
            continue  # what a thread holds would not fit into its registers
        k_tiles, stages = -(-made.keys // tile_n), _stages(problem, tile_n)
        stay = tiles > 1 and k_tiles <= stages and heads >= multiprocessors()
        for run in (tiles, 1) if stay else (1,):
            for ping_pong in (False,) if found and found[0].tile_n != tile_n else (True, False):
                tiling = Tiling(tile_n=tile_n, stages=stages, run=run, ping_pong=ping_pong)
                found.append(tiling)
    return tuple(asdict(tiling) for tiling in found)


def _padded(problem: Problem) -> tuple[int, int]:
    """Widths of the tiles that hold a head."""
    made = sizes(problem)
    return padded(made.width), padded(made.value_width)


def _stages(problem: Problem, tile_n: int) -> int:
    wide, value_wide = _padded(problem)
    none = Tiling(tile_n=tile_n, stages=0, run=1).shared_bytes(wide, value_wide)
    room = HOPPER.shared_bytes_of_block() - none
    return min(MOST_STAGES, room // (2 * tile_n * (wide + value_wide)))


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tiling = Tiling(**(config or configs(problem)[0]))
    made, (wide, value_wide) = sizes(problem), _padded(problem)
    tiles, k_tiles = -(-made.queries // ROWS), -(-made.keys // tiling.tile_n)
    runs = -(-tiles // tiling.run)
    units = made.batch * made.heads * runs
    scale = factor(problem) * LOG2_E

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        o = operands(problem, constants, inputs)
        out, shaped = result(problem, o.q)
        launch(
            attend,
            (min(units, multiprocessors()),),
            _tiles(o.q, ROWS // 2, wide),
            _tiles(o.k, tiling.tile_n, wide),
            _tiles(o.v, tiling.tile_n, value_wide),
            _tiles(out, ROWS // 2, value_wide),
            (o.mask, *o.mask_strides),
            made.queries,
            made.keys,
            scale,
            problem.gamma,
            units,
            runs,
            tiling.run,
            tiles,
            k_tiles,
            made.heads,
            o.group,
            FORM=Form(
                BN=tiling.tile_n,
                STAGES=tiling.stages,
                CAUSAL=bool(problem.attr("is_causal")),
                RAGGED=made.keys % tiling.tile_n != 0,
                BY_KEY=o.mask is not None and o.mask_strides[2] == 0,
                PING_PONG=tiling.ping_pong,
            ),
            num_warps=4,
            launch_pdl=True,
        )
        return shaped

    return call


def _tiles(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """TMA's view of [N, heads, rows, columns]; of a copy, where the strides are not for TMA."""
    unit = 16 // tensor.itemsize
    axes = list(zip(tensor.shape, tensor.stride(), strict=True))[:3]
    right = all(size == 1 or (step > 0 and step % unit == 0) for size, step in axes)
    if not right or tensor.stride(3) != 1 or tensor.data_ptr() % ALIGNMENT:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    elif 1 in tensor.shape[:3]:  # an axis of one has any stride
        steps = [unit if size == 1 else step for size, step in axes]
        tensor = tensor.as_strided(tensor.shape, (*steps, 1))
    return descriptor(tensor, [1, 1, rows, columns])
