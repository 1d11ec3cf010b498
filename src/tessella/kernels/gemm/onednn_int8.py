"""Linear of int8 by oneDNN through torch: scale, bias, residual, relu and requantize fused.

Activations go as uint8, 128 more: int8 ones are multiplied by oneDNN's reference, a thousand times
slower (2048 → 1000, one row: 64 ms against 0.05).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.device.packing import onednn_layout, packed
from tessella.kernels.catalog import Call
from tessella.kernels.shared.onednn import (
    int8_layer,
    int8_refusal,
    must_split,
    narrow_weight,
    shifted,
    zero_point,
)
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    x = problem["input"]
    tensors = (x, problem.output, problem.get("residual"))
    if len(x.shape) < 2 or any(t and t.format != "contiguous" for t in tensors):
        return "needs contiguous rows"
    return int8_refusal(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    shape, columns = problem.output.shape, problem.output.shape[-1]
    split, zero = must_split(problem, constants[1]), zero_point(problem)
    rows = [problem.output.shape[0], problem["input"].shape[-1] * (2 if split else 1)]
    weight = packed(
        constants[1],
        ("linear.onednn_int8", split),
        lambda w: torch.ops.onednn.qlinear_prepack(narrow_weight(w, split).contiguous(), rows),
        layout=onednn_layout,
    )
    operators = torch.ops.onednn.qlinear_pointwise
    layer = int8_layer(problem, constants, operators, weight, nothing=("none", ""))

    def linear(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x = x.view(-1, x.shape[-1])
        added = None if residual is None else residual.view(-1, columns)
        return layer(shifted(torch.cat((x, x), 1) if split else x, zero), added).view(shape)

    return linear
