"""Convolution of int8 by oneDNN through torch: scale, bias, residual, relu and requantize fused.

torch's operator takes uint8 activations: int8 shifted by 128, which is then their zero point.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.kernels.epilogue import finish_
from tessella.kernels.packing import onednn_layout, packed
from tessella.kernels.problem import Problem

WRITES_OUT = False
SHIFT = 128


def refusal(problem: Problem) -> str | None:
    """What oneDNN's int8 layers cannot do, convolutions and linear ones alike; None if nothing."""
    x, weight, bias, residual, scale = (problem.meta(i) for i in range(5))
    out = problem.output
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    if (x.dtype, weight.dtype) != ("int8", "int8"):
        return f"multiplies int8, not {x.dtype} × {weight.dtype}"
    if out.dtype not in ("int8", "float32"):
        return f"makes int8 or float32, not {out.dtype}"
    if any(i not in problem.constant for i in (1, 2, 4) if problem.meta(i) is not None):
        return "weight, bias and scale must be constants"
    if any(t is not None and t.dtype != "float32" for t in (bias, scale)):
        return "bias and scale must be float32"
    if problem.attr("alpha") != 1:
        return "no alpha"
    if out.dtype == "int8" and problem.attr("activation") not in (None, "relu"):
        return "only relu is fused before int8"
    if residual is not None and residual.dtype != out.dtype:
        return "the residual must have the result's type"
    if 0 in (*x.shape, *out.shape):
        return "empty"
    return None


def fits(problem: Problem) -> str | None:
    tensors = (problem.inputs[0], problem.output, problem.meta(3))
    if not all(t is None or t.has("channels_last") for t in tensors):
        return "needs channels_last"
    return refusal(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    a = problem.attrs
    padding, stride, dilation = (list(a[n]) for n in ("padding", "stride", "dilation"))
    groups, activation, beta = a["groups"], problem.attr("activation"), problem.attr("beta")
    scale, zeros = scales(problem, constants)
    bias = constants.get(2)
    weight = packed(
        constants[1],
        ("conv2d.onednn_int8", stride, padding, dilation, groups),
        lambda w: torch.ops.onednn.qconv_prepack(
            w, scale, 1.0, SHIFT, stride, padding, dilation, groups, list(problem.inputs[0].shape)
        ),
        layout=onednn_layout,
    )
    geometry = (stride, padding, dilation, groups)
    stored = getattr(torch, problem.output.dtype)
    small = stored == torch.int8
    inside = activation if small or problem.meta(3) is None else None
    inside = inside if inside == "relu" else None
    plain = torch.ops.onednn.qconv2d_pointwise.default
    summed = torch.ops.onednn.qconv2d_pointwise.binary

    def convolve(x: torch.Tensor) -> torch.Tensor:
        made = plain(
            shifted(x), 1.0, SHIFT, weight, scale, zeros, bias, *geometry, 1.0, 0, stored,
            inside or "none", [], "",
        )  # fmt: skip
        return made if inside == activation else finish_(made, None, activation)

    def convolve_add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if not small:
            made = plain(
                shifted(x), 1.0, SHIFT, weight, scale, zeros, bias, *geometry, 1.0, 0, stored,
                "none", [], "",
            )  # fmt: skip
            return finish_(made, residual, activation, beta=beta)
        into = residual.clone(memory_format=torch.preserve_format)  # it is overwritten
        return summed(
            shifted(x), 1.0, SHIFT, weight, scale, zeros, into, bias, *geometry, 1.0, 0, stored,
            beta, 0, "sum", 1.0, inside, [], None,
        )  # fmt: skip

    return convolve if problem.meta(3) is None else convolve_add


def scales(
    problem: Problem, constants: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor of each output channel, and oneDNN's zero points of the weight: none."""
    channels = problem.inputs[1].shape[0]
    scale = constants.get(4)
    return (
        torch.ones(channels) if scale is None else scale,
        torch.zeros(channels, dtype=torch.int64),
    )


def shifted(x: torch.Tensor) -> torch.Tensor:
    """int8 → uint8, 128 more."""
    return x.view(torch.uint8).bitwise_xor(SHIFT)
