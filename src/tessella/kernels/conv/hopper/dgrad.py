"""Gradient of a convolution by its input, on Hopper: dy [N, P, Q, K] and weight → dx [N, H, W, C].

Every pixel of dx is a row of a matrix product over (tap, K). Stride s splits dx into s·s classes of
pixels (h mod s, w mod s), each a convolution of stride 1 with its own taps; all run in one launch.
One warp copies tiles with TMA, whose zero fill is the padding; the others multiply.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from tessella.device.hopper import (
    barrier,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tessella.device.launch import launch
from tessella.device.machine import multiprocessors
from tessella.device.packing import with_packed
from tessella.kernels.catalog import Call, Config
from tessella.kernels.conv.backward import (
    L2_BYTES,
    PRODUCTS,
    SHARED_BYTES,
    Box,
    boxes,
    four,
    refusal,
)
from tessella.kernels.conv.hopper.implicit_gemm_tiles import Shape
from tessella.kernels.shared.ring_device import barriers, next_stage, stage_before
from tessella.operations.problem import Problem

DEPTH = 64  # channels of dy in a tile: 128 bytes, the widest swizzle


def fits(problem: Problem) -> str | None:
    dy, weight, dx = problem["grad"], problem["weight"], problem.output
    if weight.dtype != dy.dtype or dx.dtype != dy.dtype:
        return "one element type throughout"
    return refusal(problem, dx, weight, dy) or _without_taps(_geometry(problem))


def _without_taps(geometry: Shape) -> str | None:
    if _classes(geometry) is None:
        return f"with stride {geometry.stride}, taps reach neither all pixels nor every first one"
    return None


def _classes(geometry: Shape) -> int | None:
    """How many classes of pixels get products: all, or, as with 1 × 1 and stride 2, the first one.

    The others are zeros, which are written before. None where it is otherwise.
    """
    reached = [
        {(tap * dilation - padding) % stride for tap in range(taps)}
        for stride, padding, dilation, taps in zip(
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            geometry.taps,
            strict=True,
        )
    ]
    if all(len(each) == stride for each, stride in zip(reached, geometry.stride, strict=True)):
        return math.prod(geometry.stride)
    return 1 if reached == [{0}, {0}] else None


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles in the order of their estimated time."""
    geometry = _geometry(problem)
    found = []
    for pixels, columns, warps, swap in _TILES:
        if columns > 64 and columns >= 2 * geometry.C:
            continue
        for box in _boxes(geometry, pixels):
            resident = 2 if warps == 4 else 1
            room = SHARED_BYTES // resident - 2 * pixels * columns
            stages = min(room // (2 * DEPTH * (pixels + columns)), 8)
            config = {
                "box_n": box[0], "box_h": box[1], "box_w": box[2], "columns": columns,
                "stages": stages, "warps": warps, "swap": swap,
            }  # fmt: skip
            hurry = 1.6 if stages < 4 else 1  # measured: few stages lose what large tiles gain
            found.append((hurry * _clocks(geometry, box, columns, resident), config))
    found.sort(key=lambda pair: pair[0])
    return tuple(config for _, config in found[:12])


def _boxes(geometry: Shape, pixels: int) -> list[Box]:
    """Many images of few pixels first: measured up to 12 % faster than square boxes on images of
    7 × 7 to 56 × 56, for they read no more taps than they must. Larger ones: the square box."""
    found = boxes(geometry.N, _cells(geometry), pixels)
    deep = sorted(found, key=lambda box: -box[0])[:2]
    first = deep if max(_cells(geometry)) <= 64 else found[:1]
    return list(dict.fromkeys([*first, found[0], *deep]))[:3]


# pixels, channels, warps that multiply, whether channels are the product's rows
_TILES = (
    (128, 256, 8, False),
    (256, 128, 8, False),
    (128, 128, 8, False),
    (256, 64, 8, True),
    (256, 64, 8, False),
    (128, 64, 4, False),
    (128, 32, 4, False),
)


def _geometry(problem: Problem) -> Shape:
    return Shape.of(problem, problem.output, problem["weight"], problem["grad"])


def _cells(geometry: Shape) -> tuple[int, int]:
    """Extents of the pixels of one class."""
    (height, width), (down, right) = geometry.image, geometry.stride
    return -(-height // down), -(-width // right)


def _clocks(geometry: Shape, box: Box, columns: int, resident: int) -> float:
    """About how long a multiprocessor is busy: taps that a box misses are not multiplied."""
    pixels = math.prod(box)
    taps = [_mean_taps(geometry, axis, box[axis + 1]) for axis in (0, 1)]
    tiles = (_classes(geometry) or 1) * -(-geometry.C // columns) * math.prod(
        -(-extent // side) for extent, side in zip((geometry.N, *_cells(geometry)), box)
    )  # fmt: skip
    steps = math.prod(taps) * -(-geometry.K // DEPTH)
    step = max(pixels * columns * DEPTH / PRODUCTS, 2 * DEPTH * (pixels + columns) / L2_BYTES)
    ending = 2 * pixels * columns / L2_BYTES
    rounds = -(-tiles // (multiprocessors() * resident)) * resident
    return rounds * (steps * step + ending + 300)


def _mean_taps(geometry: Shape, axis: int, side: int) -> float:
    """How many taps along an axis a box of this side reads, on average over boxes and classes."""
    stride, dilation = geometry.stride[axis], geometry.dilation[axis]
    counts = [
        sum(
            any(
                (pixel * stride + part + geometry.padding[axis] - r * dilation) % stride == 0
                and 0
                <= pixel * stride + part + geometry.padding[axis] - r * dilation
                < geometry.out[axis] * stride
                for pixel in range(at, at + side)
            )
            for r in range(geometry.taps[axis])
        )
        for part in range(1 if _classes(geometry) == 1 else stride)
        for at in range(0, _cells(geometry)[axis], side)
    ]
    return sum(counts) / len(counts)


def workspace_bytes(problem: Problem, **config: Any) -> int:
    """Bytes of a channels_last copy of the weight, where it comes with the call and has another
    format.
    """
    weight, is_constant = problem["weight"], problem.is_constant("weight")
    return 0 if is_constant or weight.has("channels_last") else weight.nbytes


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    geometry, config = _geometry(problem), config or configs(problem)[0]
    packs = workspace_bytes(problem) > 0
    held = with_packed(
        constants,
        ("conv2d.channels_last",),
        lambda weight: weight.contiguous(memory_format=torch.channels_last),
    )
    box = (config["box_n"], config["box_h"], config["box_w"])
    (R, S), (sh, sw), columns = geometry.taps, geometry.stride, config["columns"]
    steps = [math.gcd(s, d) for s, d in zip(geometry.stride, geometry.dilation)]
    size = (
        geometry.K, *geometry.out, R, S, *geometry.padding, *geometry.dilation,
        *(d // g for d, g in zip(geometry.dilation, steps)),
    )  # fmt: skip
    across = [-(-n // s) for n, s in zip((geometry.N, *_cells(geometry)), box)]
    blocks = -(-geometry.C // columns)
    classes = _classes(geometry)
    assert classes is not None  # as ``fits`` asks
    total = classes * blocks * math.prod(across)
    tiles = (blocks, across[2], across[1], across[0], total)
    options: dict[str, Any] = {} if config["warps"] == 8 else {"maxnreg": 128}
    grid = min(total, multiprocessors() * (1 if config["warps"] == 8 else 2))
    weight_shape = (geometry.K, R * S, geometry.C)

    def call(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        dy, weight = problem.tensors(held, inputs)
        if packs:
            assert workspace is not None
            copy = workspace[: weight.nbytes].view(weight.dtype).view(geometry.K, R, S, -1)
            weight = copy.copy_(weight.permute(0, 2, 3, 1))
        taps = weight.as_strided(weight_shape, (R * S * weight_shape[2], weight_shape[2], 1))
        pixels = geometry.pixels_last(dy, geometry.K, geometry.out)
        made = geometry.pixels_last(out, geometry.C, geometry.image)
        if classes < sh * sw:
            out.zero_()
        launch(
            _kernel,
            (grid,),
            descriptor(pixels, (*box, DEPTH)),
            descriptor(taps, (DEPTH, 1, columns)),
            *four(
                descriptor(made[:, a::sh, b::sw], (*box, columns))
                for a, b in itertools.product(range(sh), range(sw))
            ),
            size,
            tiles,
            STAGES=config["stages"],
            SH=sh,
            SW=sw,
            R_STEP=sh // steps[0],
            S_STEP=sw // steps[1],
            SWAP=config["swap"],
            REGISTERS=40,
            num_warps=config["warps"],
            **options,
        )
        return out

    return call


@gluon.jit
def _decode(t, tiles, box, SW: gl.constexpr):
    """Tile → (h mod stride, w mod stride, column block, n, h, w): columns fastest, classes last.

    ``box``: a descriptor that moves a tile's pixels.
    """
    columns, nw, nh, nn, _ = tiles
    column = t % columns
    t = t // columns
    w0 = (t % nw) * box.block_type.shape[2]
    t = t // nw
    h0 = (t % nh) * box.block_type.shape[1]
    t = t // nh
    n0 = (t % nn) * box.block_type.shape[0]
    cls = t // nn
    return cls // SW, cls % SW, column, n0, h0, w0


@gluon.jit
def _taps(
    part, at, out_size, taps, pad, dilation, p_step,
    BOX: gl.constexpr, STRIDE: gl.constexpr, R_STEP: gl.constexpr,
):  # fmt: skip
    """Along one axis, the taps by which the pixels [at, at + BOX) of class ``part`` touch dy.

    Tap r of pixel h reads dy at p = (h·STRIDE + part + pad - r·dilation) / STRIDE, where that is
    whole: r = r0, r0 + R_STEP, …, and p falls by p_step each time.
    Returns the first tap, its p at the box's first pixel, and how many there are.
    """
    r0 = part * 0 + R_STEP
    for i in gl.static_range(R_STEP):
        r0 = gl.where((part + pad - i * dilation) % STRIDE == 0, i, r0)
    count = gl.where(r0 < R_STEP, (taps - r0 + R_STEP - 1) // R_STEP, 0)
    p = at + (part + pad - r0 * dilation) // STRIDE
    first = gl.maximum(p - out_size + p_step, 0) // p_step
    last = gl.minimum((p + BOX - 1 + p_step) // p_step, count) - 1
    return r0 + first * R_STEP, p - first * p_step, gl.maximum(last - first + 1, 0)


@gluon.jit
def _copy_in(
    dy, weight, ring, size, tiles, STAGES: gl.constexpr,
    SH: gl.constexpr, SW: gl.constexpr, R_STEP: gl.constexpr, S_STEP: gl.constexpr,
):  # fmt: skip
    """The copying warp: for each tile, each tap and 64 channels of dy and of the weight."""
    K, P, Q, R, S, pad_h, pad_w, dil_h, dil_w, p_step, q_step = size
    a_ring, b_ring, full, empty = ring
    BOX_H: gl.constexpr = dy.block_type.shape[1]
    BOX_W: gl.constexpr = dy.block_type.shape[2]
    DEPTH: gl.constexpr = dy.block_type.shape[3]
    COLUMNS: gl.constexpr = weight.block_type.shape[2]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for t in range(gl.program_id(0), tiles[4], gl.num_programs(0)):
        a, b, column, n0, h0, w0 = _decode(t, tiles, dy, SW)
        r, p, nr = _taps(a, h0, P, R, pad_h, dil_h, p_step, BOX_H, SH, R_STEP)
        s0, q0, ns = _taps(b, w0, Q, S, pad_w, dil_w, q_step, BOX_W, SW, S_STEP)
        s = s0
        q = q0
        j = gl.to_tensor(0)
        k = gl.to_tensor(0)
        for _ in range(nr * ns * ((K + DEPTH - 1) // DEPTH)):
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            mbarrier.expect(ready, dy.block_type.nbytes + weight.block_type.nbytes)
            load_tile(dy, [n0, p, q, k], ready, a_ring.index(stage))
            load_tile(weight, [k, r * S + s, column * COLUMNS], ready, b_ring.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
            k += DEPTH
            done = k >= K
            k = gl.where(done, 0, k)
            j = gl.where(done, j + 1, j)
            s = gl.where(done, s + S_STEP, s)
            q = gl.where(done, q - q_step, q)
            done = j == ns
            j = gl.where(done, 0, j)
            s = gl.where(done, s0, s)
            q = gl.where(done, q0, q)
            r = gl.where(done, r + R_STEP, r)
            p = gl.where(done, p - p_step, p)


@gluon.jit
def _multiply(
    dx, ring, c_tile, size, tiles, STAGES: gl.constexpr,
    SH: gl.constexpr, SW: gl.constexpr, R_STEP: gl.constexpr, S_STEP: gl.constexpr,
    SWAP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The multiplying warps. SWAP: channels are the product's rows, pixels its columns."""
    K, P, Q, R, S, pad_h, pad_w, dil_h, dil_w, p_step, q_step = size
    a_ring, b_ring, full, empty = ring
    BOX_H: gl.constexpr = dx[0].block_type.shape[1]
    BOX_W: gl.constexpr = dx[0].block_type.shape[2]
    COLUMNS: gl.constexpr = dx[0].block_type.shape[3]
    ROWS: gl.constexpr = dx[0].block_type.shape[0] * BOX_H * BOX_W
    DEPTH: gl.constexpr = a_ring.shape[4]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for t in range(gl.program_id(0), tiles[4], gl.num_programs(0)):
        a, b, column, n0, h0, w0 = _decode(t, tiles, dx[0], SW)
        _, _, nr = _taps(a, h0, P, R, pad_h, dil_h, p_step, BOX_H, SH, R_STEP)
        _, _, ns = _taps(b, w0, Q, S, pad_w, dil_w, q_step, BOX_W, SW, S_STEP)
        steps = nr * ns * ((K + DEPTH - 1) // DEPTH)
        shape: gl.constexpr = (COLUMNS, ROWS) if SWAP else (ROWS, COLUMNS)
        acc = gl.zeros(shape, dtype=gl.float32, layout=LAYOUT)
        for i in range(steps):
            mbarrier.wait(full.index(stage), phase)
            pixels = a_ring.index(stage).reshape([ROWS, DEPTH])
            taps = b_ring.index(stage).reshape([DEPTH, COLUMNS])
            if SWAP:
                acc = warpgroup_mma(
                    taps.permute((1, 0)), pixels.permute((1, 0)), acc, is_async=True
                )
            else:
                acc = warpgroup_mma(pixels, taps, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            barrier()  # the product before this one is finished in all warps: its tiles are free
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), pred=i > 0)
            stage, phase = next_stage(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        barrier()
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), pred=steps > 0)
        made = acc.to(c_tile.dtype)
        store_wait(pendings=0)
        barrier()
        c_pixels = c_tile.reshape([ROWS, COLUMNS])
        if SWAP:
            c_pixels.permute((1, 0)).store(made)
        else:
            c_pixels.store(made)
        fence_async_shared()
        barrier()
        for i in gl.static_range(SH * SW):
            if a * SW + b == i:
                store_tile(dx[i], [n0, h0, w0, column * COLUMNS], c_tile)
    store_wait(pendings=0)


@gluon.jit(do_not_specialize=["size", "tiles"])
def _kernel(
    dy, weight, dx0, dx1, dx2, dx3, size, tiles, STAGES: gl.constexpr,
    SH: gl.constexpr, SW: gl.constexpr, R_STEP: gl.constexpr, S_STEP: gl.constexpr,
    SWAP: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    dx = (dx0, dx1, dx2, dx3)  # the classes of pixels
    BOX_N: gl.constexpr = dy.block_type.shape[0]
    BOX_H: gl.constexpr = dy.block_type.shape[1]
    BOX_W: gl.constexpr = dy.block_type.shape[2]
    DEPTH: gl.constexpr = dy.block_type.shape[3]
    COLUMNS: gl.constexpr = weight.block_type.shape[2]
    ROWS: gl.constexpr = BOX_N * BOX_H * BOX_W
    high: gl.constexpr = COLUMNS if SWAP else ROWS
    wide: gl.constexpr = ROWS if SWAP else COLUMNS
    # warps stand side by side where 16 rows for each would be more rows than there are
    beside: gl.constexpr = 1 if 16 * num_warps <= high else 16 * num_warps // high
    each: gl.constexpr = wide // beside if wide // beside <= 256 else 256
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps // beside, beside], instr_shape=[16, each, 16]
    )
    a_ring = gl.allocate_shared_memory(dy.dtype, [STAGES, BOX_N, BOX_H, BOX_W, DEPTH], dy.layout)
    b_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, DEPTH, 1, COLUMNS], weight.layout)
    c_tile = gl.allocate_shared_memory(dx[0].dtype, dx[0].block_type.shape, dx[0].layout)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 1)
    fence_async_shared()
    barrier()
    ring = (a_ring, b_ring, full, empty)
    gl.warp_specialize([
        (_multiply, (dx, ring, c_tile, size, tiles, STAGES, SH, SW, R_STEP, S_STEP, SWAP, LAYOUT)),
        (_copy_in, (dy, weight, ring, size, tiles, STAGES, SH, SW, R_STEP, S_STEP)),
    ], [1], [REGISTERS])  # fmt: skip
