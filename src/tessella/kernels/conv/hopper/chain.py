"""Two 1 × 1 convolutions in one kernel on Hopper: the value between never comes back from memory.

In a residual network the wide result of one block (conv + residual + ReLU) is read twice: by the
next residual, much later, and at once by the next block's first 1 × 1 convolution, which is bound
by that reading. Here the wide result is multiplied on while it is on the chip (``chain_device``).

A group waits for its chunk's residual, finishes it and multiplies on, one chunk after another: two
or three groups take turns. Of three each has fewer registers, and so fewer channels.

Bytes that must pass memory, ResNet-50 at batch 128 in FP16, and what a block of two groups of 64
pixels holds in shared memory, with chunks of 64 channels (at 14²: one group, chunks of 32):

    pixels, channels       apart   chained   KB: x + weights + slots + results = 224 of 227
    56², 64→256→64        719 MB    514 MB   2·16 + 4·16 + 2·7·8 + 16    (all weights)
    28², 128→512→128      360 MB    257 MB   1·32 + 3·32 + 2·4·8 + 32    (a ring of weights)
    14², 256→1024→256     181 MB    130 MB   1·32 + 4·32 + 8·4   + 32    (a ring of weights)

INT8 halves the bytes. At 14² the weights pass from the second-level cache once a tile, 1 MB for
each 64 pixels, so that the chain may lose; at 7² the 512 sums of a pixel do not fit registers.
Who chooses measures (``compiler.choices.fuse_chains``).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tessella.core.integers import power_of_two
from tessella.device.hopper import descriptor
from tessella.device.launch import launch
from tessella.device.machine import HOPPER, multiprocessors
from tessella.device.packing import packed
from tessella.kernels.catalog import Call
from tessella.kernels.conv.hopper.chain_device import Flow, Ring, convolve_twice
from tessella.kernels.epilogue.finish_device import Ending
from tessella.kernels.epilogue.int8 import CLAMPS, MOST_PRODUCTS, is_small_scale, refusal, vectors
from tessella.operations.epilogue import Epilogue
from tessella.operations.problem import Problem

Tensor = torch.Tensor

TYPES = ("float16", "bfloat16", "int8")
WEIGHTS = ("weight", "next_weight")
PIXELS = 64  # of a group: the rows of one product
MOST_SUMS = 256  # channels of the result: half of a group's registers
PIECE = 64  # channels of the result that are finished at a time
SHARED_BYTES = HOPPER.shared_bytes_of_block() - 2048  # what barriers and the compiler take
MOST_SLOTS = 8
MAX_CONFIGS, OF_GROUPS = 8, 4  # in all, and of as many groups
# channels of a chunk and of the result that a group's registers hold the sums of; a third group has
# work while the other two wait: INT8, 2,048 images, 64 → 256 → 64 at 56² 1,328 → 1,221 µs (H200)
MOST_CHANNELS = {1: 512, 2: 512, 3: 192}


def fits(problem: Problem) -> str | None:
    x, weight, after = problem["input"], problem["weight"], problem["next_weight"]
    pixels = (x, problem.epilogue.residual, *problem.outputs)
    if x.dtype not in TYPES:
        return f"multiplies {', '.join(TYPES)}, not {x.dtype}"
    if any(meta is not None and meta.dtype != x.dtype for meta in (weight, after, *pixels)):
        return f"everything but scales and biases must be {x.dtype} like x"
    if x.dtype == "int8" and not problem.attr("dtype") == problem.attr("next_dtype") == "int8":
        return "results of int8 must be int8"
    if not all(meta is None or meta.has("channels_last") for meta in pixels):
        return "inputs and results must be channels_last"
    if not all(map(problem.is_constant, WEIGHTS)):
        return "the weights must be constant: they are packed, and loaded before their turn"
    itemsize = problem["input"].itemsize
    for channels in (weight.shape[1], *after.shape[:2]):
        if channels * itemsize % 16:
            return f"{channels} channels × {x.dtype} are not a multiple of 16 bytes"
    if after.shape[0] > MOST_SUMS:
        return f"sums of {after.shape[0]} channels do not fit registers: {MOST_SUMS} at most"
    sizes = [math.prod(meta.shape) for meta in pixels if meta is not None]
    if 0 in sizes or max(sizes) >= 2**31:
        return "empty, or more than 2^31 elements"
    if not configs(problem):
        return "tiles and weights do not fit shared memory"
    return refusal(problem)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The chain as the kernel sees it.

    Attributes:
        pixels: of all images.
        channels, between, out: of x, of the value between, of the result.
        wide_in, wide_out: ``channels`` and ``out`` as boxes have them, powers of two.
    """

    pixels: int
    channels: int
    between: int
    out: int
    wide_in: int
    wide_out: int
    itemsize: int


