"""Matrix products by torch (cuBLAS, oneDNN or MKL under it), written into the given buffer.

One addend goes into the product's own call (β · C, or the bias); the rest of the epilogue follows
in place, in the result's element type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tessella.core.dtype import FP8
from tessella.kernels.catalog import Call
from tessella.kernels.shared.matrix_product import b_by_rows, sides
from tessella.operations.epilogue import Epilogue, finish_
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    a, b = sides(problem)
    if a.dtype in ("int8", *FP8):
        return f"torch's plain products have no {a.dtype}"
    if {a.dtype, b.dtype} != {problem.output.dtype}:
        return "one element type throughout"
    if problem.output.format != "contiguous":
        return "makes contiguous"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    transpose_a = bool(problem.attr("transpose_a"))
    transpose_b = b_by_rows(problem)
    product = _product(problem)
    dtype = getattr(torch, problem.output.dtype)
    alpha, beta = problem.epilogue.alpha, problem.epilogue.beta
    ending = problem.epilogue.without("alpha")

    def call(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        tensors = problem.operands(constants, inputs)
        a, b, bias, residual, scale = (*tensors, None, None, None)[:5]
        assert a is not None
        assert b is not None
        a, b = (a.mT if transpose_a else a), (b.mT if transpose_b else b)
        residual = None if beta == 0 else residual
        if scale is not None or (bias is None and residual is None):
            product(a, b, None, out, alpha, 0.0)
        elif bias is not None and bias.dtype == dtype:
            product(a, b, bias, out, alpha, 1.0)
            bias = None
        elif bias is None and residual is not None and residual.dtype == dtype:
            product(a, b, residual, out, alpha, beta)
            residual = None
        else:
            product(a, b, None, out, alpha, 0.0)
        return finish_(out, ending.of(bias, residual, scale))

    return call


Product = Callable[..., None]


def _product(problem: Problem) -> Product:
    """The function for these shapes: (a, b, addend, out, alpha, beta) → into out.

    An addend is like the result, or a vector for every row, or None.
    """
    a, b = (side.shape for side in sides(problem))
    if len(a) == len(b) == 2:
        return _mm
    if len(b) == 2 and not problem.attr("transpose_a"):
        return _mm_of_rows
    return _bmm if len(a) > 2 and a[:-2] == b[:-2] else _broadcast


Tensor = torch.Tensor


def _mm(
    a: Tensor, b: Tensor, addend: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    if addend is None and alpha == 1:
        torch.mm(a, b, out=out)
    elif addend is None:
        torch.addmm(out, a, b, beta=0, alpha=alpha, out=out)  # with β = 0, C is not read
    else:
        torch.addmm(addend, a, b, beta=beta, alpha=alpha, out=out)


def _mm_of_rows(
    a: Tensor, b: Tensor, addend: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    """A's leading axes are rows of one product."""
    columns = b.shape[1]
    if addend is not None and addend.dim() > 1:
        addend = addend.reshape(-1, columns)
    _mm(a.reshape(-1, b.shape[0]), b, addend, out.view(-1, columns), alpha, beta)


def _bmm(
    a: Tensor, b: Tensor, addend: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    a, b, target = (t.flatten(0, -3) for t in (a, b, out))
    if addend is None:
        torch.bmm(a, b, out=target)
        target.mul_(alpha)
        return
    addend = addend if addend.dim() == 1 else addend.reshape(target.shape)
    torch.baddbmm(addend, a, b, beta=beta, alpha=alpha, out=target)


def _broadcast(
    a: Tensor, b: Tensor, addend: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    torch.matmul(a, b, out=out)
    finish_(out, Epilogue(residual=addend, alpha=alpha, beta=beta))
