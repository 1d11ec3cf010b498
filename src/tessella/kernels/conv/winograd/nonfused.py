"""Winograd convolution in steps: transform input and filter, multiply in batches, transform back.

Between the steps the n² matrices lie in the workspace, padded to whole blocks; on a GPU whose
cache holds them they never reach memory. Lavin and Gray, 2015.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tessella.core.integers import round_up
from tessella.device.launch import launch
from tessella.device.packing import packed
from tessella.kernels.catalog import Call, Config
from tessella.kernels.conv.winograd.device import (
    InputTransform,
    transform_filter,
    transform_input_and_filter,
    transform_output,
)
from tessella.kernels.conv.winograd.product import multiply, multiply_fma
from tessella.kernels.conv.winograd.tiling import LARGEST_INT32, Tiling, refusal
from tessella.kernels.conv.winograd.transforms import coefficients
from tessella.operations.epilogue import Epilogue
from tessella.operations.problem import Problem

THREADS = 128  # of a block of the transforms; each holds one tile of one channel
CHANNELS = 32  # depth is padded to a multiple of this


def fits(problem: Problem) -> str | None:
    refused = refusal(problem, (3, 5))
    if refused is None and not configs(problem):
        return "the workspace would have more than 2^31 elements"
    return refused


def configs(problem: Problem) -> tuple[Config, ...]:
    """Large tiles of outputs first, where the element type holds their accuracy."""
    x, weight = problem["input"], problem["weight"]
    ieee = x.dtype == "float32" and problem.math == "ieee"
    small, large = (2, 4) if weight.shape[2] == 3 else (2, 2)
    blocks: tuple[tuple[int, int, int, int], ...]
    if ieee:
        huge = 6 if weight.shape[2] == 3 else 4
        # N=1, 128 → 128 channels, 128 × 128: 32.6, 33.8, 32.9, 33.1 and 34.5 us for the products
        blocks = ((32, 32, 1, 2), (64, 64, 4, 4), (64, 64, 2, 4), (32, 64, 1, 2), (128, 64, 4, 3))
        made = [(large, "fma", i, j, 16, warps, stages) for i, j, warps, stages in blocks]
        made += [(huge, "fma", i, j, 16, warps, stages) for i, j, warps, stages in blocks[:3]]
        made.append((small, "fma", 64, 64, 16, 4, 4))
    else:
        depth = 32 if x.dtype == "float32" else 64
        blocks = ((128, 128, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3))
        made = [(large, "dot", i, j, depth, warps, stages) for i, j, warps, stages in blocks]
        made.append((small, "dot", 128, 128, depth, 8, 3))
    names = ("tile", "product", "block_i", "block_j", "block_d", "warps", "stages")
    named = [dict(zip(names, values, strict=True)) for values in dict.fromkeys(made)]
    return tuple(config for config in named if _Plan.of(problem, **config).indexable)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Sizes and strides of the three steps.

    Attributes:
        fma: true float32 on the plain units; else tl.dot.
        pixels_inside: the output's pixels are neighbours in memory (NCHW), not its channels.
        tiles, channels, filters: padded to whole blocks.
    """

    tiling: Tiling
    config: Config
    dtype: torch.dtype
    tf32: bool
    fma: bool
    pixels_inside: bool
    tiles: int
    channels: int
    filters: int

    @classmethod
    def of(cls, problem: Problem, **config: Any) -> _Plan:
        tiling = Tiling.of(problem, config["tile"])
        pixels_inside = problem.output.format != "channels_last"
        i, j = config["block_i"], config["block_j"]
        filters, tiles = (i, j) if pixels_inside else (j, i)
        return cls(
            tiling=tiling,
            config=config,
            dtype=getattr(torch, problem["input"].dtype),
            tf32=problem["input"].dtype == "float32" and problem.math == "tf32",
            fma=config["product"] == "fma",
            pixels_inside=pixels_inside,
            tiles=round_up(tiling.count, tiles),
            channels=round_up(tiling.channels, max(CHANNELS, config["block_d"])),
            filters=round_up(tiling.filters, filters),
        )

    @property
    def v_elements(self) -> int:
        return self.tiling.products * self.tiles * self.channels

    @property
    def u_elements(self) -> int:
        return self.tiling.products * self.filters * self.channels

    @property
    def m_elements(self) -> int:
        return self.tiling.products * self.tiles * self.filters

    @property
    def indexable(self) -> bool:
        """Whether 32-bit numbers count the elements of each part."""
        return max(self.v_elements, self.u_elements, self.m_elements) <= LARGEST_INT32

    def u_strides(self) -> tuple[int, int, int]:
        """(p, k, c): depth outermost for fused multiply-adds, innermost for tensor cores."""
        inner = (1, self.filters) if self.fma else (self.channels, 1)
        return (self.filters * self.channels, *inner)

    def v_strides(self) -> tuple[int, int, int]:
        """(p, t, c), likewise."""
        inner = (1, self.tiles) if self.fma else (self.channels, 1)
        return (self.tiles * self.channels, *inner)

    def m_strides(self) -> tuple[int, int, int]:
        """(p, t, k): as in the output, so that its transform reads and writes neighbours."""
        inner = (1, self.tiles) if self.pixels_inside else (self.filters, 1)
        return (self.tiles * self.filters, *inner)


