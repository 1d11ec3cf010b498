"""Gradient of a convolution by its weight, on Hopper: dy [N, P, Q, K], x [N, H, W, C] → dw.

A matrix product over all pixels: channels of dy are its rows, (tap, channels of x) its columns,
both read as they lie. The work (tiles of dw × boxes of pixels) is cut into equal parts, one a
multiprocessor; what each finds of a tile goes to the workspace in float32, and a second kernel adds
the parts in order: the same sums in every run.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.device.hopper import (
    barrier,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tessella.device.launch import launch
from tessella.device.machine import multiprocessors
from tessella.kernels.catalog import Call, Config
from tessella.kernels.conv.backward import (
    CACHE_BYTES,
    L2_BYTES,
    MEMORY_BYTES,
    PRODUCTS,
    SHARED_BYTES,
    boxes,
    four,
    refusal,
)
from tessella.kernels.conv.hopper.implicit_gemm_tiles import Shape
from tessella.kernels.shared.ring_device import barriers, next_stage, stage_before
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    dy, x = problem["grad"], problem["input"]
    if problem.output.dtype not in (x.dtype, "float32"):
        return f"makes {x.dtype} or float32, not {problem.output.dtype}"
    if problem.output.format == "strided":
        return "makes contiguous or channels_last"
    return refusal(problem, x, problem.output, dy)


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles by estimated time. The first one deals work out evenly, which has been measured; splits
    of the pixels that are alike for all tiles have only been estimated.
    """
    geometry = _geometry(problem)
    width = _width(geometry)
    panels = _panels(geometry)
    found = []
    for rows, columns, pixels, warps in _TILES:
        if rows > 64 and rows >= 2 * geometry.K:
            continue
        if columns > 64 and columns >= 2 * panels * width:
            continue
        for box in boxes(geometry.N, geometry.out, pixels)[:3]:
            resident = 2 if warps == 4 else 1
            stages = min(SHARED_BYTES // resident // (2 * pixels * (rows + columns)), 8)
            for splits in SPLITS:
                config = {
                    "box_n": box[0], "box_h": box[1], "box_w": box[2], "rows": rows,
                    "panels": columns // width, "stages": stages, "warps": warps,
                    "splits": splits,
                }  # fmt: skip
                tile = (rows, columns)
                found.append((_clocks(geometry, config), tile, box[0], config))
    found.sort(key=lambda entry: entry[0])
    best: list[Config] = []
    seen: Counter[Any] = Counter()
    for _, tile, images, config in found:  # the model is rough: of each tile a few, and 0 splits
        kind = "even" if config["splits"] == 0 else "split"
        seen[tile, kind] += 1
        seen[tile, images, kind] += 1
        if seen[tile, kind] <= (1 if kind == "even" else 2) and seen[tile, images, kind] <= 1:
            best.append(config)
    measured = next(config for config in best if config["splits"] == 0)
    best.remove(measured)
    return (measured, *best[:11])


# into how many parts the pixels of every tile are cut; 0: all work is dealt out evenly
SPLITS = (0, *range(1, 17), 18, 20, 22, 24, 26, 28, 30, 33, 36, 40, 44, 48, 52, 60, 66, 88, 132)


PARTS_BYTES = 4000  # of the parts that all multiprocessors add in one clock

# channels of dy, columns of (tap, channel of x), pixels in a step, warps that multiply
_TILES = (
    (128, 256, 64, 8),
    (256, 128, 64, 8),
    (128, 128, 64, 8),
    (64, 256, 64, 8),
    (128, 64, 64, 4),
    (64, 128, 64, 4),
    (64, 64, 64, 4),
    (64, 64, 128, 4),
)


def _geometry(problem: Problem) -> Shape:
    return Shape.of(problem, problem["input"], problem.output, problem["grad"])


def _width(geometry: Shape) -> int:
    """Channels of x in one panel of columns: as many as one swizzled row can hold, or all."""
    return 64 if geometry.C > 32 else 32 if geometry.C > 16 else 16


def _panels(geometry: Shape) -> int:
    return math.prod(geometry.taps) * -(-geometry.C // _width(geometry))


def _work(geometry: Shape, config: Config) -> tuple[int, int, int, list[int]]:
    """(blocks, tiles, tiles along the rows, boxes along each axis)."""
    box = (config["box_n"], config["box_h"], config["box_w"])
    across = [-(-n // s) for n, s in zip((geometry.N, *geometry.out), box)]
    rows = -(-geometry.K // config["rows"])
    tiles = rows * -(-_panels(geometry) // config["panels"])
    boxes = math.prod(across)
    even = multiprocessors() * (2 if config["warps"] == 4 else 1)
    blocks = tiles * min(config["splits"], boxes) or min(tiles * boxes, even)
    return blocks, tiles, rows, across


def _clocks(geometry: Shape, config: Config) -> float:
    """About how long it takes: products or loads, whichever is slower, and then the parts."""
    blocks, tiles, row_tiles, across = _work(geometry, config)
    rows, columns = config["rows"], config["panels"] * _width(geometry)
    pixels, units = config["box_n"] * config["box_h"] * config["box_w"], math.prod(across)
    resident = 2 if config["warps"] == 4 else 1
    step = max(rows * columns * pixels / PRODUCTS, 2 * pixels * (rows + columns) / L2_BYTES)
    rounds = -(-blocks // (multiprocessors() * resident))
    longest = -(-tiles * units // blocks)
    x = 2 * geometry.N * math.prod(geometry.image) * geometry.C
    dy = 2 * geometry.N * math.prod(geometry.out) * geometry.K
    if config["splits"] == 0 and x + dy > CACHE_BYTES:  # tiles read the same pixels far apart
        x, dy = x * row_tiles, dy * (tiles // row_tiles)
    share = min(resident, max(1.0, blocks / multiprocessors()))
    small = 1.2 if config["warps"] == 4 else 1.0  # measured: four warps keep the units less busy
    main: float = max(rounds * (longest * step * share * small + 1500), (x + dy) / MEMORY_BYTES)
    parts: int = 4 * rows * columns * (blocks if config["splits"] else blocks + tiles)
    return main + parts / min(blocks, multiprocessors()) / L2_BYTES + parts / PARTS_BYTES


def workspace_bytes(problem: Problem, **config: Any) -> int:
    """The parts in float32: one a block, or, dealt out evenly, one more for each other tile."""
    geometry, config = _geometry(problem), config or configs(problem)[0]
    blocks, tiles, _, _ = _work(geometry, config)
    parts = blocks if config["splits"] else blocks + tiles - 1
    rows: int = config["rows"] * config["panels"]
    return 4 * parts * rows * _width(geometry)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    geometry, config = _geometry(problem), config or configs(problem)[0]
    box = (config["box_n"], config["box_h"], config["box_w"])
    (R, S), (sh, sw), width = geometry.taps, geometry.stride, _width(geometry)
    blocks, tiles, rows, across = _work(geometry, config)
    count, columns = math.prod(across), config["panels"] * width
    each, more = divmod(tiles * count, blocks)
    c_panels = -(-geometry.C // width)
    size = (S, *geometry.padding, *geometry.dilation)
    splits = min(config["splits"], count)
    work = (tiles * count, count, splits, across[2], across[1], rows, _panels(geometry), c_panels)
    options: dict[str, Any] = {} if config["warps"] == 8 else {"maxnreg": 128}
    # a tile's parts: as many as blocks that can share it
    together = min(triton.next_power_of_2(splits or -(-count // max(each, 1)) + 1), 32)
    chunk = min(max(1, 2048 // (together * width)), config["rows"])

    def call(*inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
        dy, x = problem.tensors(constants, inputs)
        images = geometry.pixels_last(x, geometry.C, geometry.image)
        parts = workspace.view(torch.float32)
        launch(
            _kernel,
            (blocks,),
            descriptor(geometry.pixels_last(dy, geometry.K, geometry.out), (*box, config["rows"])),
            *four(
                descriptor(images[:, a::sh, b::sw], (*box, width))
                for a, b in itertools.product(range(sh), range(sw))
            ),
            parts,
            size,
            work,
            STAGES=config["stages"],
            PANELS=config["panels"],
            SH=sh,
            SW=sw,
            REGISTERS=40,
            num_warps=config["warps"],
            **options,
        )
        launch(
            _add_parts,
            (config["rows"] // chunk, config["panels"], tiles),
            parts,
            out,
            geometry.K,
            geometry.C,
            R * S,
            count,
            splits,
            rows,
            c_panels,
            each,
            more,
            *_strides(out),
            ROWS=config["rows"],
            COLUMNS=columns,
            WIDTH=width,
            PARTS=together,
            CHUNK=chunk,
        )
        return out

    return call


def _strides(weight: torch.Tensor) -> tuple[int, int, int]:
    """Strides of output channels, input channels and taps, in a weight of either format."""
    channels, *taps = weight.shape[1:]
    depth = channels * math.prod(taps)
    return (depth, math.prod(taps), 1) if weight.is_contiguous() else (depth, 1, channels)


@gluon.jit
def _part(total, boxes, splits):
    """The units of work [first, last) of this block; a unit is a box of pixels of a tile.

    With splits, blocks that run together read the same pixels for different tiles; without, all
    units are dealt out evenly, the first blocks get one more.
    """
    i = gl.program_id(0)
    each = total // gl.num_programs(0)
    more = total % gl.num_programs(0)
    first = i * each + gl.minimum(i, more)
    last = first + each + gl.where(i < more, 1, 0)
    if splits > 0:
        tiles = total // boxes
        split = i // tiles
        start = (i % tiles) * boxes
        each = boxes // splits
        more = boxes % splits
        first = start + split * each + gl.minimum(split, more)
        last = first + each + gl.where(split < more, 1, 0)
    return first, last


@gluon.jit
def _copy_in(
    dy, x, ring, size, work, STAGES: gl.constexpr, PANELS: gl.constexpr,
    SH: gl.constexpr, SW: gl.constexpr,
):  # fmt: skip
    """The copying warp: for each unit, a box of dy and the boxes of x under PANELS columns."""
    a_ring, b_ring, full, empty = ring
    S, pad_h, pad_w, dil_h, dil_w = size
    total, boxes, splits, nw, nh, rows, panels, c_panels = work
    BOX_N: gl.constexpr = dy.block_type.shape[0]
    BOX_H: gl.constexpr = dy.block_type.shape[1]
    BOX_W: gl.constexpr = dy.block_type.shape[2]
    ROWS: gl.constexpr = dy.block_type.shape[3]
    WIDTH: gl.constexpr = x[0].block_type.shape[3]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    unit, end = _part(total, boxes, splits)
    for tile in range(unit // boxes, (end - 1) // boxes + 1):
        panel0 = (tile // rows) * PANELS
        row0 = (tile % rows) * ROWS
        box = gl.maximum(unit - tile * boxes, 0)
        for i in range(box, gl.minimum(end - tile * boxes, boxes)):
            q = (i % nw) * BOX_W
            p = ((i // nw) % nh) * BOX_H
            n = (i // (nw * nh)) * BOX_N
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            for j in gl.static_range(1, PANELS + 1):
                here = (panel0 + j == panels) if j < PANELS else (panel0 + j <= panels)
                mbarrier.expect(ready, dy.block_type.nbytes + j * x[0].block_type.nbytes, pred=here)
            load_tile(dy, [n, p, q, row0], ready, a_ring.index(stage))
            for j in gl.static_range(PANELS):
                panel = panel0 + j
                here = panel < panels
                tap = panel // c_panels
                c = (panel % c_panels) * WIDTH
                h = (tap // S) * dil_h + (SH - 1) * pad_h
                w = (tap % S) * dil_w + (SW - 1) * pad_w
                view = (h % SH) * SW + w % SW
                at = [n, p + h // SH - pad_h, q + w // SW - pad_w, c]
                for v in gl.static_range(SH * SW):
                    load_tile(
                        x[v], at, ready, b_ring.index(stage * PANELS + j),
                        pred=here & (view == v),
                    )  # fmt: skip
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _multiply(parts, ring, work, STAGES: gl.constexpr, LAYOUT: gl.constexpr):
    """The multiplying warps: the sum of each tile of this block goes to its slot of the parts."""
    a_ring, b_ring, full, empty = ring
    total, boxes, splits, _, _, _, _, _ = work
    ROWS: gl.constexpr = a_ring.shape[4]
    PIXELS: gl.constexpr = b_ring.shape[1]
    COLUMNS: gl.constexpr = b_ring.shape[2]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)).expand_dims(1)
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    unit, end = _part(total, boxes, splits)
    for tile in range(unit // boxes, (end - 1) // boxes + 1):
        acc = gl.zeros((ROWS, COLUMNS), dtype=gl.float32, layout=LAYOUT)
        first = gl.maximum(unit - tile * boxes, 0)
        for i in range(first, gl.minimum(end - tile * boxes, boxes)):
            mbarrier.wait(full.index(stage), phase)
            a = a_ring.index(stage).reshape([PIXELS, ROWS])
            acc = warpgroup_mma(a.permute((1, 0)), b_ring.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            barrier()  # the product before this one is finished in all warps: its tiles are free
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), pred=i > first)
            stage, phase = next_stage(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        barrier()
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)))
        # without splits block and tile only grow along the work: their sum names a slot once
        slot = (gl.program_id(0) + gl.where(splits > 0, 0, tile)).to(gl.int64)
        gl.store(parts + slot * (ROWS * COLUMNS) + (row * COLUMNS + column), acc)


@gluon.jit(do_not_specialize=["size", "work"])
def _kernel(
    dy, x0, x1, x2, x3, parts, size, work, STAGES: gl.constexpr, PANELS: gl.constexpr,
    SH: gl.constexpr, SW: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    x = (x0, x1, x2, x3)  # the pixels (h mod SH, w mod SW)
    BOX_N: gl.constexpr = x[0].block_type.shape[0]
    BOX_H: gl.constexpr = x[0].block_type.shape[1]
    BOX_W: gl.constexpr = x[0].block_type.shape[2]
    WIDTH: gl.constexpr = x[0].block_type.shape[3]
    PIXELS: gl.constexpr = BOX_N * BOX_H * BOX_W
    ROWS: gl.constexpr = dy.block_type.shape[3]
    COLUMNS: gl.constexpr = PANELS * WIDTH
    beside: gl.constexpr = 1 if 16 * num_warps <= ROWS else 16 * num_warps // ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[num_warps // beside, beside],
        instr_shape=[16, COLUMNS // beside, 16],
    )
    a_ring = gl.allocate_shared_memory(dy.dtype, [STAGES, BOX_N, BOX_H, BOX_W, ROWS], dy.layout)
    b_ring = gl.allocate_shared_memory(
        x[0].dtype, [STAGES * PANELS, BOX_N, BOX_H, BOX_W, WIDTH], x[0].layout
    )
    # panels lie one behind the other, as the columns of a wider tile do
    wide: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=2 * WIDTH, element_bitwidth=16, rank=2
    )
    b_wide = reinterpret(b_ring, x[0].dtype, [STAGES, PIXELS, COLUMNS], wide)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 1)
    fence_async_shared()
    barrier()
    gl.warp_specialize([
        (_multiply, (parts, (a_ring, b_wide, full, empty), work, STAGES, LAYOUT)),
        (_copy_in, (dy, x, (a_ring, b_ring, full, empty), size, work, STAGES, PANELS, SH, SW)),
    ], [1], [REGISTERS])  # fmt: skip


@triton.jit
def _block_of(unit, each, more):
    """The block whose part of the work holds ``unit``."""
    large = more * (each + 1)
    return tl.where(unit < large, unit // (each + 1), more + (unit - large) // tl.maximum(each, 1))


@triton.jit(do_not_specialize=["filters", "channels", "taps", "boxes", "splits", "rows",
                               "c_panels", "each", "more", "stride_k", "stride_tap"])  # fmt: skip
def _add_parts(
    parts, out, filters, channels, taps, boxes, splits, rows, c_panels, each, more, stride_k,
    stride_c, stride_tap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """dw from the parts of some rows of one panel, added in the order of their pixels."""
    tile = tl.program_id(2)
    tiles = tl.num_programs(2)
    panel = tl.program_id(1)
    element = tl.arange(0, CHUNK * WIDTH)
    row = tl.program_id(0) * CHUNK + element // WIDTH
    column = element % WIDTH
    at = parts + row * COLUMNS + (panel * WIDTH + column)
    if splits > 0:
        first = tile
        count = splits
        step = tiles
    else:
        block = _block_of(tile * boxes, each, more)
        first = block + tile
        count = _block_of(tile * boxes + boxes - 1, each, more) - block + 1
        step = 1
    part = tl.arange(0, PARTS)
    total = tl.zeros((CHUNK * WIDTH,), dtype=tl.float32)
    for i in range(0, count, PARTS):
        slot = (first + (i + part) * step).to(tl.int64) * (ROWS * COLUMNS)
        here = (i + part < count)[:, None]
        total += tl.sum(tl.load(at[None, :] + slot[:, None], mask=here, other=0.0), axis=0)
    panel += (tile // rows) * (COLUMNS // WIDTH)
    tap = panel // c_panels
    c = (panel % c_panels) * WIDTH + column
    k = (tile % rows) * ROWS + row
    here = (k < filters) & (c < tl.where(tap < taps, channels, 0))
    tl.store(out + k * stride_k + c * stride_c + tap * stride_tap, total, mask=here)
