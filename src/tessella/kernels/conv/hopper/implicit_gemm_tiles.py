"""How the Hopper convolution cuts its work: the tiles that fit, and the order to try them in.

The order comes from counts (waves of tiles, stages, bytes) and rates measured on an H200, not from
a list of layers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tessella.core.dtype import FP8
from tessella.core.integers import power_of_two, round_up
from tessella.device.hopper import OVERLAPPING_TILES
from tessella.device.machine import HOPPER, multiprocessors
from tessella.kernels.conv.hopper import grouped
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

# of a block, by how many a multiprocessor holds, less what barriers and the compiler take
SHARED_BYTES = {n: HOPPER.shared_bytes_of_block(n) - 2048 // n for n in (1, 2)}
EIGHT_BITS = ("int8", *FP8)
MAX_CONFIGS = 12
MOST_SLICES = 8  # of a volume in a box: those of the next taps are read again, from the cache
# groups of how many warps in a block, and blocks on a multiprocessor
TEAMS = ((2, 4, 1), (1, 8, 1), (1, 4, 1), (1, 4, 2))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The convolution as the kernel sees it; a 1 × 1 filter has one long column of pixels.

    A volume's slices are images, and ``T`` are the filter's taps along its depth.
    """

    N: int
    H: int
    W: int
    C: int
    K: int
    P: int
    Q: int
    R: int
    S: int
    groups: int
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    itemsize: int
    out_itemsize: int
    T: int = 1

    @classmethod
    def of(cls, problem: Problem, x: TensorMeta, weight: TensorMeta, y: TensorMeta) -> Shape:
        N, C, *depth, H, W = x.shape
        K, P, Q = y.shape[1], *y.shape[-2:]
        *T, R, S = weight.shape[2:]
        taps = math.prod(T)
        stride, padding, dilation = (
            tuple(problem.attrs[name])[-2:] for name in ("stride", "padding", "dilation")
        )
        if (taps, R, S) == (1, 1, 1) and stride == (1, 1) and padding == (0, 0):
            N, H, W, P, Q = N * math.prod(depth) * H * W, 1, 1, 1, 1
        elif depth:  # a launch for each volume where slices of one meet
            N = depth[0] if taps > 1 else N * depth[0]
        return cls(
            N=N, H=H, W=W, C=C, K=K, P=P, Q=Q, R=R, S=S, groups=problem.attrs["groups"],
            stride=stride, padding=padding, dilation=dilation,
            itemsize=x.itemsize, out_itemsize=y.itemsize, T=taps,
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """Rows of the filter, those of all its slices."""
        return self.T * self.R

    @property
    def image(self) -> tuple[int, int]:
        return self.H, self.W

    @property
    def out(self) -> tuple[int, int]:
        return self.P, self.Q

    @property
    def taps(self) -> tuple[int, int]:
        return self.R, self.S

    def pixels_last(
        self, tensor: torch.Tensor, channels: int, image: tuple[int, int]
    ) -> torch.Tensor:
        """A channels_last tensor as [N, H, W, C]: strides of axes of one element are made whole."""
        height, width = image
        return tensor.as_strided(
            (self.N, height, width, channels),
            (height * width * channels, width * channels, channels, 1),
        )


def shape_of(problem: Problem) -> Shape:
    return Shape.of(problem, problem["input"], problem["weight"], problem.output)


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    """The ways to cut the work, by estimated time.

    Keys: ``tile_n · tile_h · tile_w`` pixels × ``tile_k`` output channels, ``tile_c`` input
    channels a stage, ``stages``, ``slots`` (output buffers of a group), ``groups`` of ``warps``
    that multiply in turns, ``residents`` (blocks on a multiprocessor), ``swap`` (output channels as
    the product's rows), ``splits`` of the sum, ``taps`` of a filter's column a stage. ``held``,
    where the weights of a block's tiles stay in shared memory; else it is left out.
    """
    shape = shape_of(problem)
    found: dict[tuple[Any, ...], tuple[float, dict[str, Any]]] = {}
    for config in _candidates(problem, shape):
        time = _estimate(shape, config, problem)
        key = (config["tile_k"], config["groups"], config["warps"], config["residents"],
               config["tile_n"] * config["tile_h"] * config["tile_w"], config["taps"],
               config["swap"], config.get("held"), shape.T > 1 and config["tile_n"])  # fmt: skip
        rank = found.setdefault(key, (time, config))
        if time < rank[0]:
            found[key] = (time, config)
    ranked = sorted(found.values(), key=lambda pair: pair[0])
    most = MAX_CONFIGS if shape.T == 1 else MAX_CONFIGS * 3 // 2
    return tuple(config for _, config in ranked[:most])


def _candidates(problem: Problem, shape: Shape) -> Iterator[dict[str, Any]]:
    """Every tile that fits registers and shared memory, with its ring as deep as memory allows."""
    residual = problem.epilogue.residual is not None
    least_k = 64 if problem.output.dtype in EIGHT_BITS else 16
    wide_k = max(least_k, power_of_two(shape.K))
    for (groups, warps, residents), tile_k, pixels in itertools.product(
        TEAMS, (16, 32, 64, 128, 256), (64, 128, 256)
    ):
        if tile_k < least_k or tile_k > wide_k or tile_k * pixels > 32 * 128 * warps:
            continue
        if warps == 8 and tile_k * pixels < 128 * 64:
            continue
        for tile_c, swap in itertools.product(_tile_c(shape, tile_k), (False, True)):
            rows = tile_k if swap else pixels
            if rows < 64 or (swap and tile_k > 128):
                continue
            columns = pixels if swap else tile_k
            if warps == 8 and rows == 64 and columns < 64:
                continue
            if residents == 2 and columns > 128:
                continue  # one product's sums must fit the registers that a thread has at first
            for (box, taps), held in itertools.product(_boxes(shape, pixels), _holds(shape)):
                if taps > 1 and promotes(problem):
                    continue  # sums of 128 products at most stay in the narrow accumulator
                config: dict[str, Any] = {
                    "tile_n": box[0], "tile_h": box[1], "tile_w": box[2], "tile_k": tile_k,
                    "tile_c": tile_c, "stages": 2, "slots": 1, "groups": groups, "warps": warps,
                    "residents": residents, "swap": swap, "splits": 1, "taps": taps,
                }  # fmt: skip
                config["splits"] = _splits(shape, config)
                items = math.prod(tile_counts(shape, config)) * config["splits"]
                if groups * residents > 1 and items <= multiprocessors():
                    continue  # there is no work for a second group, or block
                if held:
                    config["held"] = True
                    if config["splits"] > 1 or _blocks(shape, config) == 0:
                        continue
                if _deepen(shape, config, residual):
                    yield config


def _holds(shape: Shape) -> tuple[bool, ...]:
    """Whether to try weights that stay in shared memory: those of one group of an image are
    too many, and those of few channels of a volume are read again and again.
    """
    return (False, True) if shape.groups > 1 or shape.T > 1 else (False,)


def _blocks(shape: Shape, config: Mapping[str, Any]) -> int:
    """Blocks that there is room for; where they hold weights, as many for each tile's channels."""
    blocks = int(config["residents"]) * multiprocessors()
    every = tile_counts(shape, config)[0] if config.get("held") else 1
    return blocks // every * every


def promotes(problem: Problem) -> bool:
    """Whether fp8 sums leave the tensor core's narrow accumulator after every stage."""
    fp8 = problem["input"].dtype.startswith("float8")
    return fp8 and not problem.attr("fast_accumulation")


def channels_read(shape: Shape, tile_k: int) -> int:
    """Input channels that a tile of so many output channels reads: whole units of 16 bytes."""
    group_k, group_c = shape.K // shape.groups, shape.C // shape.groups
    unit = 16 // shape.itemsize
    return round_up(grouped.reach(shape.groups, group_k, group_c, tile_k, unit), unit)


def _tile_c(shape: Shape, tile_k: int) -> list[int]:
    """Channels a stage: 128 bytes of them, and half as many where that wastes less."""
    channels = channels_read(shape, tile_k)
    widest = 128 // shape.itemsize
    fewest = 32 // shape.itemsize
    widest = min(widest, max(fewest, power_of_two(channels)))
    half = max(fewest, widest // 2)
    return [widest] if round_up(channels, half) == round_up(channels, widest) else [widest, half]


def _boxes(shape: Shape, pixels: int) -> list[tuple[tuple[int, int, int], int]]:
    """Boxes of images × rows × columns that waste least, and how many taps a stage holds.

    The squarest and the flattest box with one tap; the tallest with a column of taps, whose rows
    are then loaded once. The boxes that reach over its end must be powers of two, too.
    """
    boxes = []
    for h, w in itertools.product((1, 2, 4, 8, 16, 32), repeat=2):
        n = pixels // (h * w)
        if n == 0 or n > max(1, power_of_two(shape.N)) or n * h * w != pixels:
            continue
        if h >= 2 * shape.P or w >= 2 * shape.Q or (shape.T > 1 and n > MOST_SLICES):
            continue
        waste = round_up(shape.N, n) * round_up(shape.P, h) * round_up(shape.Q, w)
        boxes.append((waste, abs(math.log2(h / w)), (n, h, w)))
    if not boxes:
        return [((pixels, 1, 1), 1)]
    least = min(boxes)[0]
    good = [box for box in boxes if box[0] <= 1.02 * least]
    squarest = min(good, key=lambda box: (box[1], box[2][0]))
    flattest = max(good, key=lambda box: (box[2][0], -box[1]))
    found = [(box, 1) for _, _, box in dict.fromkeys((squarest, flattest))]
    if OVERLAPPING_TILES and shape.stride[0] == shape.dilation[0] == 1 and shape.R in (2, 3, 5):
        # with several groups products are cheap and pixels are what takes time
        most, count = (1.15, 4) if shape.groups > 1 else (1.02, 2)
        tall = [b for b in boxes if b[0] <= most * least and b[2][1] > 2 and b[2][0] * b[2][2] >= 8]
        if shape.groups > 1:  # of each height the narrowest
            tall = list({box[2][1]: box for box in reversed(tall)}.values())
        tall.sort(key=lambda b: -b[2][1])
        if shape.T > 1:  # of the fewest slices, whose pixels lie in longer pieces, and of the most
            by_slices = {box[2][0]: box for box in reversed(tall)}
            tall = [by_slices[n] for n in sorted(by_slices)]
            tall = [*tall[:1], *tall[1:][-1:]]
        found += [(box, shape.R) for _, _, box in tall[:count]]
    return found


def _deepen(shape: Shape, config: dict[str, Any], residual: bool) -> bool:
    """Fill shared memory with stages and output buffers. False if it does not fit.

    A second output buffer for each group is worth less than a fourth stage: with three, products
    wait for TMA (256 → 256 channels at 14 × 14: 60 µs instead of 48). A residual comes through the
    second buffer while the first is written.
    """
    pixels = config["tile_n"] * config["tile_h"] * config["tile_w"]
    stage = _stage_bytes(shape, config)
    whole = config["splits"] == 1
    slot = pixels * config["tile_k"] * (shape.out_itemsize if whole else 4)
    for slots, least in ((2, 3 if residual else 4), (1, 2)) if whole else ((1, 2),):
        left = SHARED_BYTES[config["residents"]] - config["groups"] * slots * slot
        left -= _held_bytes(shape, config)
        config["slots"], config["stages"] = slots, min(8, left // stage)
        if config["stages"] * config["taps"] >= least and config["stages"] >= 2:
            return True
    return False


def _stage_bytes(shape: Shape, config: Mapping[str, Any]) -> int:
    taps = config["taps"]
    pixels: int = config["tile_n"] * (config["tile_h"] + taps - 1) * config["tile_w"]
    rows = 0 if config.get("held") else taps * config["tile_k"]
    elements: int = (pixels + rows) * config["tile_c"]
    return elements * shape.itemsize


def _held_bytes(shape: Shape, config: Mapping[str, Any]) -> int:
    if not config.get("held"):
        return 0
    tile_k: int = config["tile_k"]
    channels = round_up(channels_read(shape, tile_k), config["tile_c"])
    return shape.rows * shape.S * tile_k * channels * shape.itemsize


def stages_of_a_tile(shape: Shape, config: dict[str, Any]) -> float:
    """Stages of one tile, on average: taps that only see padding are skipped."""
    (sh, sw), (ph, pw), (dh, dw) = shape.stride, shape.padding, shape.dilation
    rows = 1 if config["taps"] > 1 else shape.R
    taps = shape.T * _taps_seen(shape.H, shape.P, rows, sh, ph, dh, config["tile_h"])
    taps *= _taps_seen(shape.W, shape.Q, shape.S, sw, pw, dw, config["tile_w"])
    chunks: int = math.ceil(channels_read(shape, config["tile_k"]) / config["tile_c"])
    return taps * chunks


@functools.lru_cache(maxsize=4096)  # candidates differ in few ways along one axis: half the time
def _taps_seen(
    size: int, out: int, count: int, stride: int, pad: int, dilation: int, box: int
) -> float:
    """Taps along one axis that see the image, on average over tiles of ``box`` results."""
    tiles = range(0, out, box)
    seen = 0
    for first in tiles:
        last = first + box - 1
        high = min(max(size - 1 + pad - first * stride, 0) // dilation, count - 1)
        low = min(-(-max(pad - last * stride, 0) // dilation), high)
        seen += high - low + 1
    return seen / len(tiles)


def tile_counts(shape: Shape, config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Tiles of output channels, columns, rows and images."""
    return (
        math.ceil(shape.K / config["tile_k"]),
        math.ceil(shape.Q / config["tile_w"]),
        math.ceil(shape.P / config["tile_h"]),
        math.ceil(shape.N / config["tile_n"]),
    )


def _splits(shape: Shape, config: dict[str, Any]) -> int:
    """Parts of the sum, where the tiles are few and the second kernel costs less than it saves."""
    tiles = math.prod(tile_counts(shape, config))
    steps = stages_of_a_tile(shape, config)
    if tiles > multiprocessors() // 2 or steps * config["taps"] < 24:
        return 1
    return max(1, min(multiprocessors() // tiles, int(steps * config["taps"] // 6), 16))


def _estimate(shape: Shape, config: dict[str, Any], problem: Problem) -> float:
    """Clocks of the whole convolution, from counts and a few measured rates.

    Per stage the slowest of: the tensor cores; shared memory (128 bytes a clock, read by the
    products and written by TMA); the way from the second-level cache (about 47 bytes a clock and
    multiprocessor, or a row of any length in 2.5 clocks); the loading warp (about 110 clocks a
    tile); and what is in flight, about 2800 clocks from asking to having. Then the epilogue, hidden
    by a second group; then whole waves of tiles; at least the time of the memory traffic (16.5
    bytes a clock and multiprocessor). A second kernel that adds parts: 5500 clocks.
    """
    pixels = config["tile_n"] * config["tile_h"] * config["tile_w"]
    taps, residual = config["taps"], problem.epilogue.residual is not None
    rows, columns = pixels, config["tile_k"]
    if config["swap"]:
        rows, columns = columns, rows
    depth = config["tile_c"] * shape.itemsize  # bytes
    warps_n = config["warps"] // min(config["warps"], max(4, rows // 16))
    width = min(columns // warps_n, 128 if shape.itemsize == 1 else 256)
    wide = 1.3 if shape.itemsize == 1 and config["tile_k"] == 256 else 1.0  # measured
    products = wide * taps * rows * columns * depth / 4096
    reads = taps * (rows / 64) * (columns / width) * (64 + width) * depth
    fill = _stage_bytes(shape, config)
    busy = max(products, (reads + fill) / 128, fill / 47, fill / depth * 2.5)
    loads = (1 if taps == 1 else 2) + (0 if config.get("held") else taps)
    loader, flight = 50 + 110 * loads, 2800 / (config["stages"] - 1)
    residents = config["residents"]
    stage = max(busy, loader / residents, flight / residents)
    stage += 0.1 * (reads + fill) / 128  # of two that are bound by the same, what reads less
    stage += 160 * (config["warps"] == 8)  # two warpgroups wait for one another
    tiles = math.prod(tile_counts(shape, config))
    splits = config["splits"]
    body = stages_of_a_tile(shape, config) / splits * (stage + 30)
    elements = pixels * config["tile_k"] / (32 * config["warps"])
    narrow = shape.out_itemsize == 1
    epilogue = 600 + elements * (3 + 3 * residual + 2 * narrow + 6 * (narrow and config["swap"]))
    tile = max(body, (body + epilogue) / (config["groups"] * residents))
    per_sm = math.ceil(tiles * splits / (_blocks(shape, config) / residents))
    out_bytes = shape.N * shape.P * shape.Q * shape.K * shape.out_itemsize
    moved = shape.N * shape.H * shape.W * shape.C * shape.itemsize
    channels = channels_read(shape, config["tile_k"])
    moved += shape.rows * shape.S * channels * shape.K * shape.itemsize
    moved += out_bytes * (2 if residual else 1)
    work, traffic = per_sm * tile, moved / (16.5 * multiprocessors())
    total: float = max(work, traffic) + 0.2 * min(work, traffic) + epilogue + 2000
    total += _held_bytes(shape, config) / 47
    if splits > 1:
        total += 5500 + 2 * splits * out_bytes / shape.out_itemsize * 4 / (40 * multiprocessors())
    return total