def workspace_bytes(problem: Problem, **config: Any) -> int:
    """Transformed input, transformed filter unless it is constant, and the products."""
    plan = _Plan.of(problem, **(config or configs(problem)[0]))
    elements = plan.v_elements + (0 if problem.is_constant("weight") else plan.u_elements)
    return elements * plan.dtype.itemsize + plan.m_elements * 4


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    plan = _Plan.of(problem, **(config or configs(problem)[0]))
    weight = constants.get(1)
    u_known = None
    if weight is not None:
        how = ("winograd", plan.tiling.f.m, plan.u_strides(), plan.tf32)
        u_known = packed(weight, how, lambda w: _transformed_filter(plan, w))

    def call(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out.numel() == 0:
            return out
        x, w, epilogue = problem.product_operands(constants, inputs)
        assert workspace is not None
        v, u, m = _views(plan, workspace, u_known)
        _transform_inputs(plan, x, v, None if u_known is not None else w, u)
        _multiply(plan, v, u, m)
        _transform_back(plan, epilogue, m, out)
        return out

    return call


def _views(
    plan: _Plan, workspace: torch.Tensor, u: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The workspace's parts: V, U (unless it is known) and the products."""
    sizes = [plan.m_elements * 4, plan.v_elements * plan.dtype.itemsize]
    m = workspace[: sizes[0]].view(torch.float32)
    v = workspace[sizes[0] : sum(sizes)].view(plan.dtype)
    if u is None:
        size = plan.u_elements * plan.dtype.itemsize
        u = workspace[sum(sizes) : sum(sizes) + size].view(plan.dtype)
    return v, u, m


def _input_block(plan: _Plan, pixels_read: bool) -> tuple[int, int]:
    """Tiles and channels of a block that transforms input, the fastest of some twenty tried.

    128 tiles wide where tiles are neighbours in x and V; where channels are, 16-bit numbers are
    written two at a time; square where they are neighbours in one and not in the other.
    """
    if pixels_read != plan.fma:
        return 16, 16
    return (_divisor(plan.tiles, 128), 1) if pixels_read else (4, _divisor(plan.channels, 64))


def _filter_block(plan: _Plan) -> tuple[int, int]:
    """Filters and channels of a block that transforms the filter."""
    return (16, 8) if plan.fma else (4, _divisor(plan.channels, 64))


def _divisor(extent: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides ``extent``."""
    return math.gcd(extent, most)


def _transformed_filter(plan: _Plan, weight: torch.Tensor) -> torch.Tensor:
    f = plan.tiling.f
    u = torch.empty(plan.u_elements, dtype=plan.dtype, device=weight.device)
    block_k, block_c = _filter_block(plan)
    blocks_c = plan.channels // block_c
    launch(
        transform_filter,
        (plan.filters // block_k * blocks_c,),
        weight, u, plan.tiling.filters, plan.tiling.channels, weight.stride(),
        plan.u_strides(), blocks_c,
        G=coefficients(f.g), N=f.n, R=f.r, BLOCK_K=block_k, BLOCK_C=block_c, TF32=plan.tf32,
    )  # fmt: skip
    return u


def _transform_inputs(
    plan: _Plan,
    x: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor | None,
    u: torch.Tensor,
) -> None:
    """V, and in the same launch U where the filter is no constant."""
    tiling, f = plan.tiling, plan.tiling.f
    block_t, block_c = _input_block(plan, x.stride(3) == 1)
    filter_k, filter_c = _filter_block(plan)
    blocks = plan.tiles // block_t * (plan.channels // block_c)
    filter_blocks_c = plan.channels // filter_c
    filter_blocks = 0 if weight is None else plan.filters // filter_k * filter_blocks_c
    launch(
        transform_input_and_filter,
        (blocks + filter_blocks,),
        x, v, (tiling.count, tiling.channels, *tiling.image, tiling.down, tiling.across),
        x.stride(), plan.v_strides(), plan.channels // block_c,
        weight, u, tiling.filters, (0, 0, 0, 0) if weight is None else weight.stride(),
        plan.u_strides(), filter_blocks, filter_blocks_c,
        TRANSFORM=InputTransform(
            BT=coefficients(f.bt), G=coefficients(f.g), N=f.n, M=f.m, R=f.r
        ),
        PADDING=tiling.padding, BLOCK=(block_t, block_c), FILTER=(filter_k, filter_c),
        TF32=plan.tf32, num_warps=THREADS // 32,
    )  # fmt: skip


def _multiply(plan: _Plan, v: torch.Tensor, u: torch.Tensor, m: torch.Tensor) -> None:
    config = plan.config
    a, b, i, j = (
        (u, v, plan.filters, plan.tiles) if plan.pixels_inside else (v, u, plan.tiles, plan.filters)
    )
    blocks = {"BLOCK_I": config["block_i"], "BLOCK_J": config["block_j"]}
    grid = (plan.tiling.products * (i // config["block_i"]) * (j // config["block_j"]),)
    common: dict[str, Any] = {**blocks, "BLOCK_D": config["block_d"], "num_warps": config["warps"]}
    if plan.fma:
        warps_j = min(config["warps"], max(1, config["block_j"] // 64))
        kernel, own = multiply_fma, {"WARPS_I": config["warps"] // warps_j}
        own["STAGES"] = config["stages"]
    else:
        kernel, own = multiply, {"PRECISION": "tf32" if plan.tf32 else "ieee"}
        own["num_stages"] = config["stages"]
    launch(kernel, grid, a, b, m, i, j, DEPTH=plan.channels, **common, **own)


def _transform_back(
    plan: _Plan, epilogue: Epilogue[torch.Tensor], m: torch.Tensor, out: torch.Tensor
) -> None:
    tiling, f = plan.tiling, plan.tiling.f
    bias, residual, scale = epilogue.bias, epilogue.residual, epilogue.scale
    block_t, block_k = (32, 4) if plan.pixels_inside else (4, 32)
    blocks_k = plan.filters // block_k
    launch(
        transform_output,
        (plan.tiles // block_t * blocks_k,),
        m, out, (tiling.count, tiling.filters, *tiling.out, tiling.down, tiling.across),
        plan.m_strides(), out.stride(), blocks_k,
        (bias, residual, scale, *((0, 0, 0, 0) if residual is None else residual.stride()),
         epilogue.alpha, epilogue.beta),
        AT=coefficients(f.at), N=f.n, M=f.m, ACTIVATION=epilogue.activation,
        BLOCK_T=block_t, BLOCK_K=block_k, WIDE=plan.pixels_inside,
        num_warps=THREADS // 32,
    )  # fmt: skip
