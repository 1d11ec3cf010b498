"""Direct convolution of images with few channels on Hopper: the first layer of a network.

Under one row of the filter, an output pixel reads one run of neighbouring values: S·C of them in
NHWC, S in NCHW. The runs of all rows, each padded to 16 bytes, are a line of the left matrix. No
such matrix is ever stored: every thread loads the four-byte words that its registers must hold for
WGMMA, straight from the image (the 7×7 stem reads each value 12 times, from the first cache). The
filters lie in shared memory, a block works on consecutive pixels, so that rows stay in its cache,
and results leave through TMA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tessella.core.integers import round_up
from tessella.device.hopper import (
    DTYPES,
    barrier,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    store_wait,
    wait_for_dependencies,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tessella.device.launch import launch
from tessella.device.machine import ALIGNMENT, multiprocessors
from tessella.device.packing import with_packed
from tessella.kernels.catalog import Call
from tessella.kernels.conv import tiles
from tessella.kernels.conv.tiles import Geometry
from tessella.kernels.epilogue.gluon_device import finish
from tessella.operations.problem import Problem

AT_ONCE = gl.constexpr(12)  # chunks whose values lie in registers, four a thread each
MOST_CHUNKS = 40  # their filters must fit the shared memory, and their code the instruction cache


class Layer(NamedTuple):
    """The convolution, as a constant of the compiler; pairs are (rows, columns)."""

    C: int
    K: int
    IMAGE: tuple[int, int]
    OUT: tuple[int, int]
    R: int
    STRIDE: tuple[int, int]
    PADDING: tuple[int, int]
    DILATION: int


class Runs(NamedTuple):
    """How the values that a pixel reads are laid out as a line of the left matrix.

    A run is stored in GRANULES of 16 bytes each; two granules are the depth of one WGMMA. A
    constant of the compiler.

    Attributes:
        UNIT: values between neighbouring columns of the image.
        COUNT, LENGTH: runs of a pixel, and the values of one.
        SHIFT: zeros before a run, so that words of it are aligned in memory.
        GRANULES: of one run.
        VALUES: of one granule.
        CHUNKS: WGMMAs of one tile of filters.
    """

    UNIT: int
    COUNT: int
    LENGTH: int
    SHIFT: int
    GRANULES: int
    VALUES: int
    CHUNKS: int


def runs_of(problem: Problem) -> Runs:
    geometry = Geometry.of(problem)
    size = problem["input"].itemsize
    last = problem["input"].has("channels_last")
    channels = geometry.channels
    unit, rows = (channels, 1) if last else (1, channels)
    length = geometry.filter[2] * unit
    # the largest word whose parts lie within one line of the image, wherever a pixel begins
    word = math.gcd(4 // size, geometry.stride[2] * unit, geometry.image[2] * unit)
    shift = -geometry.padding[2] * unit % word
    values = 16 // size
    count, granules = geometry.filter[1] * rows, -(-(shift + length) // values)
    return Runs(
        UNIT=unit,
        COUNT=count,
        LENGTH=length,
        SHIFT=shift,
        GRANULES=granules,
        VALUES=values,
        CHUNKS=-(-count * granules // 2),
    )


def fits(problem: Problem) -> str | None:
    refused = tiles.refusal(problem, ("float16", "bfloat16", "int8", "float32"))
    if refused is not None:
        return refused
    x, weight, residual = problem["input"], problem["weight"], problem.epilogue.residual
    if x.dtype == "float32" and problem.math != "tf32":
        return "multiplies float32 on tensor cores, as tf32"
    if problem.attrs["groups"] != 1:
        return "one group only"
    if "strided" in (x.format, problem.output.format):
        return "a view of any strides has no runs"
    if problem.attrs["dilation"][1] != 1 and weight.shape[3] != 1:
        return "columns of a dilated filter are no run"
    if runs_of(problem).CHUNKS > MOST_CHUNKS:
        return f"for few channels: a filter of at most {32 * MOST_CHUNKS} bytes"
    if residual is not None and residual.format != problem.output.format:
        return "the residual must have the result's format"
    if any(math.prod(t.shape) > tiles.LARGEST_INT32 for t in (x, problem.output)):
        return "more than 2³¹ values"
    return None


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    filters = problem["weight"].shape[0]
    # the values of a second round take the registers of a wide tile's sums
    widest = 64 if AT_ONCE.value < runs_of(problem).CHUNKS else 128
    widths = [w for w in (16, 32, 64, 128) if w == 16 or (w < 2 * filters and w <= widest)]
    chosen = [
        {"filters": width, "warps": warps, "blocks": blocks}
        for width in widths[::-1][:2]
        for warps, blocks in ((4, 4), (4, 5), (8, 2), (4, 3))
    ]
    return tuple(chosen)


def workspace_bytes(problem: Problem, **config: Any) -> int:
    if problem.is_constant("weight"):
        return 0
    filters: int = (config or configs(problem)[0])["filters"]
    return runs_of(problem).CHUNKS * round_up(problem["weight"].shape[0], filters) * 32


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    chosen = config or configs(problem)[0]
    geometry, runs = Geometry.of(problem), runs_of(problem)
    filters, warps = chosen["filters"], chosen["warps"]
    columns = triton.cdiv(geometry.filters, filters)
    pixels = 16 * warps
    count = triton.cdiv(geometry.pixels, pixels)
    across = max(1, min(count, multiprocessors() * chosen["blocks"] // columns))
    each = triton.cdiv(count, across)
    last = problem.output.has("channels_last")
    size = problem.output.itemsize
    bulk = last and geometry.filters * size % 16 == 0 and problem.output.dtype != "int32"
    alpha, (activation, beta) = float(problem.epilogue.alpha), problem.epilogue.on_device
    held = with_packed(
        constants,
        ("conv.direct_sm90", repr(runs), filters),
        lambda weight: _pack(weight, runs, columns * filters, None),
    )

    def convolve(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out.numel() == 0:
            return out
        x, weight, epilogue = problem.product_operands(held, inputs)
        bias, residual, scale = epilogue.bias, epilogue.residual, epilogue.scale
        if 1 not in constants:
            weight = _pack(weight, runs, columns * filters, workspace)
        by_tma = bulk and out.data_ptr() % ALIGNMENT == 0
        y = out
        if by_tma:
            rows = out.permute(0, 2, 3, 1).reshape(-1, geometry.filters)
            y = descriptor(rows, (pixels, filters))
        launch(
            direct,
            (triton.cdiv(count, each), columns),
            x,
            descriptor(weight, (filters, 2 * runs.VALUES)),
            y,
            (bias, residual, scale, alpha, float(beta), problem.gamma),
            geometry.pixels,
            count,
            each,
            columns * filters,
            LAYER=Layer(
                C=geometry.channels,
                K=geometry.filters,
                IMAGE=geometry.image[1:],
                OUT=geometry.out[1:],
                R=geometry.filter[1],
                STRIDE=geometry.stride[1:],
                PADDING=geometry.padding[1:],
                DILATION=geometry.dilation[1],
            ),
            RUN=runs,
            ACTIVATION=activation,
            DTYPE=DTYPES[out.dtype],
            CONSTANT=problem.is_constant("weight"),
            launch_pdl=True,
            BULK=by_tma,
            LAST=last,
            PIXELS=pixels,
            FILTERS=filters,
            num_warps=warps,
        )
        return out

    return convolve


def _pack(
    weight: torch.Tensor, runs: Runs, filters: int, workspace: torch.Tensor | None
) -> torch.Tensor:
    """The filters as [chunks · filters, depth of a WGMMA], zero where nothing is read."""
    shape = (runs.CHUNKS * filters, 2 * runs.VALUES)
    if workspace is None:
        made = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    else:
        nbytes = math.prod(shape) * weight.itemsize
        made = workspace[:nbytes].view(weight.dtype).view(shape)
    k, c, r, _ = weight.shape
    launch(
        pack_runs,
        (triton.cdiv(made.numel(), 1024),),
        weight,
        made,
        made.numel(),
        k,
        filters,
        *weight.stride(),
        C=c,
        R=r,
        RUN=runs,
        SIZE=1024,
        num_warps=4,
    )
    return made


@triton.jit
def pack_runs(weight, made, count, k_end, filters, k_stride, c_stride, r_stride, s_stride,
              C: tl.constexpr, R: tl.constexpr, RUN: tl.constexpr,
              SIZE: tl.constexpr):  # fmt: skip
    VALUES: tl.constexpr = RUN.VALUES
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = i < count
    k = i // (2 * VALUES) % filters
    granule = i // (2 * VALUES) // filters * 2 + i % (2 * VALUES) // VALUES
    run = granule // RUN.GRANULES
    at = granule % RUN.GRANULES * VALUES + i % VALUES - RUN.SHIFT
    if RUN.UNIT == C:
        r, s, c = run, at // C, at % C
    else:
        r, s, c = run % R, at, run // R
    used = inside & (k < k_end) & (run < RUN.COUNT) & (at >= 0) & (at < RUN.LENGTH)
    offset = k * k_stride + c * c_stride + r * r_stride + s * s_stride
    tl.store(made + i, tl.load(weight + offset, mask=used, other=0.0), mask=inside)


@gluon.jit
def load_chunk(
    x, first, row, column, inside, i: gl.constexpr, LAYER: gl.constexpr, RUN: gl.constexpr,
    LEFT: gl.constexpr,
):  # fmt: skip
    """Two granules of every pixel's line, in the registers from which WGMMA multiplies."""
    VALUES: gl.constexpr = RUN.VALUES
    IMAGE: gl.constexpr = LAYER.IMAGE
    depth = 2 * VALUES * i + gl.arange(0, 2 * VALUES, layout=gl.SliceLayout(0, LEFT))
    granule = depth // VALUES
    run = granule // RUN.GRANULES
    at = granule % RUN.GRANULES * VALUES + depth % VALUES
    if RUN.UNIT == LAYER.C:
        dr = run * LAYER.DILATION
        offset = dr * (IMAGE[1] * LAYER.C) + at
    else:
        dr = run % LAYER.R * LAYER.DILATION
        offset = run // LAYER.R * (IMAGE[0] * IMAGE[1]) + dr * IMAGE[1] + at
    r = row.expand_dims(1) + dr.expand_dims(0)
    e = column.expand_dims(1) + at.expand_dims(0)
    valid = inside.expand_dims(1) & (run < RUN.COUNT).expand_dims(0)
    valid = valid & (r >= 0) & (r < IMAGE[0]) & (e >= 0) & (e < IMAGE[1] * RUN.UNIT)
    values = gl.load(x + (first.expand_dims(1) + offset.expand_dims(0)), mask=valid, other=0.0)
    if RUN.SHIFT > 0 or RUN.LENGTH % VALUES != 0:
        # what lies beside the run is no part of the sum, and may be infinite
        used = ((at >= RUN.SHIFT) & (at < RUN.SHIFT + RUN.LENGTH)).expand_dims(0)
        values = gl.where(used, values, gl.zeros_like(values))
    return values


