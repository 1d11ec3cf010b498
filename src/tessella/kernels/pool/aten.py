"""Pooling by torch. The result keeps the input's format."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem

# torch counts the pixels of such a channels_last picture in its own 8 bits on a CPU.
MOST_PIXELS = 127


def fits(problem: Problem) -> str | None:
    x = problem["input"]
    if not x.has(problem.output.format):
        return f"keeps the format, cannot make {problem.output.format}"
    is_counted = problem.op == "max_pool2d" and x.dtype in ("int8", "uint8")
    if is_counted and not x.has("contiguous") and math.prod(x.shape[2:]) > MOST_PIXELS:
        return f"takes at most {MOST_PIXELS} pixels of {x.dtype} in channels_last"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    a = problem.attrs
    if problem.op == "adaptive_avg_pool2d":
        size = tuple(a["output_size"])
        return lambda x: F.adaptive_avg_pool2d(x, size)
    kernel, stride, padding = (list(a[n]) for n in ("kernel_size", "stride", "padding"))
    ceil_mode = a["ceil_mode"]
    if problem.op == "max_pool2d":
        dilation = list(a["dilation"])
        return lambda x: torch.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode)
    count_include_pad, divisor = a["count_include_pad"], a["divisor_override"]
    return lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor)
