"""Convolution as a matrix product by ``mma.sync`` and ``cp.async``, of channels_last tensors.

What GPUs from Ampere on have, and Hopper's newer instructions replace. The device code is in
``implicit_gemm_device``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from tessella.core.architectures import has
from tessella.core.dtype import FLOATS
from tessella.core.integers import ceil_div, round_up
from tessella.device.cuda import CudaKernel, cuda
from tessella.device.launch import only_compiles, record
from tessella.device.machine import gpu, gpu_target, multiprocessors
from tessella.kernels.catalog import Call, Config
from tessella.kernels.conv import tiles
from tessella.kernels.conv.ampere.implicit_gemm_device import Tile, source
from tessella.kernels.conv.tiles import Geometry
from tessella.operations.epilogue import Epilogue
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

MOST_TAPS = 32  # bits of a mask
LEAST_STAGES = 3
OUTPUTS = {
    "float16": ("float16",),
    "bfloat16": ("bfloat16",),
    "int8": ("int8", "float16", "bfloat16"),
}
TRIED = 12
# pixels, filters, bytes of the depth, warps along both, stages, blocks of a multiprocessor
_TILES = (
    (128, 256, 128, 2, 4, 3, 1),
    (256, 128, 128, 4, 2, 3, 1),
    (96, 256, 128, 2, 4, 3, 1),
    (128, 192, 128, 2, 4, 3, 1),
    (96, 128, 128, 2, 2, 3, 2),
    (128, 128, 64, 2, 2, 4, 2),
    (256, 64, 64, 4, 1, 4, 2),
    (64, 256, 64, 1, 4, 4, 2),
    (128, 64, 64, 2, 2, 4, 3),
    (64, 128, 128, 2, 2, 3, 2),
    (64, 64, 128, 2, 2, 4, 2),
    (64, 128, 64, 2, 2, 4, 3),
    (64, 64, 64, 2, 2, 4, 4),
)
SHALLOW_BYTES = 256  # of a pixel's products: below, memory is what is waited for


def fits(problem: Problem) -> str | None:
    x, weight, output = problem["input"], problem["weight"], problem.output
    epilogue, residual = problem.epilogue, problem.epilogue.residual
    if len(x.shape) != 4:
        return f"takes [N, C, H, W], not {len(x.shape)} axes"
    if x.dtype not in OUTPUTS or x.dtype != weight.dtype:
        return f"multiplies {', '.join(OUTPUTS)}, not {x.dtype} × {weight.dtype}"
    if output.dtype not in OUTPUTS[x.dtype]:
        return f"does not make {output.dtype} of {x.dtype}"
    if problem.attrs["groups"] != 1:
        return "one group only"
    if any(t is not None and t.dtype not in FLOATS for t in (epilogue.bias, epilogue.scale)):
        return f"bias and scale must be {', '.join(FLOATS)}"
    if residual is not None and (
        residual.dtype != output.dtype or not residual.has("channels_last")
    ):
        return "the residual must have the result's type and format"
    if math.prod(weight.shape[2:]) > MOST_TAPS:
        return f"more than {MOST_TAPS} taps"
    if weight.format == "strided":
        return "the weight must be contiguous or channels_last"
    if x.pixel_pitch is None or output.pixel_pitch is None:
        return "input and output must be channels_last, or slices of its channels"
    for meta, pitch in ((x, x.pixel_pitch), (output, output.pixel_pitch)):
        if any(channels * meta.itemsize % 16 for channels in (meta.shape[1], pitch)):
            return f"{meta.shape[1]} channels of {meta.dtype} are no multiple of 16 bytes"
    if 0 in (*x.shape, *output.shape):
        return "empty"
    sizes = (math.prod(x.shape[2:]) * x.shape[0] * x.pixel_pitch, math.prod(output.shape))
    return "more than 2³¹ elements" if max(sizes) >= 2**31 - 2**24 else None


def outclassed(problem: Problem) -> str | None:
    """Hopper multiplies by ``wgmma`` 1.6 times as fast."""
    target = gpu_target()
    return f"{target} has wgmma" if has(target, "wgmma") else None


def configs(problem: Problem, most: int = TRIED) -> tuple[Config, ...]:
    """Tiles in the order of their estimated time: rounds of blocks over the multiprocessors, times
    a tile's products, times what a small tile loses to loading. Of few products a pixel, times what
    few blocks lose to waiting: 128 → 512 channels at 28² with a residual took 90 µs by four blocks
    of 64 × 64, 97 by one of 128 × 256 (H200).
    """
    geometry = Geometry.of(problem)
    depth = geometry.depth * problem["input"].itemsize
    estimates: dict[Tile, float] = {}
    for numbers in _TILES:
        cut = Tile(*numbers)
        blocks = ceil_div(geometry.pixels, cut.pixels) * ceil_div(geometry.filters, cut.filters)
        rounds = ceil_div(blocks, multiprocessors() * cut.blocks)
        share = cut.blocks if blocks > multiprocessors() else 1
        steps = ceil_div(depth, cut.depth) + LEAST_STAGES
        work = rounds * share * steps * cut.depth * cut.pixels * cut.filters
        ways = [cut, *([replace(cut, persistent=True)] if rounds > 1 else [])]
        if patches := _patches(problem, cut):
            ways.append(replace(cut, patches=patches))
        for tile in filter(None, (_fitted(way, problem) for way in ways)):
            lost = 24 / cut.pixels + 24 / cut.filters if depth > SHALLOW_BYTES else 1 / cut.blocks
            estimates[tile] = work * (1 + lost)
    return tuple(asdict(tile) for tile in sorted(estimates, key=estimates.__getitem__)[:most])


def _patches(problem: Problem, tile: Tile) -> int:
    """How many patches a tile needs, if all taps can read the same pixels in shared memory: where
    the result is as large as the image, a tap is as far from a pixel everywhere. Else 0.
    """
    geometry = Geometry.of(problem)
    a, nbytes = problem.attrs, geometry.channels * problem["input"].itemsize
    same = geometry.image == geometry.out and math.prod(geometry.filter) >= LEAST_STAGES
    if not same or {*a["stride"], *a["dilation"]} != {1} or nbytes % tile.depth:
        return 0
    return min(2, nbytes // tile.depth)


def _beside(problem: Problem) -> int:
    """Pixels that taps read beside those of a tile."""
    _, rows, columns = Geometry.of(problem).filter
    return (rows - 1) * problem["input"].shape[3] + columns - 1


def _fitted(tile: Tile, problem: Problem) -> Tile | None:
    """A tile that has room on the GPU, with the residual beside its stages if that fits."""
    limit, item = gpu().shared_bytes_of_block(tile.blocks), problem.output.itemsize
    residual, beside = problem.epilogue.residual is not None, _beside(problem)
    first = residual and not tile.patches
    for early in dict.fromkeys((first, first and tile.persistent)):
        for depth in dict.fromkeys((tile.depth, 64)):
            if tile.pixels % (tile.threads * 16 // depth):
                continue
            patches = _patches(problem, replace(tile, depth=depth)) if tile.patches else 0
            made = replace(tile, depth=depth, early=early, patches=patches)
            apart = early or tile.persistent
            room = limit - made.patch_bytes(beside) - (made.result_bytes(item) if apart else 0)
            most = tile.stages if depth == tile.depth else 4
            made = replace(made, stages=min(most, room // made.stage_bytes))
            if made.stages >= LEAST_STAGES and made.shared_bytes(item, beside) <= limit:
                return made
    return None


def workspace_bytes(problem: Problem, **config: Any) -> int:
    return round_up(problem["weight"].nbytes, 256) if _packs(problem) else 0


def _packs(problem: Problem) -> bool:
    """Whether a call rearranges the weight."""
    return not problem.is_constant("weight") and not problem["weight"].has("channels_last")


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = Tile(**(config or configs(problem, 1)[0]))
    held = tiles.with_packed_weight(constants, filters_last=False)
    kernel, (grid, factors, numbers) = _kernel(code_of(problem, tile)), launch_of(problem, tile)

    def convolve(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        x, weight, added = problem.product_operands(held, inputs)
        if _packs(problem):
            assert workspace is not None
            weight = tiles.pack_into(workspace, weight, filters_last=False, copy=True)
        given = (added.bias, added.residual, added.scale)
        launched = kernel.launch(
            (grid, 1, 1),
            (tile.threads, 1, 1),
            (x, weight, *(out if t is None else t for t in given), out, *factors, *numbers),
            shared_bytes=tile.shared_bytes(problem.output.itemsize, _beside(problem)),
            target=gpu_target() if only_compiles() else None,
        )
        record(launched)
        return out

    return convolve


def code_of(problem: Problem, tile: Tile, machine: str | None = None) -> str:
    """The kernel's source."""
    epilogue, geometry = problem.epilogue, Geometry.of(problem)
    bias, residual, scale = (None if meta is None else meta.dtype for meta in _operands(problem))
    return source(
        tile if residual else replace(tile, early=False),
        problem["input"].dtype,
        problem.output.dtype,
        Epilogue[str](
            bias=bias,
            residual=residual,
            scale=scale,
            activation=epilogue.activation,
            alpha=epilogue.alpha,
            beta=epilogue.beta,
        ),
        taps=math.prod(geometry.filter) > 1 or any(geometry.padding),
        deeper=geometry.channels * problem["input"].itemsize < tile.depth,
        beside=_beside(problem),
        rescaled=problem.gamma is not None,
        machine=machine,
    )


