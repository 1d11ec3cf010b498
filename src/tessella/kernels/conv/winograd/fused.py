"""Winograd convolution in one kernel: F(2, 3), transforms and products on chip.

A block owns some tiles and some filters. For each of the 16 products it makes the transformed input
as it reads it (two rows and two columns of the tile), multiplies over all channels, and adds the
sum into the four outputs that it belongs to. Only the transformed filter lies in the workspace.
Lavin and Gray, 2015.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.dtype import SIXTEEN_BIT
from tessella.device.launch import launch
from tessella.device.machine import gpu
from tessella.device.packing import packed
from tessella.kernels.catalog import Call, Config
from tessella.kernels.conv.winograd.device import finish_tiles, stored, transform_filter
from tessella.kernels.conv.winograd.fma import Block, Takes, convolve_fma
from tessella.kernels.conv.winograd.tiling import Tiling, refusal
from tessella.kernels.conv.winograd.transforms import coefficients, transform
from tessella.operations.epilogue import Epilogue
from tessella.operations.problem import Problem

F23 = transform(2, 3)
# each row of Bᵀ takes two inputs: (first, second), and what they are multiplied by
_TAKES = [[(j, float(v)) for j, v in enumerate(row) if v] for row in F23.bt]
TAKES = Takes(
    INPUTS=tuple(tuple(j for j, _ in row) for row in zip(*_TAKES, strict=True)),
    FACTORS=tuple(tuple(v for _, v in row) for row in zip(*_TAKES, strict=True)),
    OUTPUTS=coefficients(F23.at),
)


def fits(problem: Problem) -> str | None:
    return refusal(problem, (3,))


def outclassed(problem: Problem) -> str | None:
    if problem["input"].dtype in SIXTEEN_BIT:
        return "in 16 bits 1.5 times the fastest's time at best in 125 problems"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    ieee = problem["input"].dtype == "float32" and problem.math == "ieee"
    names = ("product", "block_t", "block_k", "block_c", "warps", "stages", "split")
    if ieee:
        # N=1, 128 → 128 channels, 128 × 128, NCHW: 91.4, 91.2, not measured, 101, 103 and 246 us
        shapes = [
            ("fma", 32, 128, 32, 8, 2, 2),
            ("fma", 32, 128, 16, 4, 2, 1),
            ("fma", 32, 128, 64, 8, 2, 2),
            ("fma", 32, 64, 32, 4, 2, 2),
            ("fma", 16, 128, 16, 4, 2, 1),
            ("dot", 32, 128, 16, 4, 3),
        ]
    else:
        shapes = [
            ("dot", 64, 64, 32, 4, 3),
            ("dot", 64, 64, 64, 4, 3),
            ("dot", 128, 64, 32, 8, 3),
            ("dot", 64, 32, 32, 4, 3),
        ]
    found: tuple[Config, ...] = tuple(dict(zip(names, values, strict=False)) for values in shapes)
    if not _tf32(problem):
        return found
    return tuple(c for c in found if _tf32_bytes(**c) <= gpu().shared_bytes_of_block())


def _tf32_bytes(*, block_t: int, block_k: int, block_c: int, **_: object) -> int:
    """Shared memory of a block, as Triton 3.6 and 3.9 have it: four pixels and a filter in each of
    two stages, and the pixels of one product.
    """
    return 4 * block_c * (2 * (4 * block_t + block_k) + block_t)


def workspace_bytes(problem: Problem, **config: Any) -> int:
    """The transformed filter, unless it is constant."""
    if problem.is_constant("weight"):
        return 0
    dtype: torch.dtype = getattr(torch, problem["input"].dtype)
    return _elements(problem, config or configs(problem)[0]) * dtype.itemsize


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    config = config or configs(problem)[0]
    known = None
    if 1 in constants:
        how = ("winograd.fused", *_padded(problem, config), problem.math)
        known = packed(constants[1], how, lambda w: _filter(problem, config, w, None))

    def call(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out.numel() == 0:
            return out
        x, w, epilogue = problem.product_operands(constants, inputs)
        u = _filter(problem, config, w, workspace) if known is None else known
        _convolve(problem, config, x, u, out, epilogue)
        return out

    return call


def _padded(problem: Problem, config: Config) -> tuple[int, int]:
    """Filters and channels in whole blocks."""
    weight = problem["weight"]
    block_k, block_c = config["block_k"], config["block_c"]
    return -(-weight.shape[0] // block_k) * block_k, -(-weight.shape[1] // block_c) * block_c


def _elements(problem: Problem, config: Config) -> int:
    filters, channels = _padded(problem, config)
    return F23.n**2 * filters * channels


def _tf32(problem: Problem) -> bool:
    return problem["input"].dtype == "float32" and problem.math == "tf32"


def _filter(
    problem: Problem, config: Config, weight: torch.Tensor, workspace: torch.Tensor | None
) -> torch.Tensor:
    """The transformed filter [16, channels, filters], in the workspace or in memory of its own."""
    filters, channels = _padded(problem, config)
    elements = _elements(problem, config)
    if workspace is None:
        u = torch.empty(elements, dtype=weight.dtype, device=weight.device)
    else:
        u = workspace[: elements * weight.dtype.itemsize].view(weight.dtype)
    block_k, block_c = 16, 8
    blocks_c = channels // block_c
    launch(
        transform_filter, (filters // block_k * blocks_c,),
        weight, u, weight.shape[0], weight.shape[1], weight.stride(),
        (filters * channels, 1, filters), blocks_c,
        G=coefficients(F23.g), N=F23.n, R=F23.r, BLOCK_K=block_k, BLOCK_C=block_c,
        TF32=_tf32(problem),
    )  # fmt: skip
    return u


def _convolve(
    problem: Problem,
    config: Config,
    x: torch.Tensor,
    u: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue[torch.Tensor],
) -> None:
    tiling = Tiling.of(problem, F23.m)
    filters, channels = _padded(problem, config)
    bias, residual, scale = epilogue.bias, epilogue.residual, epilogue.scale
    blocks_k = filters // config["block_k"]
    fma = config["product"] == "fma"
    if fma:
        warps = config["warps"] // config["split"]
        warps_k = min(warps, config["block_k"] // 32)
        form = {
            "STAGES": config["stages"],
            "SPLIT": config["split"],
            "WARPS_T": warps // warps_k,
            "WHOLE": tiling.channels == channels,
            "WIDE": x.stride(3) == 1,
            "WIDE_OUT": problem.output.format != "channels_last",
        }
    else:
        form = {
            "PRECISION": "tf32" if _tf32(problem) else "ieee",
            "WIDE": problem.output.format != "channels_last",
            "num_stages": config["stages"],
        }
    launch(
        convolve_fma if fma else convolve,
        (-(-tiling.count // config["block_t"]) * blocks_k,),
        x, u, out,
        (tiling.count, tiling.channels, tiling.filters, *tiling.image, *tiling.out,
         tiling.down, tiling.across),
        x.stride(), filters, blocks_k, out.stride(),
        (bias, residual, scale, *((0, 0, 0, 0) if residual is None else residual.stride()),
         problem.epilogue.alpha, problem.epilogue.beta),
        DEPTH=channels, TRANSFORM=TAKES, PADDING=tiling.padding,
        BLOCK=Block(T=config["block_t"], K=config["block_k"], C=config["block_c"]),
        ACTIVATION=problem.epilogue.activation, num_warps=config["warps"], **form,
    )  # fmt: skip


@triton.jit
def _pick(VALUES: tl.constexpr, ROW: tl.constexpr, i):
    """VALUES[ROW][i], i known at run time, of four."""
    picked = i * 0 + VALUES[ROW][3]
    for index in tl.static_range(3):
        picked = tl.where(i == index, VALUES[ROW][index], picked)
    return picked


@triton.jit
def _two_columns(pixels, seen, h, w, first, second, by_first, by_second, xh, xw, H, W, row):
    """One row of the tile, its two columns combined."""
    seen = seen & (h + row >= 0) & (h + row < H)
    left = seen & (w + first >= 0) & (w + first < W)
    right = seen & (w + second >= 0) & (w + second < W)
    pixels += row * xh
    a = tl.load(pixels + first * xw, mask=left, other=0.0).to(tl.float32)
    b = tl.load(pixels + second * xw, mask=right, other=0.0).to(tl.float32)
    return by_first * a + by_second * b


@triton.jit
def convolve(
    x, u, y, sizes, x_strides, filters, blocks_k, y_strides, epilogue,
    DEPTH: tl.constexpr, TRANSFORM: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y = epilogue(conv(x)): BLOCK.T tiles of 2 × 2 outputs, BLOCK.K filters."""
    BLOCK_T: tl.constexpr = BLOCK.T
    BLOCK_K: tl.constexpr = BLOCK.K
    BLOCK_C: tl.constexpr = BLOCK.C
    INPUTS: tl.constexpr = TRANSFORM.INPUTS
    FACTORS: tl.constexpr = TRANSFORM.FACTORS
    OUTPUTS: tl.constexpr = TRANSFORM.OUTPUTS
    T, C, K, H, W, P, Q, tiles_h, tiles_w = sizes
    xn, xc, xh, xw = x_strides
    block = tl.program_id(0)
    t = block // blocks_k * BLOCK_T + tl.arange(0, BLOCK_T)
    k = block % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
    h = ((t // tiles_w) % tiles_h * 2 - PADDING[0])[:, None]
    w = (t % tiles_w * 2 - PADDING[1])[:, None]
    images = x + (t // (tiles_w * tiles_h) * xn)[:, None] + h * xh + w * xw
    real = (t < T)[:, None]
    lane = tl.arange(0, BLOCK_C)
    y00 = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    y01 = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    y10 = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    y11 = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    product = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    STEPS: tl.constexpr = DEPTH // BLOCK_C
    for step in range(16 * STEPS):
        i = step // STEPS // 4
        j = step // STEPS % 4
        c = step % STEPS * BLOCK_C + lane
        seen = real & (c < C)[None, :]
        pixels = images + (c * xc)[None, :]
        c1 = _pick(INPUTS, 0, j)
        c2 = _pick(INPUTS, 1, j)
        f1 = _pick(FACTORS, 0, j)
        f2 = _pick(FACTORS, 1, j)
        r1 = _pick(INPUTS, 0, i)
        r2 = _pick(INPUTS, 1, i)
        v = _pick(FACTORS, 0, i) * _two_columns(
            pixels, seen, h, w, c1, c2, f1, f2, xh, xw, H, W, r1
        )
        v += _pick(FACTORS, 1, i) * _two_columns(
            pixels, seen, h, w, c1, c2, f1, f2, xh, xw, H, W, r2
        )
        rows = step // STEPS * DEPTH + c
        filter = tl.load(u + rows[:, None] * filters + k[None, :])
        v = stored(v, u.dtype.element_ty, PRECISION == "tf32")
        product = tl.dot(v, filter, product, input_precision=PRECISION)
        if step % STEPS == STEPS - 1:
            top = _pick(OUTPUTS, 0, i)
            bottom = _pick(OUTPUTS, 1, i)
            left = _pick(OUTPUTS, 0, j)
            right = _pick(OUTPUTS, 1, j)
            y00 += top * left * product
            y01 += top * right * product
            y10 += bottom * left * product
            y11 += bottom * right * product
            product = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    finish_tiles(
        (y00, y01, y10, y11), y, block // blocks_k * BLOCK_T, k,
        (T, K, P, Q, tiles_h, tiles_w), y_strides, epilogue, ACTIVATION, BLOCK_T, WIDE,
    )  # fmt: skip
