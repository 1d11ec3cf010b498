"""A layer's matrix product and the norm of its rows in one launch, on Hopper's tensor cores.

The host's side; the device code is ``normed_device``. The sums are normalized while they are in
registers: a norm by itself reads and writes them once more (an H200, 12,288 rows of 1,024 numbers
to float16 and fp8: 24 µs, beside 34 for the product before it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tessella.core.dtype import FLOATS, FP8, SIXTEEN_BIT
from tessella.core.integers import power_of_two
from tessella.device.launch import launch
from tessella.device.machine import HOPPER, multiprocessors
from tessella.device.packing import with_packed
from tessella.kernels.catalog import Call, Config
from tessella.kernels.gemm import wgmma
from tessella.kernels.gemm.normed_device import multiply_and_normalize
from tessella.kernels.gemm.wgmma import ROW_BYTES
from tessella.kernels.gemm.wgmma_device import Epilogue, Form
from tessella.kernels.shared.matrix_product import sizes
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta

OWN_ATTRS = ("eps", "results", "code_dtype")  # the others are the product's
TILE = 128  # rows, and columns, of what a consumer accumulates
PIECE = TILE // 2  # columns that leave at a time
MOST_TILES = 16  # of the same rows: their blocks run at the same time, and wait for each other
# Blocks of a launch start in order, as far as has been seen; so it holds at most one row's blocks
# that wait for others to start, and this many launches at a time cannot fill the GPU with them.
LAUNCHES = 8
SMALL_BYTES = 2048  # room for barriers, and for what layouts are converted through
BUFFER_BYTES = 2 * TILE * TILE * 2  # results of two consumers on their way out
STAGE_BYTES = 2 * TILE * ROW_BYTES


def fits(problem: Problem) -> str | None:
    made = _sum(problem)
    if made is None:
        return "quantized values alone, of a sum without a residual"
    if made.dtype not in SIXTEEN_BIT:
        return f"normalizes 16-bit numbers, not {made.dtype}"
    for name, meta in zip(problem.attrs["results"], problem.outputs, strict=True):
        if meta.format != "contiguous" or (name != "codes" and meta.dtype != made.dtype):
            return f"dense results, of {made.dtype} but for quantized values"
    refused = wgmma.fits(_linear(problem, made))
    if refused:
        return refused
    product = sizes(_linear(problem, made))
    most = min(MOST_TILES, multiprocessors() // LAUNCHES)
    if product.n % TILE or product.n // TILE > most:
        return f"rows of a multiple of {TILE} numbers, up to {most * TILE}, not {product.n}"
    if problem["input"].dtype in FP8 and not problem.attr("fast_accumulation"):
        return "fp8 is summed in the tensor cores here (fast_accumulation)"
    if problem["input"].dtype == "float32":
        return "16-bit and 8-bit factors only"
    for name in ("norm_weight", "norm_bias"):
        vector = problem.get(name)
        if not problem.is_constant(name):
            return "the norm's weight and bias are constants"
        if vector is None or vector.shape != (product.n,) or vector.dtype not in FLOATS:
            return "the norm's weight and bias are vectors of floating numbers, one a column"
    scale = problem.get("code_scale")
    if scale is not None and scale.shape not in ((), (1,)):
        return "quantized values have one scale"
    return None


def _sum(problem: Problem) -> TensorMeta | None:
    """The tensor whose rows are normalized: a result, or like the residual; None if neither is."""
    for name, meta in zip(problem.attrs["results"], problem.outputs, strict=True):
        if name != "codes":
            return meta
    return problem.get("residual")


def _linear(problem: Problem, made: TensorMeta) -> Problem:
    """The product alone."""
    attrs = {k: v for k, v in problem.attrs.items() if k not in OWN_ATTRS}
    product = operation("linear")
    return replace(
        problem,
        op="linear",
        inputs=tuple(map(problem.get, product.operands)),
        outputs=(made,),
        attrs=attrs,
        constant=product.positions(n for n in problem.constants if n in product.operands),
    )


def configs(problem: Problem) -> tuple[Config, ...]:
    """One configuration: what two consumers can hold, and as many stages as have room."""
    room = HOPPER.shared_bytes_of_block() - BUFFER_BYTES - SMALL_BYTES
    return ({"stages": room // STAGE_BYTES},)


def workspace_bytes(problem: Problem, **config: Any) -> int:
    """Room for what each tile knows of its rows: two float32 a row."""
    made = _sum(problem)
    assert made is not None
    product = sizes(_linear(problem, made))
    return 2 * 4 * -(-product.m // TILE) * TILE * _slots(product.n // TILE)


def _slots(tiles: int) -> int:
    return max(4, power_of_two(tiles))  # 4: what a thread reads at once


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    made = _sum(problem)
    assert made is not None
    product = sizes(_linear(problem, made))
    m, n, k = product.m, product.n, product.k
    m_tiles, n_tiles, slots = -(-m // TILE), n // TILE, _slots(n // TILE)
    width = ROW_BYTES // problem["input"].itemsize
    weight, norm_weight = map(problem.operation.position, ("weight", "norm_weight"))
    ready = with_packed(constants, ("dense rows", False), wgmma.dense, weight)
    box, piece = [1, TILE, width], [1, TILE, PIECE]
    # a round's tiles of the same rows are the same blocks', side by side
    blocks = min(m_tiles, multiprocessors() // n_tiles) * n_tiles
    device = constants[norm_weight].device
    counters = torch.zeros(m_tiles, dtype=torch.int32, device=device)  # all launches go on counting

    def call(*inputs: torch.Tensor, workspace: torch.Tensor) -> Any:
        operands = problem.operands(ready, inputs)
        a, b, bias, residual, scale, *norm = (*operands, None)[:8]
        residual = None if problem.epilogue.beta == 0 else residual
        assert a is not None
        assert b is not None
        outs = tuple(meta.empty(a.device) for meta in problem.outputs)
        tiles = {
            name: wgmma.matrix_tiles(out, (m, n), piece)
            for name, out in zip(problem.attrs["results"], outs, strict=True)
        }
        launch(
            multiply_and_normalize,
            (blocks,),
            wgmma.matrix_tiles(a, (m, k), box),
            wgmma.matrix_tiles(b, (n, k), box),
            tiles.get("sum"),
            tiles.get("norm"),
            tiles.get("codes"),
            None if residual is None else wgmma.matrix_tiles(residual, (m, n), piece),
            (scale, bias, problem.gamma),
            (*norm, float(problem.attr("eps"))),
            workspace.view(torch.float32),
            counters,
            m_tiles * n_tiles,
            m_tiles,
            n_tiles,
            -(-k // width),
            FORM=Form(
                WM=TILE,
                WN=TILE,
                BK=width,
                A_K_MAJOR=True,
                B_K_MAJOR=True,
                STAGES=(config or configs(problem)[0])["stages"],
                GROUP=1,
                SPREAD=False,
                LET_START=m_tiles * n_tiles <= blocks,
            ),
            SLOTS=slots,
            EPILOGUE=Epilogue(
                ALPHA=float(problem.epilogue.alpha),
                BETA=float(problem.epilogue.beta),
                ACTIVATION=problem.epilogue.activation,
            ),
            num_warps=4,
            launch_pdl=True,
        )
        return outs if len(outs) > 1 else outs[0]

    return call
