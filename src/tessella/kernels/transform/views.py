"""Views: reshape, permute, slice, select, split, expand; no element moves.

NHWC as [N, C, H, W] is channels_last. Only a reshape copies, where a dense result cannot be a view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem
from tessella.operations.reference import transform as reference
from tessella.operations.tensor_meta import Format


def fits(problem: Problem) -> str | None:
    if problem.constant:
        return "takes no constants"
    made = {meta.format for meta in problem.outputs}
    if problem.op == "reshape":
        return "makes contiguous, or a view" if "channels_last" in made else None
    made -= {"strided"}
    if problem.op == "permute":
        made -= {format_of(problem["input"].format, problem.attrs["dims"])}
    return f"makes a view, cannot make {min(made)}" if made else None


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
    attrs = problem.attrs
    if problem.op == "slice":
        return lambda x: reference.slice(x, **attrs)
    if problem.op == "select":
        dim, index = attrs["dim"], attrs["index"]
        return lambda x: x.select(dim, index)
    if problem.op == "permute":
        dims = tuple(attrs["dims"])
        return lambda x: x.permute(dims)
    if problem.op == "split":
        sizes, dim = list(attrs["sizes"]), attrs["dim"]
        if len(sizes) == 1:
            return lambda x: x.narrow(dim, 0, sizes[0])
        return lambda x: torch.split(x, sizes, dim)
    shape = problem.output.shape
    if problem.op == "expand":
        return lambda x: x.expand(shape)
    if problem.output.format == "strided":
        return lambda x: x.view(shape)
    return lambda x: x.reshape(shape).contiguous()
