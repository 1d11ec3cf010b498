"""Linear of int8 by oneDNN through torch: scale, bias, residual, relu and requantize fused.

Activations go as uint8, 128 more: int8 ones are multiplied by oneDNN's reference, a thousand times
slower (2048 → 1000, one row: 64 ms against 0.05).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tessella.device.packing import onednn_layout, packed
from tessella.kernels.catalog import Call
from tessella.kernels.shared.onednn import (
    SHIFT,
    int8_refusal,
    must_split,
    narrow_weight,
    scales,
    shifted,
)
from tessella.operations.epilogue import finish_
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    x = problem["input"]
    tensors = (x, problem.output, problem.get("residual"))
    if len(x.shape) < 2 or any(t and t.format != "contiguous" for t in tensors):
        return "needs contiguous rows"
    return int8_refusal(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    shape, columns = problem.output.shape, problem.output.shape[-1]
    activation, beta = problem.epilogue.activation, problem.epilogue.beta
    ending = problem.epilogue
    scale, zeros = scales(problem, constants)
    bias = constants.get(2)
    split = must_split(constants[1])
    rows = [problem.output.shape[0], problem["input"].shape[-1] * (2 if split else 1)]
    weight = packed(
        constants[1],
        ("linear.onednn_int8", split),
        lambda w: torch.ops.onednn.qlinear_prepack(narrow_weight(w, split).contiguous(), rows),
        layout=onednn_layout,
    )
    stored = getattr(torch, problem.output.dtype)
    small = stored == torch.int8
    plain: Callable[..., torch.Tensor] = torch.ops.onednn.qlinear_pointwise.default
    summed: Callable[..., torch.Tensor] = torch.ops.onednn.qlinear_pointwise.binary

    def linear(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x = x.view(-1, x.shape[-1])
        x = shifted(torch.cat((x, x), 1) if split else x)
        if small and residual is not None:
            into = residual.view(-1, columns).clone()  # it is overwritten
            made = summed(
                x, 1.0, SHIFT, weight, scale, zeros, into, bias, 1.0, 0, stored, beta, 0,
                "sum", 1.0, activation or "none", [], "",
            )  # fmt: skip
            return made.view(shape)
        inside = activation if activation == "relu" and residual is None else None
        made = plain(
            x, 1.0, SHIFT, weight, scale, zeros, bias, 1.0, 0, stored, inside or "none", [], ""
        ).view(shape)
        if residual is None and inside == activation:
            return made
        return finish_(made, ending.of(residual=residual))

    return linear