@gluon.jit
def direct(
    x, w, y, epilogue, pixels, tiles, each, filters,
    LAYER: gl.constexpr, RUN: gl.constexpr, ACTIVATION: gl.constexpr, DTYPE: gl.constexpr,
    BULK: gl.constexpr, LAST: gl.constexpr, PIXELS: gl.constexpr, FILTERS: gl.constexpr,
    CONSTANT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """A block: ``each`` consecutive tiles of PIXELS pixels, and FILTERS of the filters."""
    CHUNKS: gl.constexpr = RUN.CHUNKS
    bias, residual, scale, alpha, beta, gamma = epilogue
    C: gl.constexpr = LAYER.C
    IMAGE: gl.constexpr = LAYER.IMAGE
    OUT: gl.constexpr = LAYER.OUT
    BITS: gl.constexpr = x.dtype.element_ty.primitive_bitwidth
    SUM: gl.constexpr = gl.int32 if BITS == 8 else gl.float32
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, FILTERS, 256 // BITS]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=32 // BITS)
    w_s = gl.allocate_shared_memory(w.dtype, [CHUNKS] + w.block_type.shape, w.layout)  # noqa: RUF005
    if BULK:
        y_s = gl.allocate_shared_memory(y.dtype, y.block_type.shape, y.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    fence_async_shared()
    barrier()
    if not CONSTANT:  # the kernel before this one packs the filters
        wait_for_dependencies()
    k0 = gl.program_id(1) * FILTERS
    mbarrier.expect(ready, CHUNKS * w.block_type.nbytes)
    for i in gl.static_range(CHUNKS):
        load_tile(w, [i * filters + k0, 0], ready, w_s.index(i))
    if CONSTANT:
        wait_for_dependencies()
    k = k0 + gl.arange(0, FILTERS, layout=gl.SliceLayout(0, ACC))
    biases = None
    if bias is not None:
        biases = gl.load(bias + k, mask=k < LAYER.K, other=0.0).to(gl.float32).expand_dims(0)
    scales = None
    if scale is not None:
        scales = gl.load(scale + k, mask=k < LAYER.K, other=0.0).to(gl.float32).expand_dims(0)
    mbarrier.wait(ready, 0)
    barrier()
    mbarrier.invalidate(ready)  # its place is free for what results exchange
    for t in range(gl.program_id(0) * each, gl.minimum(gl.program_id(0) * each + each, tiles)):
        m = t * PIXELS + gl.arange(0, PIXELS, layout=gl.SliceLayout(1, LEFT))
        n = m // (OUT[0] * OUT[1])
        row = m // OUT[1] % OUT[0] * LAYER.STRIDE[0] - LAYER.PADDING[0]
        column = m % OUT[1] * (LAYER.STRIDE[1] * RUN.UNIT) - (
            LAYER.PADDING[1] * RUN.UNIT + RUN.SHIFT
        )
        if RUN.UNIT == C:
            first = n * (IMAGE[0] * IMAGE[1] * C) + row * (IMAGE[1] * C) + column
        else:
            first = n * (IMAGE[0] * IMAGE[1] * C) + row * IMAGE[1] + column
        acc = gl.zeros((PIXELS, FILTERS), dtype=SUM, layout=ACC)
        for begin in gl.static_range(0, CHUNKS, AT_ONCE):
            values = ()
            for i in gl.static_range(begin, min(begin + AT_ONCE, CHUNKS)):
                values = values + (  # noqa: RUF005
                    load_chunk(x, first, row, column, m < pixels, i, LAYER, RUN, LEFT),
                )
            for i in gl.static_range(begin, min(begin + AT_ONCE, CHUNKS)):
                acc = warpgroup_mma(
                    values[i - begin], w_s.index(i).permute((1, 0)), acc, is_async=True
                )
            if BITS > 8:  # the values too: their registers are read until then
                acc = warpgroup_mma_wait(0, deps=(acc,) + values)[0]  # noqa: RUF005
            else:  # Triton cannot name 8-bit ones here
                acc = warpgroup_mma_wait(0, deps=(acc,))
        at_m = (t * PIXELS + gl.arange(0, PIXELS, layout=gl.SliceLayout(1, ACC))).expand_dims(1)
        at_k = k.expand_dims(0)
        residuals = None
        if residual is not None:
            offset = at(at_m, at_k, LAYER.K, OUT, LAST)
            inside = (at_m < pixels) & (at_k < LAYER.K)
            residuals = gl.load(residual + offset, mask=inside, other=0.0)
        made = finish(acc, scales, biases, residuals, alpha, beta, gamma, ACTIVATION, DTYPE)
        if BULK:
            store_wait(0)
            y_s.store(made)
            fence_async_shared()
            store_tile(y, [t * PIXELS, k0], y_s)
        else:
            offset = at(at_m, at_k, LAYER.K, OUT, LAST)
            gl.store(y + offset, made, mask=(at_m < pixels) & (at_k < LAYER.K))
    if BULK:
        store_wait(0)


@gluon.jit
def at(m, k, K: gl.constexpr, OUT: gl.constexpr, LAST: gl.constexpr):
    """The offset of pixel m and filter k in a dense result."""
    PLANE: gl.constexpr = OUT[0] * OUT[1]
    return m * K + k if LAST else m // PLANE * (PLANE * K) + k * PLANE + m % PLANE
