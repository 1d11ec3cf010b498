"""``interpolate`` of pictures by torch, into the given buffer: channels_last as it lies there.

The nearest pixel, or a mix of four; sizes are known when a plan is built.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    if problem.constant or not x.has(y.format):
        return "keeps the format of its input"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    size, align_corners = list(problem.output.shape[2:]), bool(problem.attrs["align_corners"])
    if problem.attrs["mode"] == "nearest":
        nearest = torch.ops.aten.upsample_nearest2d.out
        return lambda x, *, out: nearest(x, size, out=out)
    bilinear = torch.ops.aten.upsample_bilinear2d.out
    return lambda x, *, out: bilinear(x, size, align_corners, out=out)
