"""``interpolate`` of pictures by torch, into the given buffer: channels_last as it lies there.

The nearest pixel, or a mix of four; sizes are known when a plan is built.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem

MODES = ("nearest", "bilinear")


def fits(problem: Problem) -> str | None:
    x, y, attrs = problem["input"], problem.output, problem.attrs
    if len(x.shape) != 4 or attrs["mode"] not in MODES or attrs["antialias"]:
        return f"pictures alone, {' or '.join(MODES)}, without antialiasing"
    scales = attrs["scale_factor"] if attrs["size"] is None else None
    if scales and any(n * scale != m for n, m, scale in zip(x.shape[2:], y.shape[2:], scales)):
        return "a scale that makes no whole size decides by itself where pixels lie"
    if x.dtype == "int8" and attrs["mode"] != "nearest":
        return "int8 of the nearest pixel alone"
    if problem.constant or not x.has(y.format):
        return "keeps the format of its input"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    size, align_corners = list(problem.output.shape[2:]), bool(problem.attrs["align_corners"])
    if problem.attrs["mode"] == "nearest":
        nearest = torch.ops.aten.upsample_nearest2d.out
        if problem["input"].dtype == "int8":
            return functools.partial(_bytes, nearest, size)
        return lambda x, *, out: nearest(x, size, out=out)
    bilinear = torch.ops.aten.upsample_bilinear2d.out
    return lambda x, *, out: bilinear(x, size, align_corners, out=out)


def _bytes(
    nearest: Callable[..., Any], size: list[int], x: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    """int8 as uint8, whose bytes torch copies."""
    nearest(x.view(torch.uint8), size, out=out.view(torch.uint8))
    return out
