"""Layers with 2:4 weights by Hopper's sparse tensor cores: half of the products, and of the weight.

The weight is compressed once. Everything of the epilogue is done where the sums are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from tessella.core.architectures import ARCHITECTURES
from tessella.core.compiled import Tiles
from tessella.core.dtype import FLOATS
from tessella.device.cuda import CudaKernel, cuda
from tessella.device.driver import MAP_BYTES, cuda_driver
from tessella.device.launch import only_compiles, record
from tessella.device.machine import multiprocessors
from tessella.device.packing import packed
from tessella.kernels.catalog import Call, Config
from tessella.kernels.epilogue.cuda import KINDS
from tessella.kernels.shared.matrix_product import sizes
from tessella.kernels.sparse import product
from tessella.kernels.sparse.two_four import ROWS, compress, wgmma_metadata
from tessella.kernels.sparse.wgmma_device import ROW_BYTES, Tiling, depth, source, words
from tessella.operations.epilogue import Epilogue
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

TARGET = "sm_90"
TRIED = 5  # configurations of a problem
CHANNELS = 256  # of the largest tile: metadata are padded to it
TILINGS = (
    Tiling(channels=256, rows=128, stages=3),
    Tiling(channels=128, rows=256, stages=2),
    Tiling(channels=128, rows=128, stages=4),
    Tiling(channels=256, rows=64, stages=4),
    Tiling(channels=128, rows=64, stages=4),
    Tiling(channels=64, rows=128, stages=5),
    Tiling(channels=64, rows=64, stages=4),
    Tiling(channels=64, rows=32, stages=6),
)
_WORDS = {1: 0, 2: 1}  # the driver's numbers of elements that are only moved, by their bytes
_SWIZZLE_128B = 3


def fits(problem: Problem) -> str | None:
    if (refused := product.refusal(problem)) is not None:
        return refused
    made = sizes(product.as_linear(problem))
    if made.n % 4:
        return f"output channels must be a multiple of 4, not {made.n}"
    if problem.output.dtype not in KINDS:
        return f"does not store {problem.output.dtype}"
    bias, residual = problem.epilogue.bias, problem.epilogue.residual
    if bias is not None and bias.dtype not in FLOATS:
        return f"a bias of {', '.join(FLOATS)}, not {bias.dtype}"
    if residual is not None and residual.dtype not in (*FLOATS, "int8"):
        return f"does not add {residual.dtype}"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    made = sizes(product.as_linear(problem))

    def work(tiling: Tiling) -> float:
        """About how long a tiling takes: waves of blocks, times the work of a block."""
        blocks = math.ceil(made.n / tiling.channels) * math.ceil(made.m / tiling.rows)
        one = tiling.channels * tiling.rows + 32 * (tiling.channels + 2 * tiling.rows)
        together = ARCHITECTURES[TARGET].shared_bytes // tiling.shared_bytes(1)
        return math.ceil(blocks / (multiprocessors() * together)) * together * one

    best = sorted(TILINGS, key=work)[:TRIED]
    return tuple({"channels": t.channels, "rows": t.rows, "stages": t.stages} for t in best)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: int) -> Call:
    tiling = Tiling(**(config or configs(problem)[0]))
    made, asked = sizes(product.as_linear(problem)), problem.epilogue
    kernel = _kernel(
        tiling,
        problem["input"].dtype,
        problem.output.dtype,
        Epilogue(
            bias=_dtype(asked.bias),
            residual=None if asked.beta == 0 else _dtype(asked.residual),
            scale=_dtype(asked.scale),
            activation=asked.activation,
        ),
        rescaled=problem.gamma is not None,
    )
    values, places = _packed(constants[1])
    itemsize = values.itemsize
    tiles = math.ceil(made.n / tiling.channels) * math.ceil(made.m / tiling.rows)

    def call(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        x, given = product.matrices(problem, constants, inputs)
        added = (given.bias, given.residual, given.scale)
        args = (
            _map(values, tiling.channels),
            _map(x, tiling.rows),
            places,
            out,
            *(out if t is None else t for t in added),  # no place is left empty
            float(asked.alpha),
            float(asked.beta),
            made.n,
            made.m,
            made.k,
            float(asked.gamma),
        )
        launched = kernel.launch(
            (tiles, 1, 1),
            (tiling.threads, 1, 1),
            args,
            shared_bytes=tiling.shared_bytes(itemsize),
            target=TARGET if only_compiles() else None,
        )
        record(launched)
        return out

    return call


def _dtype(meta: TensorMeta | None) -> str | None:
    return None if meta is None else meta.dtype


@functools.cache
def _kernel(
    tiling: Tiling, dtype: str, out: str, epilogue: Epilogue[str], *, rescaled: bool
) -> CudaKernel:
    # products and sums are not contracted: the epilogue rounds as torch's does
    return cuda(
        source(tiling, dtype, out, epilogue, rescaled=rescaled),
        "sparse_linear",
        options=("--fmad=false",),
        one_architecture=True,
    )


def _packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [N, K / 2], and metadata in the order of stages: 64 channels, stage, thread, words."""

    def values(weight: torch.Tensor) -> torch.Tensor:
        return compress(_matrix(weight)).values.contiguous()

    def places(weight: torch.Tensor) -> torch.Tensor:
        itemsize = weight.itemsize
        found = compress(_matrix(weight)).places
        rows, steps = len(found), math.ceil(4 * found.shape[1] / depth(itemsize))
        all_places = found.new_full(
            (math.ceil(rows / CHANNELS) * CHANNELS, steps * depth(itemsize) // 4), 0b1110
        )
        all_places[:rows, : found.shape[1]] = found
        made = wgmma_metadata(all_places, itemsize)
        return made.view(len(made), steps, words(itemsize), 2 * ROWS).mT.contiguous()

    return packed(weight, ("2:4 values",), values), packed(weight, ("2:4 places",), places)


def _matrix(weight: torch.Tensor) -> torch.Tensor:
    return weight.reshape(len(weight), -1)


def _map(matrix: Any, rows: int) -> Any:
    """Tiles of ``rows`` rows of 128 bytes; nothing where launches only compile."""
    if only_compiles():
        return bytes(MAP_BYTES)
    tiles = Tiles(
        element=_WORDS[matrix.itemsize],
        element_bytes=matrix.itemsize,
        box=(rows, ROW_BYTES // matrix.itemsize),
        swizzle=_SWIZZLE_128B,
    )
    return cuda_driver().tensor_map(matrix.data_ptr(), tiles, matrix.shape, matrix.stride())
