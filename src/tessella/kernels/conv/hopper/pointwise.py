"""A 1×1 convolution as the matrix product that it is: pixels × channels times channels × filters.

In NHWC nothing moves: the kernels of ``gemm`` run on views. They have no taps to walk and no image
to stay inside, and tilings that fit a matrix of any number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tessella.kernels import catalog
from tessella.kernels.catalog import Call, Config
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

# What may multiply, and how many of its configurations are tried. The one that streams the weights
# takes few pixels only; where it does, it comes first.
BY = {
    "skinny": (catalog.kernel("linear.skinny.sm90"), 4),
    "wgmma": (catalog.kernel("linear.wgmma.sm90"), 8),
}


def fits(problem: Problem) -> str | None:
    if (refused := refusal(problem)) is not None:
        return refused
    refusals = [row.load().fits(product_of(problem)) for row, _ in BY.values()]
    return None if None in refusals else refusals[-1]


def refusal(problem: Problem) -> str | None:
    """Why a convolution is no matrix product of its tensors as they lie, or None."""
    x, weight, a = problem.inputs[0], problem.inputs[1], problem.attrs
    if len(x.shape) != 4 or weight.shape[2:] != (1, 1):
        return "1×1 filters only"
    if tuple(a["stride"]) != (1, 1) or tuple(a["padding"]) != (0, 0) or a["groups"] != 1:
        return "no stride, padding or groups: they are no part of a matrix product"
    pixels = (x, problem.output, problem.meta(3))
    if not all(meta is None or meta.has("channels_last") for meta in pixels):
        return "input, output and residual must be channels_last"
    if weight.format == "strided":
        return "the weight must be dense"
    return "empty" if 0 in x.shape else None


def product_of(problem: Problem) -> Problem:
    """The same numbers as ``linear``: [pixels, C] × [K, C] → [pixels, K]."""
    weight = TensorMeta(shape=problem.inputs[1].shape[:2], dtype=problem.inputs[1].dtype)
    keep = ("activation", "alpha", "beta", "gamma", "fast_accumulation", "sparsity")
    return Problem(
        op="linear",
        inputs=(_rows_of(problem.meta(0)), weight, problem.meta(2), _rows_of(problem.meta(3)),
                problem.meta(4)),
        outputs=(_rows_of(problem.output),),
        attrs={name: value for name, value in problem.attrs.items() if name in keep},
        constant=problem.constant,
        math=problem.math,
    )  # fmt: skip


def _rows_of(meta: TensorMeta | None) -> TensorMeta | None:
    """Pixels as rows."""
    if meta is None:
        return None
    n, channels, *spatial = meta.shape
    return replace(meta, shape=(n * math.prod(spatial), channels), format="contiguous")


def configs(problem: Problem) -> tuple[Config, ...]:
    product = product_of(problem)
    return tuple(
        {"by": name, **config}
        for name, (row, most) in BY.items()
        if row.load().fits(product) is None
        for config in row.configs(product)[:most]
    )


def workspace_bytes(problem: Problem, *, by: str, **config: Any) -> int:
    return BY[by][0].workspace_bytes(product_of(problem), config)


def bind(
    problem: Problem, constants: Mapping[int, torch.Tensor], *, by: str, **config: Any
) -> Call:
    matrices = {i: matrix(tensor) for i, tensor in constants.items()}
    multiply = BY[by][0].load().bind(product_of(problem), matrices, **config)

    def convolve(*inputs: torch.Tensor, out: torch.Tensor, **workspace: torch.Tensor) -> Any:
        multiply(*map(matrix, inputs), out=matrix(out), **workspace)
        return out

    return convolve


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A view [pixels, C] of an image, [K, C] of a weight; a vector as it is."""
    if tensor.dim() != 4:
        return tensor
    return tensor.permute(0, 2, 3, 1).reshape(-1, tensor.shape[1])
