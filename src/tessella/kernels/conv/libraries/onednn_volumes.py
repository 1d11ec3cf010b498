"""Convolution of volumes by oneDNN, which torch asks for many threads and large batches alone.

On one thread of a Xeon with AVX-512 a 3³ convolution of 8 to 64 channels over 8 × 16² to 32 × 64²
took torch's own way 8 to 50 times as long: 71.4 ms and 1.43 ms from 16 to 8 channels at 16 × 32².
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.kernels.conv.libraries import aten
from tessella.kernels.shared.onednn import type_refusal
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    if problem.plain:
        return problem.plain
    dtype, narrow = problem["input"].dtype, problem.output.shape[-1] == 1
    if dtype == "bfloat16" and narrow and problem.attrs["stride"][-1] > 1:  # see conv_volumes
        return "reads what nobody wrote: bfloat16, a result one wide, a stride along the width"
    return type_refusal({dtype}) or aten.fits(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    return aten.bound(problem, constants, _convolve)


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    return torch.mkldnn_convolution(x, weight, bias, padding, stride, dilation, groups)
