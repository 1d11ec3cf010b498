"""Convolution forward on Hopper: an implicit matrix product over NHWC, fed by TMA.

The output is cut into tiles of pixels × channels; the sum runs over filter taps and input channels
(``implicit_gemm_device``). A 1 × 1 filter is a plain matrix product over all pixels. Where the
tiles are too few, the sum is cut too, and a second kernel adds the parts in order: the result does
not depend on who finished first. ``implicit_gemm_tiles`` chooses how to cut; ``grouped`` says how
groups of channels are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.dtype import FLOATS
from tessella.core.integers import round_up
from tessella.device.hopper import DTYPES, descriptor, gl
from tessella.device.launch import launch
from tessella.device.machine import multiprocessors
from tessella.device.packing import packed
from tessella.kernels.catalog import Call
from tessella.kernels.conv.hopper import grouped
from tessella.kernels.conv.hopper.implicit_gemm_device import Ending, Product, convolve
from tessella.kernels.conv.hopper.implicit_gemm_tiles import (
    EIGHT_BITS,
    Shape,
    channels_read,
    configs,
    promotes,
    shape_of,
    tile_counts,
)
from tessella.kernels.conv.hopper.walk_device import Ring, Tile
from tessella.kernels.epilogue.int8 import folded, refusal, small_sums
from tessella.kernels.epilogue.sixteen_bit import in_sixteen_bits
from tessella.kernels.epilogue.triton_device import cast, finish
from tessella.operations.epilogue import Epilogue
from tessella.operations.problem import Problem

Tensor = torch.Tensor


REGISTERS = {1: 168, 2: 128}  # of a thread at first, by blocks on a multiprocessor
OUTPUTS = {  # element type of x → of the result
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "float32": ("float32",),
    "int8": ("int8", "int32", *FLOATS),
    "float8_e4m3fn": ("float8_e4m3fn", *FLOATS),
    "float8_e5m2": ("float8_e5m2", *FLOATS),
}


def fits(problem: Problem) -> str | None:
    x, weight, output = problem["input"], problem["weight"], problem.output
    epilogue, residual = problem.epilogue, problem.epilogue.residual
    if len(x.shape) not in (4, 5):
        return f"takes [N, C, H, W] or [N, C, D, H, W], not {len(x.shape)} axes"
    if len(x.shape) == 5 and (reason := _turned_depth(problem)):
        return reason
    if problem.attrs["groups"] != 1:
        if weight.shape[1] == 1:
            return "of one channel a group: 15 of 16 products would be with zeros"
        if not problem.is_constant("weight"):
            return "the weight of several groups must be a constant: it is packed once"
    if any(s not in (1, 2) for s in problem.attrs["stride"]):
        return f"strides of 1 and 2 only, not {tuple(problem.attrs['stride'])}"
    if output.dtype not in OUTPUTS.get(x.dtype, ()):
        return f"does not make {output.dtype} of {x.dtype}"
    if weight.dtype != x.dtype:
        return f"weight must be {x.dtype} like x, not {weight.dtype}"
    if x.dtype == "float32" and problem.math != "tf32":
        return "float32 is multiplied as tf32"
    if _reads_no_pixels(problem):
        return "a stride of 2 over an axis of one pixel, beside which some taps lie"
    x_pitch, out_pitch = x.pixel_pitch, output.pixel_pitch
    if x_pitch is None or out_pitch is None:
        return "input and output must be channels_last, or slices of its channels"
    if weight.format == "strided":
        return "the weight must be contiguous or channels_last"
    if residual is not None and (
        residual.dtype != output.dtype or not residual.has("channels_last")
    ):
        return "the residual must have the result's type and format"
    for name, meta, pitch in (("C", x, x_pitch), ("K", output, out_pitch)):
        for channels in (meta.shape[1], pitch):
            if channels * meta.itemsize % 16:
                return f"{name} = {channels} × {meta.dtype} is not a multiple of 16 bytes"
    if output.dtype == "int32" and (
        any(t is not None for t in (epilogue.bias, residual, epilogue.scale))
        or epilogue.activation
        or epilogue.alpha != 1.0
    ):
        return "int32 results are the bare products"
    if 0 in (*x.shape, *output.shape) or max(math.prod(x.shape), math.prod(output.shape)) >= 2**31:
        return "empty, or more than 2^31 elements"
    return refusal(problem)


def _turned_depth(problem: Problem) -> str | None:
    """Why slices of a volume cannot be taken as images, or None."""
    a, taps = problem.attrs, problem["weight"].shape[2]
    windows = {*a["stride"], *a["dilation"]}
    if windows != {1} or a["groups"] != 1:
        return "volumes without stride, dilation and groups"
    if taps % 2 == 0 or a["padding"][0] != taps // 2:
        return "as many slices as there were"
    return None


def _reads_no_pixels(problem: Problem) -> bool:
    """Whether a tap reads odd rows (or columns), and there are none: no descriptor is empty."""
    x, weight, a = problem["input"], problem["weight"], problem.attrs
    axes = zip(x.shape[2:], weight.shape[2:], a["stride"], a["padding"], a["dilation"], strict=True)
    return any(
        size == 1 and stride == 2 and any((tap * step - pad) % 2 for tap in range(taps))
        for size, taps, stride, pad, step in axes
    )


def workspace_bytes(problem: Problem, **config: Any) -> int:
    """Parts of a sum that is split, in float32 or int32; a weight that must be packed first."""
    shape = shape_of(problem)
    return _parts_bytes(shape, config or configs(problem)[0]) + _packed_weight_bytes(problem, shape)


def _parts_bytes(shape: Shape, config: Mapping[str, Any]) -> int:
    if config["splits"] == 1:
        return 0
    images = round_up(shape.N, config["tile_n"])
    return round_up(config["splits"] * images * shape.P * shape.Q * shape.K * 4, 256)


def _packed_weight_bytes(problem: Problem, shape: Shape) -> int:
    if problem.is_constant("weight") or not _wants_packing(problem, shape):
        return 0
    K, C, R, S = _packed_shape(problem, shape)
    return K * C * R * S * shape.itemsize


def _wants_packing(problem: Problem, shape: Shape) -> bool:
    """Whether a weight of one group does not lie as the kernel reads it."""
    last = problem["weight"].has("channels_last")
    return not last or _packed_shape(problem, shape)[0] != shape.K


def _packed_shape(problem: Problem, shape: Shape) -> tuple[int, int, int, int]:
    """The weight's shape when it is packed: the epilogue of 8-bit results takes output channels by
    64.
    """
    multiple = 64 if problem.output.dtype in EIGHT_BITS else 1
    return round_up(shape.K, multiple), shape.C, shape.rows, shape.S


def bind(problem: Problem, constants: Mapping[int, Tensor], **config: Any) -> Call:
    shape = shape_of(problem)
    if not config:
        config = configs(problem)[0]
    K, C, R, S = _packed_shape(problem, shape)
    wants_packing = _wants_packing(problem, shape)
    known = constants.get(1)
    if shape.groups > 1:
        known = _packed_groups(constants[1], shape, config["tile_k"])
    elif known is not None and wants_packing:
        known = packed(known, ("conv2d.implicit_gemm.sm90", K), lambda w: _pack(_flat(w), K))
    known = None if known is None else _flat(known)
    parts_bytes = _parts_bytes(shape, config)
    is_small = small_sums(problem, constants, shape.C // shape.groups * shape.rows * shape.S)
    vectors = folded(problem, constants, small=is_small)

    def call(*inputs: Tensor, out: Tensor, workspace: Tensor | None = None) -> Tensor:
        x, weight, epilogue = problem.product_operands(constants, inputs)
        if known is not None:
            weight = known
        elif wants_packing:
            assert workspace is not None
            space = workspace[parts_bytes:].view(weight.dtype)[: K * C * R * S]
            weight = _pack(_flat(weight), K, space)
        if vectors and config["splits"] == 1:
            epilogue = replace(epilogue, scale=vectors[0], bias=vectors[1])
        volumes = x.shape[0] if shape.T > 1 else 1
        for i in range(volumes):
            residual = epilogue.residual
            if volumes > 1 and residual is not None:
                residual = residual[i : i + 1]
            _run(
                problem, shape, config, x[i:] if i else x, _flat(weight),
                replace(epilogue, residual=residual), out[i : i + 1] if volumes > 1 else out,
                workspace, is_folded=vectors is not None, is_small=is_small,
            )  # fmt: skip
        return out

    return call


def _flat(weight: Tensor) -> Tensor:
    """[K, C, T, R, S] → [K, C, T · R, S]: the rows of each tap along the depth, in order."""
    return weight.flatten(2, 3) if weight.dim() == 5 else weight


def _pack(weight: Tensor, K: int, space: Tensor | None = None) -> Tensor:
    """[K', C, R, S] in any layout → the same numbers as [K, C, R, S] channels_last in memory."""
    count, C, R, S = weight.shape
    if space is None:
        space = torch.empty(K * C * R * S, dtype=weight.dtype, device=weight.device)
    rows = space.view(K, R, S, C)
    rows[:count].copy_(weight.permute(0, 2, 3, 1))
    rows[count:].zero_()
    return rows.permute(0, 3, 1, 2)


def _packed_groups(weight: Tensor, shape: Shape, tile_k: int) -> Tensor:
    groups, channels = shape.groups, channels_read(shape, tile_k)
    return packed(
        weight,
        ("conv2d.implicit_gemm.sm90", groups, tile_k),
        lambda w: grouped.pack(w, groups, tile_k, channels, 16 // shape.itemsize),
    )


def _run(
    problem: Problem,
    shape: Shape,
    config: Mapping[str, Any],
    x: Tensor,
    weight: Tensor,
    epilogue: Epilogue[Tensor],
    out: Tensor,
    workspace: Tensor | None,
    *,
    is_folded: bool,
    is_small: bool,
) -> None:
    """One launch, or two where the sum is split."""
    bias, residual, scale = epilogue.bias, epilogue.residual, epilogue.scale
    box = [config["tile_h"], config["tile_n"], config["tile_w"]]
    taps = config["taps"]
    pixels, tile_k, tile_c = math.prod(box), config["tile_k"], config["tile_c"]
    splits = config["splits"]
    whole = splits == 1
    nhwc = _rows(x, (shape.N, shape.H, shape.W, shape.C), problem["input"].pixel_pitch)
    sh, sw = shape.stride
    if taps > 1:
        last = descriptor(nhwc, [taps - 1, *box[1:], tile_c])
        x_views = [descriptor(nhwc, [*box, tile_c]), last, last, last]
    else:
        views = [nhwc[i % sh :: sh, :, j % sw :: sw] for i in range(2) for j in range(2)]
        x_views = [descriptor(_some(view, nhwc), [*box, tile_c]) for view in views]
    interleave = _interleave(problem, config)
    out_shape = (shape.N, shape.P, shape.Q, shape.K)
    if whole:
        target = _rows(out, out_shape, problem.output.pixel_pitch)
    else:
        images = round_up(shape.N, config["tile_n"])
        sums = torch.int32 if x.dtype == torch.int8 else torch.float32
        assert workspace is not None
        target = workspace[: splits * images * shape.P * shape.Q * shape.K * 4].view(sums)
        target = _rows(target, (splits * images, shape.P, shape.Q, shape.K), shape.K)
    y = descriptor(target, [*box, tile_k])
    adds, added = False, y
    if residual is not None and whole:
        adds, added = True, descriptor(_rows(residual, out_shape, shape.K), [*box, tile_k])
    tiles = tile_counts(shape, config)
    items = math.prod(tiles) * splits
    blocks = min(items, config["residents"] * multiprocessors())
    if held := config.get("held", False):  # each block keeps to one tile of channels
        blocks = max(1, blocks // tiles[0]) * tiles[0]
    rows, columns = (tile_k, pixels) if config["swap"] else (pixels, tile_k)
    is_folded = is_folded and whole
    alpha = problem.epilogue.alpha if whole and not is_folded else 1.0
    activation, beta = problem.epilogue.on_device
    beta *= problem.gamma or 1.0 if is_folded else 1.0
    channels = channels_read(shape, tile_k)
    chunks = math.ceil(channels / tile_c)
    group = (shape.K // shape.groups, shape.C // shape.groups) if shape.groups > 1 else (None, None)
    options: dict[str, Any] = {"launch_pdl": True}
    is_lone = (config["groups"], config["warps"], config["residents"]) == (1, 4, 1)
    if config["warps"] == 4:
        options["maxnreg"] = REGISTERS[config["residents"]]
    launch(
        convolve,
        (blocks,),
        *x_views,
        _weight_descriptor(weight, interleave, tile_k, tile_c),
        y,
        added,
        (
            bias if whole else None,
            scale if whole else None,
            float(alpha),
            float(beta),
            problem.gamma if whole and not is_folded else None,
            shape.K if shape.K % tile_k else None,
        ),
        (channels, chunks, shape.H, shape.W, shape.T * (1 if taps > 1 else shape.R), shape.S,
         *shape.padding, *shape.dilation),
        (tuple(tiles[:3]), tuple(_digits(blocks, tiles[:3])), splits),
        max(0, weight.shape[0] - tile_k), (target.shape[1] // splits, items), group,
        TILE=Tile(
            BH=box[0], BN=box[1], BW=box[2], BCO=tile_k, BK=tile_c, SH=sh, SW=sw, DEPTH=shape.T,
            DILATED=shape.dilation != (1, 1), SPLIT=not whole, TAPS=taps, INTERLEAVE=interleave,
        ),
        RING=Ring(
            STAGES=config["stages"], HELD=shape.rows * shape.S * chunks if held else 0,
            GROUPS=config["groups"], SLOTS=config["slots"],
        ),
        PRODUCT=Product(
            SWAP=config["swap"],
            PROMOTE=promotes(problem),
            LAYOUT=_layout(x.dtype, rows, columns, config["warps"]),
            SLAB=gl.NVMMASharedLayout.get_default_for([pixels, tile_c], DTYPES[x.dtype]),
        ),
        ENDING=Ending(
            RESIDUAL=adds,
            UNSCALED=alpha == beta == 1.0,
            SMALL=whole and is_small,
            FOLDED=is_folded,
            SIXTEEN_BITS=whole and in_sixteen_bits(problem),
            ACTIVATION=activation if whole else None,
        ),
        REGISTERS=(232, 88 if is_lone else 40),
        CONSTANT=problem.is_constant("weight"),
        num_warps=config["warps"],
        **options,
    )  # fmt: skip
    if not whole:
        _add_parts(problem, target, splits, epilogue, out)


def _interleave(problem: Problem, config: Mapping[str, Any]) -> int:
    """By how much the weights' rows are spread, so that a thread gets neighbouring channels.

    A thread's accumulators lie in pairs, eight columns apart, and eight rows apart. For results of
    16 bits the hardware transposes while it stores (stmatrix). For 8 bits the rows are read in
    another order: an 8 × 8 transpose of every 64 gives a thread 16 neighbours, which are one store;
    with the roles swapped, a 2 × 8 transpose of every 16 gives it two. 1 leaves the order alone.
    """
    if problem.output.dtype not in EIGHT_BITS or config["splits"] > 1:
        return 1
    return 2 if config["swap"] else 8


def _weight_descriptor(weight: Tensor, interleave: int, tile_k: int, tile_c: int) -> Any:
    K, C, R, S = weight.shape
    row = R * S * C
    if interleave == 1:
        rows = weight.as_strided((K, R * S, C), (row, C, 1))
        return descriptor(rows, [tile_k, 1, tile_c])
    block = 8 * interleave
    order = weight.as_strided(
        (K // block, interleave, 8, R * S, C), (block * row, row, interleave * row, C, 1)
    )
    return descriptor(order, [tile_k // block, interleave, 8, 1, tile_c])


def _layout(dtype: torch.dtype, rows: int, columns: int, warps: int) -> Any:
    """Accumulators over warps: each warpgroup takes 64 rows; eight warps of 64 rows halve columns.

    Products of int8 do not compile 256 columns wide (Triton 3.6).
    """
    down = min(warps, rows // 16)
    width = min(columns // (warps // down), 128 if dtype == torch.int8 else 256)
    return gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[down, warps // down],
        instr_shape=[16, width, 32 // dtype.itemsize],
    )


def _digits(number: int, bases: Sequence[int]) -> list[int]:
    """``number`` with ``bases``, the lowest digit first; what is left over last."""
    digits = []
    for base in bases:
        number, digit = divmod(number, base)
        digits.append(digit)
    return [*digits, number]


def _rows(tensor: Tensor, shape: tuple[int, ...], pitch: int | None) -> Tensor:
    """N, H, W, C in memory, ``pitch`` elements from pixel to pixel → the view [H, N, W, C]."""
    assert pitch is not None  # as ``fits`` asks
    N, H, W, C = shape
    return tensor.as_strided((H, N, W, C), (W * pitch, H * W * pitch, pitch, 1))


def _some(view: Tensor, instead: Tensor) -> Tensor:
    """The view, or the other tensor in its place: a view without pixels is never read, and has no
    descriptor.
    """
    return view if view.numel() else instead


# ------------------------------------------------------------------ sums in parts


@triton.jit
def add_parts(
    parts,
    out,
    bias,
    scale,
    residual,
    alpha,
    beta,
    gamma,
    count,
    part_stride,
    K,
    pitch,
    SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The parts of a sum, added in order, and the epilogue: [SPLITS, pixels · K] → [pixels · K].

    The results of a pixel are ``pitch`` elements after those of the pixel before.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    total = tl.load(parts + i, mask=inside, other=0)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(parts + part * part_stride + i, mask=inside, other=0)
    k = i % K
    b = None
    s = None
    r = None
    if bias is not None:
        b = tl.load(bias + k, mask=inside, other=0.0)
    if scale is not None:
        s = tl.load(scale + k, mask=inside, other=0.0)
    if residual is not None:
        r = tl.load(residual + i, mask=inside, other=0.0)
    if out.dtype.element_ty != tl.int32:
        total = cast(finish(total, s, b, r, alpha, beta, gamma, ACTIVATION), out.dtype.element_ty)
    tl.store(out + i + i // K * (pitch - K), total, mask=inside)


def _add_parts(
    problem: Problem, parts: Tensor, splits: int, epilogue: Epilogue[Tensor], out: Tensor
) -> None:
    count, (activation, beta) = out.numel(), epilogue.on_device
    block = 256 if count < 256 * 8 * multiprocessors() else 1024
    launch(
        add_parts,
        (triton.cdiv(count, block),),
        parts,
        out,
        epilogue.bias,
        epilogue.scale,
        epilogue.residual,
        epilogue.alpha,
        beta,
        problem.gamma,
        count,
        parts.numel() // splits,
        out.shape[1],
        problem.output.pixel_pitch,
        SPLITS=splits,
        ACTIVATION=activation,
        BLOCK=block,
        num_warps=4,
    )
