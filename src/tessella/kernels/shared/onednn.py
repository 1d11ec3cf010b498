"""What oneDNN's convolutions and linear layers share: activations that it fuses, and its int8.

torch's int8 operators take uint8 activations: int8 shifted by 128, which is then their zero point,
or as they are where none is below zero (``non_negative``): a shift costs a pass, and a zero point a
quarter of a 3×3 convolution's time (AVX2: 256 → 256 at 14 × 14 2.13 → 1.34 ms).

A processor without VNNI (AVX2 alone, or the first AVX-512) adds the products of two neighbouring
channels in 16 bits, which saturate: 255 · 127 · 2 is twice what they hold. There weights of at most
``NARROW`` are multiplied as they are, and others as the sum of two weights, each behind its own
copy of the input's channels: exact, and 1.0 to 1.2 times a float32 convolution's time (0.5 to 0.7
as they are). Activations from 0 to 127 saturate with no weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch

from tessella.device.x86 import code
from tessella.operations.epilogue import Epilogue, finish_
from tessella.operations.problem import Problem

# our activation → (oneDNN's name, its numbers, its variant)
POST_OPS: dict[str | None, tuple[str, list[float], str]] = {
    None: ("none", [], ""),
    "relu": ("relu", [], ""),
    "relu6": ("hardtanh", [0.0, 6.0], ""),
    "sigmoid": ("sigmoid", [], ""),
    "tanh": ("tanh", [], ""),
    "silu": ("swish", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_tanh": ("gelu", [], "tanh"),
    "hardswish": ("hardswish", [], ""),
    "hardsigmoid": ("hardsigmoid", [], ""),
}

SHIFT = 128
NARROW = 64  # 255 · 64 · 2 fits 16 bits
PROBED = 64  # channels: oneDNN multiplies a few channels by other code, which is exact


def post_op(epilogue: Epilogue[Any]) -> tuple[str, list[float], str]:
    """oneDNN's name, numbers and variant of an activation; a ReLU with a floor is a clip."""
    if epilogue.floor != 0:
        return "hardtanh", [float(epilogue.floor), math.inf], ""
    return POST_OPS[epilogue.activation]


def has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def float_refusal(problem: Problem) -> str | None:
    """Why oneDNN has no layer of floating numbers, convolution or linear, for the problem."""
    vectors = () if problem.epilogue.bias is None else ("bias",)
    if not has_onednn():
        return "this torch was built without oneDNN"
    if not all(map(problem.is_constant, ("weight", *vectors))):
        return "weight and bias must be constants"
    if problem.plain:
        return problem.plain
    if refused := type_refusal({meta.dtype for meta in problem.given}):
        return refused
    if problem.epilogue.activation not in POST_OPS:
        return f"activation {problem.epilogue.activation} is not fused"
    return None


def type_refusal(types: Set[str]) -> str | None:
    """Why oneDNN cannot compute with these element types here."""
    if not has_onednn():
        return "this torch was built without oneDNN"
    if types not in ({"float32"}, {"bfloat16"}):
        return f"float32 or bfloat16 throughout, not {' and '.join(sorted(types))}"
    if types == {"bfloat16"} and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 instructions"
    return None


def int8_refusal(problem: Problem) -> str | None:
    """Why oneDNN has no int8 layer, convolution or linear, for the problem; None if it has."""
    x, weight, out = problem["input"], problem["weight"], problem.output
    bias, residual, scale = problem.epilogue.bias, problem.epilogue.residual, problem.epilogue.scale
    if not has_onednn():
        return "this torch was built without oneDNN"
    if (x.dtype, weight.dtype) != ("int8", "int8"):
        return f"multiplies int8, not {x.dtype} × {weight.dtype}"
    if out.dtype not in ("int8", "float32"):
        return f"makes int8 or float32, not {out.dtype}"
    vectors = [name for name in ("bias", "scale") if problem.get(name) is not None]
    if not all(map(problem.is_constant, ("weight", *vectors))):
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


def scales(
    problem: Problem, constants: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor of each output channel, and oneDNN's zero points of the weight: none."""
    channels = problem["weight"].shape[0]
    scale = constants.get(problem.operation.position("scale"))
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
    if not has_onednn():
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


def narrow_sums() -> bool:
    """Whether layers of int8 are fast here with weights of at most ``NARROW`` alone: oneDNN's, or
    our machine code's for AVX2 without VNNI, which refuses wider ones even where oneDNN is absent.
    """
    return saturates() or (code.refusal("avx2") is None and not code.adds_in_32_bits())


def must_split(problem: Problem, weight: torch.Tensor) -> bool:
    """Whether these quantized weights are too large for the processor's 16-bit sums."""
    if problem.attr("non_negative"):  # 127 · 128 · 2 fits 16 bits
        return False
    least, most = (int(end) for end in weight.aminmax())
    return saturates() and max(-least, most) > NARROW


def zero_point(problem: Problem) -> int:
    """Of the activations as uint8."""
    return 0 if problem.attr("non_negative") else SHIFT


def narrow_weight(weight: torch.Tensor, split: bool) -> torch.Tensor:
    """The weight [K, C, …]; split: [K, 2·C, …] that adds up to it, of at most ``NARROW``."""
    if not split:
        return weight
    half = weight >> 1
    return torch.cat((half, weight - half), 1)


Int8Layer = Callable[..., torch.Tensor]  # of what ``shifted`` made, and perhaps a residual


def int8_layer(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    operators: Any,
    weight: torch.Tensor,
    geometry: Sequence[Any] = (),
    *,
    nothing: tuple[str | None, str | None],
) -> Int8Layer:
    """A layer whose weight is packed: scale, bias, residual, relu and rounding in one call.

    Args:
        operators: torch's, with ``default`` and, for a sum, ``binary``.
        geometry: a convolution's.
        nothing: how ``binary`` is told that there is neither an activation nor one's variant.
    """
    plain, summed = operators.default, operators.binary
    scale, zeros = scales(problem, constants)
    bias, ending, zero = constants.get(2), problem.epilogue, zero_point(problem)
    stored, activation = getattr(torch, problem.output.dtype), problem.epilogue.activation

    def layer(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is not None and stored == torch.int8:
            into = residual.clone(memory_format=torch.preserve_format)  # it is overwritten
            made: torch.Tensor = summed(
                x, 1.0, zero, weight, scale, zeros, into, bias, *geometry, 1.0, 0, stored,
                ending.beta, 0, "sum", 1.0, activation or nothing[0], [], nothing[1],
            )  # fmt: skip
            return made
        inside = activation if activation == "relu" and residual is None else None
        made = plain(
            x, 1.0, zero, weight, scale, zeros, bias, *geometry, 1.0, 0, stored,
            inside or "none", [], "",
        )  # fmt: skip
        if residual is None and inside == activation:
            return made
        return finish_(made, ending.of(residual=residual))

    return layer


def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """int8 → uint8, so much more: 128, or 0 for numbers from zero on."""
    bits = x.view(torch.uint8)
    return bits.bitwise_xor(by) if by else bits
