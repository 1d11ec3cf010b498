"""Layers with 2:4 weights by cuSPARSELt through torch; what its epilogue leaves out follows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.device.packing import packed
from tessella.kernels.catalog import Call, Config
from tessella.kernels.shared.matrix_product import sizes
from tessella.kernels.sparse import product
from tessella.operations.epilogue import bias_inside, finish_, store
from tessella.operations.problem import Problem

ALGORITHMS = 6  # tried; a number that the library does not know is refused when it is run
# With 401,408 rows it failed and left the context broken (H200, torch 2.11); less is known to work.
MOST_ROWS = 1 << 16
CHANNELS = {"float16": 16, "bfloat16": 16, "int8": 32}  # multiples of the output's
ROWS = {"float16": 8, "bfloat16": 8, "int8": 16}


def fits(problem: Problem) -> str | None:
    if (refused := product.refusal(problem)) is not None:
        return refused
    if not torch.backends.cusparselt.is_available():
        return "this torch comes without cuSPARSELt"
    linear = product.as_linear(problem)
    made, dtype = sizes(linear), linear["input"].dtype
    if made.n % CHANNELS[dtype]:
        return f"output channels must be a multiple of {CHANNELS[dtype]}, not {made.n}"
    if made.m % ROWS[dtype]:
        return f"rows must be a multiple of {ROWS[dtype]}, not {made.m}"
    if made.m > MOST_ROWS:
        return f"fails with very many rows and breaks the context: {MOST_ROWS} at most"
    if dtype != "int8" and linear.output.dtype != dtype:
        return f"makes {dtype} of {dtype}, not {linear.output.dtype}"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    return tuple({"alg_id": i} for i in range(ALGORITHMS))


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], *, alg_id: int = 0) -> Call:
    dtype, stored = problem["input"].dtype, getattr(torch, problem.output.dtype)
    exact = dtype == "int8"  # 32-bit sums, and the whole epilogue after them
    weight = packed(
        constants[1],
        ("cusparselt",),
        lambda w: torch._cslt_compress(w.reshape(len(w), -1).contiguous()),
    )

    def call(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        x, epilogue = product.matrices(problem, constants, inputs)
        inside, rest = bias_inside(epilogue, x.dtype)  # the library adds no bias of int8
        sums = torch._cslt_sparse_mm(
            weight,
            x.t(),
            bias=inside,
            out_dtype=torch.int32 if exact else None,
            transpose_result=True,
            alg_id=alg_id,
        )
        if stored != torch.int32:
            sums = finish_(sums.float() if exact else sums, rest)
        product.matrix(problem, out).copy_(store(sums, stored))
        return out

    return call
