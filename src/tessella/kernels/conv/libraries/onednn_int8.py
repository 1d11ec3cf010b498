"""Convolution of int8 by oneDNN through torch: scale, bias, residual, relu and requantize fused.

torch's operator takes uint8 activations: int8 shifted by 128, which is then their zero point.

A processor without VNNI (AVX2 alone, or the first AVX-512) adds the products of two neighbouring
channels in 16 bits, which saturate: 255 · 127 · 2 is twice what they hold. There weights of at most
``NARROW`` are multiplied as they are, and others as two halves, each behind its own copy of the
image's channels: exact, and 1.0 to 1.2 times a float32 convolution's time (0.5 to 0.7 as they are).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from tessella.device.packing import onednn_layout, packed
from tessella.kernels.catalog import Call
from tessella.operations.epilogue import finish_
from tessella.operations.problem import Problem

SHIFT = 128
NARROW = 64  # 255 · 64 · 2 fits 16 bits
PROBED = 64  # channels: oneDNN multiplies a few channels by other code, which is exact


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
    if problem.epilogue.alpha != 1:
        return "no alpha"
    if out.dtype == "int8" and problem.epilogue.activation not in (None, "relu"):
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
    groups, ending = a["groups"], problem.epilogue
    activation, beta = ending.activation, ending.beta
    scale, zeros = scales(problem, constants)
    bias = constants.get(2)
    split = must_split(constants[1])
    images, channels, *size = problem.inputs[0].shape
    shape = [images, 2 * channels if split else channels, *size]
    weight = packed(
        constants[1],
        ("conv2d.onednn_int8", stride, padding, dilation, groups, split),
        lambda w: torch.ops.onednn.qconv_prepack(
            halves(w) if split else w, scale, 1.0, SHIFT, stride, padding, dilation, groups, shape
        ),
        layout=onednn_layout,
    )

    def given(x: torch.Tensor) -> torch.Tensor:
        return shifted(_twice(x, groups) if split else x)

    geometry = (stride, padding, dilation, groups)
    stored = getattr(torch, problem.output.dtype)
    small = stored == torch.int8
    inside = activation if small or problem.meta(3) is None else None
    inside = inside if inside == "relu" else None
    plain = torch.ops.onednn.qconv2d_pointwise.default
    summed = torch.ops.onednn.qconv2d_pointwise.binary

    def convolve(x: torch.Tensor) -> torch.Tensor:
        made = plain(
            given(x), 1.0, SHIFT, weight, scale, zeros, bias, *geometry, 1.0, 0, stored,
            inside or "none", [], "",
        )  # fmt: skip
        return made if inside == activation else finish_(made, ending.of())

    def convolve_add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if not small:
            made = plain(
                given(x), 1.0, SHIFT, weight, scale, zeros, bias, *geometry, 1.0, 0, stored,
                "none", [], "",
            )  # fmt: skip
            return finish_(made, ending.of(residual=residual))
        into = residual.clone(memory_format=torch.preserve_format)  # it is overwritten
        return summed(
            given(x), 1.0, SHIFT, weight, scale, zeros, into, bias, *geometry, 1.0, 0, stored,
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


@functools.cache
def saturates() -> bool:
    """Whether this processor's int8 products saturate in oneDNN, found by multiplying some.

    Asked of oneDNN itself: which instructions it takes depends on the processor, on its version and
    on ``ONEDNN_MAX_CPU_ISA``.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    x = torch.full((1, PROBED, 8, 8), 255, dtype=torch.uint8).contiguous(
        memory_format=torch.channels_last
    )
    weight = torch.full((PROBED, PROBED, 3, 3), 127, dtype=torch.int8)
    scale, zeros = torch.ones(PROBED), torch.zeros(PROBED, dtype=torch.int64)
    ones = [1, 1]
    packed_weight = torch.ops.onednn.qconv_prepack(
        weight, scale, 1.0, 0, ones, ones, ones, 1, list(x.shape)
    )
    made = torch.ops.onednn.qconv2d_pointwise.default(
        x, 1.0, 0, packed_weight, scale, zeros, None, ones, ones, ones, 1, 1.0, 0, torch.float32,
        "none", [], "",
    )  # fmt: skip
    return bool(made.max() != 255 * 127 * PROBED * 9)


def must_split(weight: torch.Tensor) -> bool:
    """Whether these quantized weights are too large for the processor's 16-bit sums."""
    least, most = (int(end) for end in weight.aminmax())
    return saturates() and max(-least, most) > NARROW


def halves(weight: torch.Tensor) -> torch.Tensor:
    """[K, C, …] → [K, 2·C, …]: what adds up to the weight, each part at most ``NARROW``."""
    half = weight >> 1
    return torch.cat((half, weight - half), 1)


def _twice(x: torch.Tensor, groups: int) -> torch.Tensor:
    """The channels of each group, and the same again."""
    if groups == 1:
        return torch.cat((x, x), 1)
    parts = x.unflatten(1, (groups, -1))
    return torch.cat((parts, parts), 2).flatten(1, 2).contiguous(memory_format=torch.channels_last)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """int8 → uint8, 128 more."""
    return x.view(torch.uint8).bitwise_xor(SHIFT)