def shape_of(problem: Problem) -> Shape:
    images, channels, height, width = problem["input"].shape
    out, between = problem["next_weight"].shape[:2]
    itemsize = problem["input"].itemsize
    return Shape(
        pixels=images * height * width,
        channels=channels,
        between=between,
        out=out,
        wide_in=max(32 // itemsize, power_of_two(channels)),
        wide_out=max(64 if itemsize == 1 else 16, power_of_two(out)),
        itemsize=itemsize,
    )


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    """The ways to share out shared memory, by estimated time.

    Keys: ``groups`` of 64 pixels a block, channels of a ``chunk``, ``buffers`` for x, ``stages`` of
    weights, ``slots`` of a group's chunks, ``resident`` weights.
    """
    shape = shape_of(problem)
    reads, keeps = problem.epilogue.residual is not None, bool(problem.attr("keep"))
    ranked = sorted(_candidates(shape), key=lambda c: _estimate(shape, c, reads, keeps))
    of_groups: Counter[int] = Counter()
    kept = []
    for config in ranked:
        if of_groups[config["groups"]] < OF_GROUPS:
            of_groups[config["groups"]] += 1
            kept.append(config)
    return tuple(kept[:MAX_CONFIGS])


def _candidates(shape: Shape) -> Iterator[dict[str, Any]]:
    """Everything that fits, with as many slots as are left room for."""
    for groups, chunk_bytes, buffers in itertools.product((3, 2, 1), (128, 64), (2, 1)):
        chunk = chunk_bytes // shape.itemsize
        chunks = -(-shape.between // chunk)
        if chunk < 64 and shape.itemsize == 1:
            continue  # int8's rows are spread by 64
        if chunk_bytes == 64 and chunks == 1:
            continue
        if shape.wide_out > 128 and chunk_bytes == 128:
            continue  # registers would spill
        if chunk + shape.wide_out > MOST_CHANNELS[groups]:
            continue
        for stages, resident in ((chunks, True), *((n, False) for n in (8, 6, 4, 3, 2))):
            if stages >= chunks and not resident:
                continue
            config = {
                "groups": groups, "chunk": chunk, "buffers": buffers, "stages": stages,
                "slots": 0, "resident": resident,
            }  # fmt: skip
            left = SHARED_BYTES - shared_bytes(shape, config)
            config["slots"] = min(MOST_SLOTS, left // (groups * PIXELS * chunk_bytes))
            if config["slots"] >= 3:
                yield config


def shared_bytes(shape: Shape, config: Mapping[str, Any]) -> int:
    """x, weights, chunks and results of a block, without barriers."""
    groups, chunk = config["groups"], config["chunk"]
    tiles = config["buffers"] * shape.wide_in + config["slots"] * chunk + shape.wide_out
    weights = config["stages"] * chunk * (shape.wide_in + shape.wide_out)
    elements: int = groups * PIXELS * tiles + weights
    return elements * shape.itemsize


def _estimate(shape: Shape, config: Mapping[str, Any], reads: bool, keeps: bool) -> float:
    """Clocks of the whole chain, from counts and rates measured for ``implicit_gemm_tiles``.

    A block's tile takes the slowest of: its memory traffic (16.5 bytes a clock and multiprocessor);
    what comes in, from memory or the second-level cache (47 bytes a clock, and no faster than what
    is asked for at a time, 2800 clocks from asking to having); the products; and a group's chunks
    one after another, about 600 clocks and 12 for each element of a thread.
    """
    groups, chunk = config["groups"], config["chunk"]
    rows: int = groups * PIXELS
    chunks = -(-shape.between // chunk)
    ours = rows * (shape.channels + reads * shape.between) * shape.itemsize
    out = rows * (shape.out + keeps * shape.between) * shape.itemsize
    stage = chunk * (shape.wide_in + shape.wide_out) * shape.itemsize
    streamed = 0 if config["resident"] else chunks * stage
    ahead = (config["slots"] - 2) * reads * rows * chunk * shape.itemsize
    ahead += (config["buffers"] - 0.5) * rows * shape.wide_in * shape.itemsize
    products = rows * shape.between * (shape.wide_in + shape.wide_out) * shape.itemsize / 4096
    narrow = 1.3 if chunk * shape.itemsize == 64 else 1.0  # half-wide products, twice the reads
    elements = PIXELS * chunk / 128
    tile: float = max(
        (ours + out) / 16.5,
        (ours + streamed) / 47,
        2800 * ours / ahead,
        2800 * streamed / ((config["stages"] - 1) * stage or 1),
        products * narrow,
        chunks * (600 + 12 * elements) + 12 * PIXELS * shape.wide_out / 128,
    )
    first = 3000 + (0 if streamed else chunks * stage / 47)
    tiles = -(-shape.pixels // rows)
    tile += 0.1 * streamed / 47  # of two that are bound by the same, what reads less
    return first + tile * -(-tiles // multiprocessors())


def bind(problem: Problem, constants: Mapping[int, Tensor], **config: Any) -> Call:
    config = config or configs(problem)[0]
    weights = problem.operation.positions(WEIGHTS)
    held = {**constants, **{place: _rows_of_weight(constants[place]) for place in weights}}
    shape = shape_of(problem)
    # of each: whether scale and bias are folded, and whether sums are small
    folds = _fold(problem, held, "", shape.channels), _fold(problem, held, "next_", shape.between)

    def call(*inputs: Tensor) -> Any:
        made = tuple(meta.empty(inputs[0].device) for meta in problem.outputs)
        operands = problem.operands(held, inputs)
        _run(problem, config, (*operands, *[None] * (8 - len(operands))), made, folds)
        return made if len(made) > 1 else made[0]

    return call


def _fold(
    problem: Problem, held: dict[int, Tensor], prefix: str, products: int
) -> tuple[bool, bool]:
    """Put ``int8.vectors`` in place of a convolution's scale and bias, if they are constants.

    Args:
        held: the constants, which are changed.
        prefix: of the names of its epilogue.

    Returns:
        Whether they were, and whether sums are read as ``int8.small_sums`` says.
    """
    scale, bias = names = f"{prefix}scale", f"{prefix}bias"
    given = [name for name in names if problem.get(name) is not None]
    activation = problem.attr(f"{prefix}activation")
    is_small = problem["input"].dtype == "int8" and products <= MOST_PRODUCTS
    if problem["input"].dtype != "int8" or activation not in CLAMPS:
        return False, is_small
    place = problem.operation.position
    if any(place(name) not in held for name in given):
        return False, False
    known = Epilogue(
        scale=held.get(place(scale)),
        bias=held.get(place(bias)),
        activation=activation,
        beta=problem.epilogue.beta,
    )
    is_small = is_small and is_small_scale(known.scale)
    if not given:
        return False, is_small
    adds = not prefix and problem.epilogue.residual is not None
    held[place(scale)], held[place(bias)] = vectors(known, adds=adds, small=is_small)
    return True, is_small


def _rows_of_weight(weight: Tensor) -> Tensor:
    """[K, C, 1, 1] as the rows [K', C] that the tensor cores are fed with.

    A thread's sums lie in pairs, eight columns apart. Results of 8 bits want neighbours: the rows
    are spread, an 8 × 8 transpose of every 64 (``int8_device.by_channel`` undoes it), K' = K
    rounded up to 64.
    """
    if weight.dtype != torch.int8:
        return weight.reshape(weight.shape[:2])
    return packed(weight, ("conv2d_chain", "spread"), _spread)


def _spread(weight: Tensor) -> Tensor:
    rows, channels = weight.shape[:2]
    padded = weight.new_zeros(-(-rows // 64) * 64, channels)
    padded[:rows] = weight.reshape(rows, channels)
    return padded.view(-1, 8, 8, channels).transpose(1, 2).reshape(-1, channels)


def _run(
    problem: Problem,
    config: Mapping[str, Any],
    operands: tuple[Tensor | None, ...],
    made: tuple[Tensor, ...],
    folds: tuple[tuple[bool, bool], tuple[bool, bool]],
) -> None:
    x, weight, bias, residual, scale, next_weight, next_bias, next_scale = operands
    assert x is not None
    assert weight is not None
    assert next_weight is not None
    residual = None if problem.epilogue.beta == 0 else residual
    shape, chunk = shape_of(problem), config["chunk"]
    chunk_of = [PIXELS, chunk]
    pixels = _pixels(x)
    between = descriptor(_pixels(made[1]) if len(made) > 1 else pixels, chunk_of)
    tiles = -(-shape.pixels // (config["groups"] * PIXELS))
    beta = problem.epilogue.beta
    options: dict[str, Any] = {"maxnreg": 168} if config["groups"] == 1 else {}
    launch(
        convolve_twice,
        (min(tiles, multiprocessors()),),
        descriptor(pixels, [PIXELS, shape.wide_in]),
        descriptor(weight, [chunk, shape.wide_in]),
        descriptor(next_weight, [shape.wide_out, chunk]),
        between if residual is None else descriptor(_pixels(residual), chunk_of),
        between,
        descriptor(_pixels(made[0]), [PIXELS, min(shape.wide_out, PIECE)]),
        (scale, bias, float(beta), next_scale, next_bias, shape.between, shape.out),
        tiles, -(-shape.between // chunk),
        RING=Ring(
            GROUPS=config["groups"], BUFFERS=config["buffers"], STAGES=config["stages"],
            SLOTS=config["slots"], RESIDENT=config["resident"],
        ),
        FLOW=Flow(RESIDUAL=residual is not None, UNSCALED=beta == 1.0, KEEP=len(made) > 1),
        FIRST=Ending(problem.epilogue.activation, FOLDED=folds[0][0], SMALL=folds[0][1]),
        THEN=Ending(problem.attr("next_activation"), FOLDED=folds[1][0], SMALL=folds[1][1]),
        num_warps=4,
        launch_pdl=True,
        **options,
    )  # fmt: skip


def _pixels(tensor: Tensor) -> Tensor:
    """[N, C, H, W] channels_last → the view [pixels, C]."""
    count, channels, height, width = tensor.shape
    return tensor.as_strided((count * height * width, channels), (channels, 1))
