"""Matrix products by cuBLASLt through torch: float with bias and ReLU or tanh-GELU in its epilogue,
int8 to int32, and fp8; what else the problem asks for follows element by element.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.core.dtype import FP8
from tessella.kernels.catalog import Call
from tessella.kernels.shared.matrix_product import b_by_rows, operands, refusal, sides, sizes
from tessella.operations.epilogue import finish_, store
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    refused = refusal(problem)
    if refused:
        return refused
    if problem.output.format != "contiguous":
        return "makes contiguous"
    if sizes(problem).batch != 1:
        return "one product, not a batch"
    dtype = problem["input"].dtype
    if dtype == "int8":
        return _fits_int8(problem)
    return _fits_fp8(problem) if dtype in FP8 else _fits_float(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    dtype = problem["input"].dtype
    if dtype == "int8":
        return _int8(problem, constants)
    return _fp8(problem, constants) if dtype in FP8 else _float(problem, constants)


def _fits_float(problem: Problem) -> str | None:
    epilogue = problem.epilogue
    if epilogue.bias is None:
        return "a bias must be there"
    if epilogue.residual is not None or epilogue.scale is not None:
        return "a residual or a scale is not fused"
    if epilogue.alpha != 1:
        return "alpha is not fused"
    if epilogue.activation not in ("relu", "gelu_tanh"):
        return f"fuses relu and gelu_tanh only, not {epilogue.activation}"
    if len({t.dtype for t in (*problem.inputs, problem.output) if t is not None}) > 1:
        return "one element type throughout"
    return None


def _float(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    use_gelu = problem.epilogue.activation == "gelu_tanh"
    product = torch.ops.aten._addmm_activation.out

    def call(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        o = operands(problem, constants, inputs, out)
        product(o.epilogue.bias, o.a[0], o.b[0], use_gelu=use_gelu, out=o.out[0])
        return out

    return call


def _fits_int8(problem: Problem) -> str | None:
    made = sizes(problem)
    # torch._int_mm's own conditions
    if made.m <= 16 or made.k % 8 or made.n % 8 or not made.k or not made.n:
        return f"int8 needs M > 16 and K, N multiples of 8, not {made.m}, {made.k}, {made.n}"
    return None


def _int8(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    dtype = getattr(torch, problem.output.dtype)

    def call(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        o = operands(problem, constants, inputs, out)
        if dtype == torch.int32:
            torch._int_mm(o.a[0], o.b[0], out=o.out[0])
            return out
        sums = torch._int_mm(o.a[0], o.b[0]).float()[None]
        o.out.copy_(store(finish_(sums, o.epilogue), dtype))
        return out

    return call


def _fits_fp8(problem: Problem) -> str | None:
    made, (a, b) = sizes(problem), sides(problem)
    if a.dtype == b.dtype == "float8_e5m2":
        return "cuBLASLt multiplies e5m2 with e4m3 only"
    if problem.attr("transpose_a") or not b_by_rows(problem):
        return "fp8 needs both operands with K innermost"
    if a.format == "strided" or b.format == "strided":
        return "fp8 needs dense operands"
    if made.k % 16 or made.n % 16 or 0 in (made.m, made.k, made.n):
        return f"fp8 needs K and N multiples of 16, not {made.k} and {made.n}"
    if problem.output.dtype in FP8:
        return "answers in 16 or 32 bits"
    return None


def _fp8(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    dtype = getattr(torch, problem.output.dtype)
    fast, bias = bool(problem.attr("fast_accumulation")), problem.epilogue.bias
    fuses_bias = bias is not None and bias.dtype == problem.output.dtype != "float32"
    fuses_bias = fuses_bias and problem.epilogue.scale is None
    done = ("alpha", "bias") if fuses_bias else ("alpha",)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    alpha = torch.full((), float(problem.epilogue.alpha), device=device)
    one = torch.ones((), device=device)
    # before a channel's scale a float16 holds sums up to 65504, and one product is up to 448²
    is_wide = problem.epilogue.scale is not None and dtype == torch.float16

    def call(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        o = operands(problem, constants, inputs, out)
        if is_wide:
            sums = torch._scaled_mm(
                o.a[0], o.b[0], alpha, one, out_dtype=torch.float32, use_fast_accum=fast
            )
            o.out.copy_(finish_(sums[None], o.epilogue.without(*done)))
            return out
        torch._scaled_mm(
            o.a[0], o.b[0], alpha, one, o.epilogue.bias if fuses_bias else None,
            out_dtype=dtype, use_fast_accum=fast, out=o.out[0],
        )  # fmt: skip
        finish_(o.out, o.epilogue.without(*done))
        return out

    return call
