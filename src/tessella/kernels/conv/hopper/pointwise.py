"""A 1×1 convolution by the kernels of ``gemm``, on views of its tensors.

They have no taps to walk and no image to stay inside, and tilings that fit a matrix of any number
of rows. It is the one convolution that is another family's special case; it finds their rows in the
catalog.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tessella.kernels import catalog
from tessella.kernels.catalog import Call, Config, Kernel
from tessella.kernels.shared.pointwise_convolution import linear_of, matrix, refusal
from tessella.operations.problem import Problem

# What may multiply, and how many of its configurations are tried. The one that streams the weights
# takes few pixels only; where it does, it comes first.
BY = {
    "skinny": (catalog.kernel("linear.skinny.sm90"), 4),
    "wgmma": (catalog.kernel("linear.wgmma.sm90"), 8),
}


def fits(problem: Problem) -> str | None:
    if (refused := refusal(problem)) is not None:
        return refused
    refusals = [_refusal(row, linear_of(problem)) for row, _ in BY.values()]
    return None if None in refusals else refusals[-1]


def _refusal(row: Kernel, product: Problem) -> str | None:
    if product.epilogue.floor != 0 and not row.floor:
        return "its ReLU knows no floor but 0"
    return row.load().fits(product)


def configs(problem: Problem) -> tuple[Config, ...]:
    product = linear_of(problem)
    return tuple(
        {"by": name, **config}
        for name, (row, most) in BY.items()
        if _refusal(row, product) is None
        for config in row.configs(product)[:most]
    )


def workspace_bytes(problem: Problem, *, by: str, **config: Any) -> int:
    return BY[by][0].workspace_bytes(linear_of(problem), config)


def bind(
    problem: Problem, constants: Mapping[int, torch.Tensor], *, by: str, **config: Any
) -> Call:
    matrices = {i: matrix(tensor) for i, tensor in constants.items()}
    multiply = BY[by][0].load().bind(linear_of(problem), matrices, **config)

    def convolve(*inputs: torch.Tensor, out: torch.Tensor, **workspace: torch.Tensor) -> Any:
        multiply(*map(matrix, inputs), out=matrix(out), **workspace)
        return out

    return convolve
