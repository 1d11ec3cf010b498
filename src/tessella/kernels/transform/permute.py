"""Permute: a view with other strides; no element moves. NHWC as [N, C, H, W] is channels_last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import Format


def fits(problem: Problem) -> str | None:
    if problem.constant:
        return "takes no constants"
    made = format_of(problem["input"].format, problem.attrs["dims"])
    if problem.output.format not in ("strided", made):
        return f"makes a view, cannot make {problem.output.format}"
    return None


def format_of(format: Format, dims: Sequence[int]) -> Format:
    """The format of a tensor after its axes were permuted.

    >>> format_of("contiguous", (0, 3, 1, 2))
    'channels_last'
    """
    return _FORMATS.get((format, tuple(dims)), "strided")


_FORMATS: dict[tuple[Format, tuple[int, ...]], Format] = {
    ("contiguous", (0, 3, 1, 2)): "channels_last",
    ("channels_last", (0, 2, 3, 1)): "contiguous",
}


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    dims = tuple(problem.attrs["dims"])
    return lambda x: x.permute(dims)
