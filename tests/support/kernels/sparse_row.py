"""A kernel for 2:4 linear layers on the CPU: the catalog's sparse rows need a GPU.

``with registered():`` puts it into the catalog.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from tessella.kernels import catalog
from tessella.kernels.sparse import product
from tessella.kernels.sparse.two_four import FOUR, TWO_FOUR, Compressed, compress
from tessella.operations.problem import Problem
from tessella.operations.table import operation

ID = "linear.sparse_on_cpu"


def fits(problem: Problem) -> str | None:
    if not problem.is_constant("weight") or problem.attr("sparsity") != TWO_FOUR:
        return "the weight is not 2:4 sparse"
    return None if "float" in problem["input"].dtype else product.refusal(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> catalog.Call:
    compressed = compress(constants[1])

    def call(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        operands = problem.operands(constants, inputs)
        operands[1] = decompress(compressed)
        return out.copy_(operation(problem.op).call(operands, problem.attrs)[0])

    return call


@contextmanager
def registered(*, unproven: bool = False) -> Iterator[str]:
    catalog.register(
        catalog.Kernel(
            id=ID, op="linear", module=__name__, targets=("cpu",), source="test",
            sparse=True, unproven=unproven,
        )
    )  # fmt: skip
    try:
        yield ID
    finally:
        catalog.unregister(ID)


def decompress(compressed: Compressed) -> torch.Tensor:
    """The matrix [N, K] with its zeros."""
    places = compressed.places.long()
    both = torch.stack([places & 3, places >> 2], -1)
    values = compressed.values.view(*both.shape)
    fours = values.new_zeros(*places.shape, FOUR).scatter_(-1, both, values)
    return fours.view(len(values), -1)
