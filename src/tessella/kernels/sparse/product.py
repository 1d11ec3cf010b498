"""A sparse layer as one matrix product: which problems are one, and what their operands are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tessella.kernels.shared import pointwise_convolution
from tessella.kernels.shared.matrix_product import refusal as matrix_refusal
from tessella.kernels.shared.matrix_product import sides, sizes
from tessella.kernels.sparse.two_four import TWO_FOUR
from tessella.operations.epilogue import Epilogue
from tessella.operations.problem import Problem

MULTIPLES = {"float16": 16, "bfloat16": 16, "int8": 32}  # of the reduction: values in 16 bytes


def refusal(problem: Problem) -> str | None:
    """Why no sparse product of tensor cores can carry a layer out, or None."""
    if not problem.is_constant("weight"):
        return "the weight must be known in advance (constant_weight=True), to be compressed"
    if problem.attr("sparsity") != TWO_FOUR:
        return "the weight is not 2:4 sparse"
    if problem.op == "conv2d" and (refused := pointwise_convolution.refusal(problem)):
        return refused
    product = as_linear(problem)
    if (refused := matrix_refusal(product)) is not None:
        return refused
    (x, weight), made = sides(product), sizes(product)
    dtype = x.dtype
    if dtype not in MULTIPLES:
        return f"multiplies {', '.join(MULTIPLES)}, not {dtype}"
    tensors = (x, weight, product.output, product.get("residual"))
    if made.batch != 1 or any(t and t.format != "contiguous" for t in tensors):
        return "one product of contiguous matrices"
    if 0 in (made.m, made.n, made.k) or made.k % MULTIPLES[dtype]:
        return f"the reduction must be a multiple of {MULTIPLES[dtype]}, not {made.k}"
    return None


def as_linear(problem: Problem) -> Problem:
    """The problem itself, or a 1×1 convolution as the product that it is."""
    return problem if problem.op == "linear" else pointwise_convolution.linear_of(problem)


def matrices(
    problem: Problem, constants: Mapping[int, torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Epilogue[torch.Tensor]]:
    """The layer's input as a view [M, K], and its epilogue, with a residual as a view [M, N]."""
    operands = (*problem.operands(constants, inputs), None, None, None)[:5]
    x, _, *added = (None if t is None else matrix(problem, t) for t in operands)
    assert x is not None
    return x, problem.epilogue.of(*added)


def matrix(problem: Problem, tensor: torch.Tensor) -> torch.Tensor:
    """A view of an operand or of the result as a matrix; a vector as it is."""
    if problem.op == "conv2d":
        return pointwise_convolution.matrix(tensor)
    return tensor if tensor.dim() < 2 else tensor.view(-1, tensor.shape[-1])