def _operands(problem: Problem) -> tuple[TensorMeta | None, ...]:
    """Bias, residual and scale, as far as they are read."""
    added = problem.epilogue
    return added.bias, None if added.beta == 0 else added.residual, added.scale


def launch_of(problem: Problem, tile: Tile) -> tuple[int, tuple[float, ...], tuple[Any, ...]]:
    """Blocks, and the kernel's numbers behind its pointers: floats, then ints and a window's."""
    geometry, epilogue = Geometry.of(problem), problem.epilogue
    across = ceil_div(geometry.filters, tile.filters)
    count = across * ceil_div(geometry.pixels, tile.pixels)
    blocks = min(count, multiprocessors() * tile.blocks) if tile.persistent else count
    factors = float(epilogue.alpha), float(epilogue.beta), float(epilogue.gamma)
    pitches = problem["input"].pixel_pitch or 0, problem.output.pixel_pitch or 0
    axes = (geometry.image, geometry.out, geometry.filter, geometry.stride, geometry.padding,
            geometry.dilation)  # fmt: skip
    window = tuple(n for each in axes for n in each[1:])
    sizes = geometry.pixels, geometry.filters, geometry.channels, *pitches
    return blocks, factors, (*sizes, window, across, count, blocks)


@functools.lru_cache(maxsize=512)
def _kernel(code: str) -> CudaKernel:
    # products and sums are not contracted: the epilogue rounds as torch's does
    return cuda(code, "conv_implicit_gemm", options=("--fmad=false",))
