"""A network's first layer and the maximum over its windows as one kernel on Hopper.

What the convolution makes never reaches memory. ResNet's first layer at batch 128 reads 38 MB and
makes, pooled, 51 MB in FP16 and 26 MB in INT8; what lies between has 206 MB, written and read.

Rounding and ReLU keep the order of numbers, so the largest sum of a window is taken first, and the
rest is done once for four pixels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tessella.core.compiled import Tiles
from tessella.core.dtype import FLOATS
from tessella.device.cuda import CudaKernel, cuda
from tessella.device.driver import MAP_BYTES, cuda_driver
from tessella.device.launch import only_compiles, record
from tessella.device.machine import multiprocessors
from tessella.device.packing import packed
from tessella.kernels.catalog import Call, Config
from tessella.kernels.conv.hopper.pooled_device import (
    BLOCK_BYTES,
    CHANNELS,
    NAMES,
    ORDERED,
    THREADS,
    Stem,
    source,
)
from tessella.operations.problem import Problem

TARGET = "sm_90"
TOGETHER = 3  # blocks of a multiprocessor: 168 registers a thread
MOST_DEPTH = 21  # times eight values: two registers a thread each, beside 64 of sums
MOST_STAGE = 8 << 10  # bytes
ROOM = 60 << 10  # of a block: weight and stages
MOST_STAGES = 24
TRIED = 4
_REST = (0.0, 1.6, 2.2)  # blocks left for the last round, and as how many they take: a guess
_WORD = 2, 4  # the driver's number of unsigned words, and their bytes


def fits(problem: Problem) -> str | None:
    a, epilogue = problem.attrs, problem.epilogue
    x, weight, bias = problem["input"], problem["weight"], epilogue.bias
    if x.dtype not in NAMES or weight.dtype != x.dtype:
        return f"multiplies {' and '.join(NAMES)}, not {x.dtype} × {weight.dtype}"
    if problem.output.dtype not in ("int8", x.dtype):
        return f"makes int8 or {x.dtype}, not {problem.output.dtype}"
    if not problem.is_constant("weight"):
        return "the weight must be constant: it is packed in advance"
    if (epilogue.residual, epilogue.scale, epilogue.alpha) != (None, None, 1):
        return "no residual, scale or alpha"
    if bias is not None and bias.dtype not in FLOATS:
        return f"a bias of {', '.join(FLOATS)}, not {bias.dtype}"
    if a["activation"] not in ORDERED:
        return f"{a['activation']} does not keep the order of numbers"
    if not (x.has("channels_last") and problem.output.has("channels_last")):
        return "image and result must be channels_last"
    if weight.shape[0] != CHANNELS:
        return f"{CHANNELS} channels out, not {weight.shape[0]}"
    if a["groups"] != 1 or tuple(a["dilation"]) != (1, 1):
        return "one group, no dilation"
    if tuple(a["kernel_size"]) != (3, 3) or tuple(a["pool_stride"]) != (2, 2):
        return "windows of 3×3 with stride 2"
    if tuple(a["pool_dilation"]) != (1, 1):
        return "no dilation of windows"
    if 0 in x.shape or 0 in problem.output.shape:
        return "nothing to pool"
    if math.prod(x.shape) >= 2**31 or math.prod(problem.output.shape) >= 2**31:
        return "more than 2³¹ values"
    return _cannot_load(stem_of(problem))


def _cannot_load(stem: Stem) -> str | None:
    if stem.taps_h < stem.stride_h:
        return "rows of the image that no window reads"
    if stem.stride_w * stem.channels % 2:
        return "a pixel of the convolution must begin with a whole word of the image"
    if stem.width * stem.channels % 8:
        return f"a row of {stem.width * stem.channels} values is no multiple of 16 bytes"
    if stem.depth > MOST_DEPTH:
        return f"for few channels: {stem.depth} times eight values, at most {MOST_DEPTH}"
    if stem.pitch > 256 or stem.stage_bytes > MOST_STAGE:
        return "a band's rows do not fit a request"
    return None


def stem_of(problem: Problem, **changes: int) -> Stem:
    """The layer in numbers."""
    a, (images, channels, height, width) = problem.attrs, problem["input"].shape
    taps, stride, padding = problem["weight"].shape[2:], a["stride"], a["padding"]
    middle = [
        (size + 2 * pad - tap) // step + 1
        for size, pad, tap, step in zip((height, width), padding, taps, stride, strict=True)
    ]
    pairs = {
        "taps": taps,
        "stride": stride,
        "padding": padding,
        "middle": middle,
        "pool_padding": a["pool_padding"],
        "out": problem.output.shape[2:],
    }
    stem = Stem(
        images=images,
        height=height,
        width=width,
        channels=channels,
        **{f"{name}_{axis}": int(n) for name, two in pairs.items() for axis, n in zip("hw", two)},
    )
    stages = min(MOST_STAGES, (ROOM - stem.weight_bytes) // stem.stage_bytes)
    return replace(stem, **{"stages": stages, **changes})


def configs(problem: Problem) -> tuple[Config, ...]:
    """Rows of a band, by how many rows of the convolution the busiest multiprocessor makes.

    Few long bands make few rows twice, but at the end leave multiprocessors with one or two, which
    do not hide what a block waits for.
    """
    stem = stem_of(problem)
    found: dict[int, float] = {}  # clocks, by rows
    for bands in range(1, stem.out_h + 1):
        rows = -(-stem.out_h // bands)
        tasks = stem.images * stem.across * -(-stem.out_h // rows)
        rounds, rest = divmod(-(-tasks // multiprocessors()), TOGETHER)
        found.setdefault(rows, (TOGETHER * rounds + _REST[rest]) * (2 * rows + 2))
    return tuple({"rows": rows} for rows in sorted(found, key=found.__getitem__)[:TRIED])


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: int) -> Call:
    stem = stem_of(problem, **(config or configs(problem)[0]))
    bias = problem.epilogue.bias
    kernel = _kernel(
        source(
            stem,
            dtype=problem["input"].dtype,
            out=problem.output.dtype,
            bias=bias.dtype if bias else None,
            rescaled=problem.gamma is not None,
            activation=problem.attrs["activation"],
            blocks=TOGETHER,
        )
    )
    weight = pack(constants[1], stem)
    gamma, grid = float(problem.epilogue.gamma), min(stem.tasks, TOGETHER * multiprocessors())

    def call(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        x, _, epilogue = problem.product_operands(constants, inputs)
        shift = out if epilogue.bias is None else epilogue.bias  # no place is left empty
        launched = kernel.launch(
            (grid, 1, 1),
            (THREADS, 1, 1),
            (_map(x, stem), weight, shift, out, gamma, stem.tasks, grid),
            shared_bytes=stem.shared_bytes,
            target=TARGET if only_compiles() else None,
        )
        record(launched)
        return out

    return call


@functools.cache
def _kernel(code: str) -> CudaKernel:
    # sums and products are not contracted: bias and gamma are rounded one by one, as torch does
    return cuda(code, "conv_pool", options=("--fmad=false",), one_architecture=True)


def pack(weight: torch.Tensor, stem: Stem) -> torch.Tensor:
    """[64, C, R, S] as the bytes of shared memory from which it is multiplied: rows of 64 values of
    every channel, swizzled, channels and values in the order of ``pooled_device``.
    """
    how = ("conv2d_pool", stem.taps_h, stem.run, stem.shift)
    return packed(weight, how, lambda weight: _packed(weight, stem))


def _packed(weight: torch.Tensor, stem: Stem) -> torch.Tensor:
    device = weight.device
    runs = weight.permute(0, 2, 3, 1).reshape(CHANNELS, stem.taps_h, stem.run)
    depth = torch.arange(stem.weight_bytes // BLOCK_BYTES * 64, device=device)
    part, lane, second = depth // 8, depth % 8 // 2, depth % 2
    tap, word = part // stem.words, lane * stem.words + part % stem.words
    if stem.moved:
        free = (word == 4 * stem.words - 1) & (tap % stem.stride_h == 0)
        free &= tap <= 2 * stem.stride_h
        word = word.where(~free, (tap // stem.stride_h + 1) * stem.words - 1)
        tap = tap.where(~free, stem.taps_h - 1)
    value = 2 * word + second - stem.shift
    used = (part < stem.depth - stem.moved) & (value >= 0) & (value < stem.run)
    column = torch.arange(CHANNELS, device=device)
    channel = 16 * (column % 8 // 2) + 2 * (column // 8) + column % 2
    made = runs[channel][:, tap.where(used, 0), value.where(used, 0)].where(used, 0)
    blocks = made.view(CHANNELS, -1, 8, 8).transpose(0, 1)  # [block, channel, 16 bytes, values]
    places = torch.arange(8, device=device) ^ column[:, None] % 8
    index = places[None, :, :, None].expand_as(blocks)
    return blocks.gather(2, index).contiguous().view(-1)


def _map(x: Any, stem: Stem) -> Any:
    """The driver's description of the image's rows in words; zeros where launches only compile."""
    if only_compiles():
        return bytes(MAP_BYTES)
    element, nbytes = _WORD
    tiles = Tiles(
        element=element, element_bytes=nbytes, box=(1, stem.stride_h, stem.pitch), swizzle=0
    )
    words = stem.width * stem.channels // 2
    shape = (stem.images, stem.height, words)
    return cuda_driver().tensor_map(x.data_ptr(), tiles, shape, (stem.height * words, words, 1))
