"""A matrix product by its sizes, whatever the operation's name, transposes and leading axes.

``out[b] = epilogue(A[b] · B[b])`` with A [M, K], B [K, N], out [M, N]; B may be shared by all b.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tessella.core.dtype import FLOATS, FP8
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

OUTPUTS = {
    "float32": FLOATS,
    "float16": (*FLOATS, "int8", *FP8),
    "bfloat16": (*FLOATS, "int8", *FP8),
    "int8": (*FLOATS, "int8", "int32"),
    **dict.fromkeys(FP8, (*FLOATS, *FP8)),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a batch of products.

    Attributes:
        folded: A's leading axes are rows of one product, because B is shared.
        shared: B has no leading axes.
    """

    batch: int
    m: int
    n: int
    k: int
    folded: bool
    shared: bool


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Views of three axes: a [batch, M, K], b [batch, K, N], out and residual [batch, M, N]."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    scale: torch.Tensor | None
    out: torch.Tensor


def sizes(problem: Problem) -> Sizes:
    """The sizes of a problem that ``refusal`` let pass."""
    a, b = problem.inputs[0].shape, problem.inputs[1].shape
    m, k = a[-2:][::-1] if problem.attr("transpose_a") else (a[-2:] if len(a) > 1 else (1, a[-1]))
    n = b[-2] if _b_by_rows(problem) else b[-1]
    shared = len(b) == 2
    batch = math.prod(a[:-2])
    folded = shared and not problem.attr("transpose_a") and _dense(problem)
    if folded:
        batch, m = 1, math.prod(a[:-1])
    return Sizes(batch=batch, m=m, n=n, k=k, folded=folded, shared=shared)


def refusal(problem: Problem) -> str | None:
    """Why no kernel over ``Operands`` can do it: types, axes and formats."""
    a, b = problem.inputs[:2]
    if a.dtype != b.dtype and not {a.dtype, b.dtype} <= set(FP8):
        return f"one element type on both sides, not {a.dtype} × {b.dtype}"
    if problem.output.dtype not in OUTPUTS.get(a.dtype, ()):
        return f"{a.dtype} products are not stored as {problem.output.dtype}"
    if problem.output.dtype == "int32" and has_epilogue(problem):
        return "int32 is the plain product: no scale, bias, residual, alpha or activation"
    if len(b.shape) < 2 or len(a.shape) < (2 if problem.op == "matmul" else 1):
        return "a vector is not a matrix"
    if len(b.shape) > 2 and (problem.op == "linear" or a.shape[:-2] != b.shape[:-2]):
        return f"leading axes must be equal or absent in b, not {a.shape} × {b.shape}"
    tensors = (a, b, problem.output, problem.meta(3))
    if any(t and len(t.shape) not in (2, 3) and t.format != "contiguous" for t in tensors):
        return "tensors of neither two nor three axes must be contiguous"
    return None


def operands(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> Operands:
    """The tensors of a call as views; nothing is copied."""
    made = sizes(problem)
    a, b, bias, residual, scale = (*problem.operands(constants, inputs), None, None, None)[:5]
    a = a.mT if problem.attr("transpose_a") else a
    b = b.mT if _b_by_rows(problem) else b

    def stack(x: torch.Tensor, columns: int) -> torch.Tensor:
        if made.folded:
            return x.view(1, made.m, columns)
        return x.view(made.batch, *x.shape[-2:]) if x.dim() != 3 else x

    return Operands(
        a=stack(a, made.k),
        b=b[None].expand(made.batch, -1, -1) if made.shared else stack(b, made.n),
        bias=bias,
        residual=None
        if residual is None or problem.epilogue.beta == 0
        else stack(residual, made.n),
        scale=scale,
        out=stack(out, made.n),
    )


def strides(o: Operands) -> tuple[int, ...]:
    """Of bias, residual (three) and scale; zeros where there is none."""
    return (
        0 if o.bias is None else o.bias.stride(0),
        *((0, 0, 0) if o.residual is None else o.residual.stride()),
        0 if o.scale is None else o.scale.stride(0),
    )


def has_epilogue(problem: Problem) -> bool:
    """Whether anything but the product itself is asked for."""
    present = any(problem.meta(i) is not None for i in (2, 3, 4))
    factors = (problem.epilogue.alpha, problem.epilogue.gamma)
    return present or factors != (1, 1) or problem.epilogue.activation is not None


def _b_by_rows(problem: Problem) -> bool:
    """Whether B lies as [N, K]."""
    return problem.op == "linear" or bool(problem.attr("transpose_b"))


def _dense(problem: Problem) -> bool:
    """Whether A, the residual and the result can be seen as one matrix of rows."""
    tensors: tuple[TensorMeta | None, ...] = (problem.inputs[0], problem.meta(3), problem.output)
    return all(t is None or len(t.shape) == 2 or t.format == "contiguous" for t in tensors)
