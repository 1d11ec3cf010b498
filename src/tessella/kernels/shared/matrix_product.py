"""A matrix product by its sizes, whatever the operation's name, transposes and leading axes.

``out[b] = epilogue(A[b] · B[b])`` with A [M, K], B [K, N], out [M, N]; B may be shared by all b.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from tessella.core.dtype import FLOATS, FP8
from tessella.core.integers import ceil_div
from tessella.device.machine import multiprocessors
from tessella.operations.epilogue import Epilogue
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

Tile = TypeVar("Tile", bound=tuple[int, ...])

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
    """Views of three axes: a [batch, M, K], b [batch, K, N], out and a residual [batch, M, N]."""

    a: torch.Tensor
    b: torch.Tensor
    epilogue: Epilogue[torch.Tensor]
    out: torch.Tensor


def second(problem: Problem) -> str:
    """The name of B among the operands: a layer's weight, or the other matrix of a ``matmul``."""
    return "other" if problem.op == "matmul" else "weight"


def sides(problem: Problem) -> tuple[TensorMeta, TensorMeta]:
    """A and B as they are given, perhaps transposed."""
    return problem["input"], problem[second(problem)]


def a_by_rows(problem: Problem) -> bool:
    """Whether A lies as [M, K]."""
    return not problem.attr("transpose_a")


def b_by_rows(problem: Problem) -> bool:
    """Whether B lies as [N, K]."""
    return problem.op == "linear" or bool(problem.attr("transpose_b"))


def sizes(problem: Problem) -> Sizes:
    """The sizes of a problem that ``refusal`` let pass."""
    a, b = (side.shape for side in sides(problem))
    m, k = a[-2:][::-1] if problem.attr("transpose_a") else (a[-2:] if len(a) > 1 else (1, a[-1]))
    n = b[-2] if b_by_rows(problem) else b[-1]
    shared = len(b) == 2
    batch = math.prod(a[:-2])
    folded = shared and not problem.attr("transpose_a") and _dense(problem)
    if folded:
        batch, m = 1, math.prod(a[:-1])
    return Sizes(batch=batch, m=m, n=n, k=k, folded=folded, shared=shared)


def refusal(problem: Problem) -> str | None:
    """Why no kernel over ``Operands`` can do it: types, axes and formats."""
    a, b = sides(problem)
    if a.dtype != b.dtype and not {a.dtype, b.dtype} <= set(FP8):
        return f"one element type on both sides, not {a.dtype} × {b.dtype}"
    if problem.output.dtype not in OUTPUTS.get(a.dtype, ()):
        return f"{a.dtype} products are not stored as {problem.output.dtype}"
    if problem.output.dtype == "int32" and not problem.epilogue.is_empty:
        return "int32 is the plain product: no scale, bias, residual, alpha or activation"
    if len(b.shape) < 2 or len(a.shape) < (2 if problem.op == "matmul" else 1):
        return "a vector is not a matrix"
    if len(b.shape) > 2 and (problem.op == "linear" or a.shape[:-2] != b.shape[:-2]):
        return f"leading axes must be equal or absent in b, not {a.shape} × {b.shape}"
    tensors = (a, b, problem.output, problem.get("residual"))
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
    a, b, epilogue = problem.product_operands(constants, inputs)
    a = a.mT if problem.attr("transpose_a") else a
    b = b.mT if b_by_rows(problem) else b

    def stack(x: torch.Tensor, columns: int) -> torch.Tensor:
        if made.folded:
            return x.view(1, made.m, columns)
        return x.view(made.batch, *x.shape[-2:]) if x.dim() != 3 else x

    return Operands(
        a=stack(a, made.k),
        b=b[None].expand(made.batch, -1, -1) if made.shared else stack(b, made.n),
        epilogue=epilogue
        if epilogue.residual is None
        else replace(epilogue, residual=stack(epilogue.residual, made.n)),
        out=stack(out, made.n),
    )


def ranked(tiles: Iterable[Tile], made: Sizes, loading: int) -> list[Tile]:
    """Tiles by estimated time, rows and columns first in each: rounds of blocks, times what one
    multiplies, and ``loading`` for each number of both its edges.
    """

    def cost(tile: Tile) -> int:
        blocks = made.batch * ceil_div(made.m, tile[0]) * ceil_div(made.n, tile[1])
        rounds = ceil_div(blocks, multiprocessors())
        return rounds * (tile[0] * tile[1] + loading * (tile[0] + tile[1]))

    return sorted(tiles, key=cost)


def arguments(problem: Problem, o: Operands, made: Sizes) -> tuple[Any, ...]:
    """What a kernel over ``Operands`` is launched with; the strides are the last but one."""
    added = o.epilogue
    return (
        o.a, o.b, added.bias, added.residual, added.scale, o.out, (made.m, made.n, made.k),
        (o.a.stride(), o.b.stride(), strides(o), o.out.stride()), problem.factors,
    )  # fmt: skip


def strides(o: Operands) -> tuple[int, ...]:
    """The strides of bias, residual (three) and scale; zeros where there is none."""
    added = o.epilogue
    return (
        0 if added.bias is None else added.bias.stride(0),
        *((0, 0, 0) if added.residual is None else added.residual.stride()),
        0 if added.scale is None else added.scale.stride(0),
    )


def _dense(problem: Problem) -> bool:
    """Whether A, the residual and the result can be seen as one matrix of rows."""
    tensors = (problem["input"], problem.get("residual"), problem.output)
    return all(t is None or len(t.shape) == 2 or t.format == "contiguous" for t in tensors)
