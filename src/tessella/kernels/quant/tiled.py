"""``quantize`` and ``dequantize`` in plain Triton: one pass over memory, the scale one number."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tessella.core.dtype import FLOATS
from tessella.device.launch import launch
from tessella.device.overlap import await_earlier, overlapping
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.triton_device import cast, quotient
from tessella.kernels.quant import aten
from tessella.operations.problem import Problem

BLOCK = 4096
SMALL = ("int8", "float8_e4m3fn")


def fits(problem: Problem) -> str | None:
    x, out = problem["input"], problem.output
    floating, small = (x, out) if problem.op == "quantize" else (out, x)
    if floating.dtype not in FLOATS or small.dtype not in SMALL:
        return f"does not make {out.dtype} of {x.dtype}"
    if "strided" in (x.format, out.format) or not x.has(out.format):
        return "both sides dense, in one format"
    given = (problem["scale"], problem.get("zero_point"))
    if any(meta is not None and meta.shape not in ((), (1,)) for meta in given):
        return "one scale for all"
    if 0 in x.shape or x.nbytes >= 2**31:
        return "empty, or 2 GiB and more"
    return aten.fits(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    scale = constants[1].reshape(1).float()
    zero = constants[2].reshape(1).float() if 2 in constants else None
    kernel = _quantize if problem.op == "quantize" else _dequantize

    def call(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        count = x.numel()
        launch(
            kernel, (triton.cdiv(count, BLOCK),), x, out, scale, zero, count,
            BLOCK=BLOCK, num_warps=8, **overlapping(),
        )  # fmt: skip
        return out

    return call


@triton.jit
def _quantize(x, out, scale, zero, count, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    await_earlier(OVERLAP)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + i, mask=i < count, other=0.0).to(tl.float32)
    numbers = quotient(numbers, tl.load(scale + tl.zeros([1], tl.int32)))
    if zero is not None:
        # rounded first: with an odd zero point a tie would fall the other way
        numbers = tl.where(numbers > 1e6, 1e6, tl.where(numbers < -1e6, -1e6, numbers))
        numbers = (numbers + 12582912.0) - 12582912.0 + tl.load(zero)
    tl.store(out + i, cast(numbers, out.dtype.element_ty), mask=i < count)


@triton.jit
def _dequantize(x, out, scale, zero, count, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    await_earlier(OVERLAP)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + i, mask=i < count, other=0.0).to(tl.float32)
    if zero is not None:
        numbers -= tl.load(zero)
    tl.store(out + i, (numbers * tl.load(scale)).to(out.dtype.element_ty), mask=i < count)
