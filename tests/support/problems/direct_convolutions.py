"""Convolutions of images and volumes in channels_last, their operands, and float64's answer."""

from __future__ import annotations

from typing import Any

import torch

from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

CPU = torch.device("cpu")


def problem(
    shape: tuple[int, ...],
    channels: int,
    dtype: str = "float32",
    *,
    kernel: tuple[int, ...] | None = None,
    bias: bool = True,
    residual: bool = False,
    **attrs: Any,
) -> Problem:
    axes = len(shape) - 2
    one, kernel = (1,) * axes, kernel or (1,) * axes
    attrs = {
        "stride": one, "padding": (0,) * axes, "dilation": one, "groups": 1, "activation": None,
        **attrs,
    }  # fmt: skip
    window = (attrs[n] for n in ("padding", "dilation", "stride"))
    sizes = [
        (size + 2 * padding - dilation * (k - 1) - 1) // stride + 1
        for size, k, padding, dilation, stride in zip(shape[2:], kernel, *window, strict=True)
    ]

    def image(*shape: int) -> TensorMeta:
        return TensorMeta(shape=shape, dtype=dtype, format="channels_last")

    made = image(shape[0], channels, *sizes)
    return Problem(
        op=f"conv{axes}d",
        inputs=(
            image(*shape),
            TensorMeta(shape=(channels, shape[1] // attrs["groups"], *kernel), dtype=dtype),
            TensorMeta(shape=(channels,), dtype=dtype) if bias else None,
            made if residual else None,
        ),
        outputs=(made,),
        attrs=attrs,
        constant=(1, 2) if bias else (1,),
    )


def drawn(p: Problem, seed: int = 0) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """The image and perhaps the residual, and the constants."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        i: meta.empty(CPU).copy_(torch.randn(meta.shape, generator=generator))
        for i, meta in enumerate(p.inputs)
        if meta is not None
    }
    made[1] *= made[1][0].numel() ** -0.5
    return [t for i, t in made.items() if i not in p.constant], {i: made[i] for i in p.constant}


def exact(
    p: Problem, given: list[torch.Tensor], constants: dict[int, torch.Tensor]
) -> torch.Tensor:
    bias = constants[2].double() if 2 in constants else None
    window = [p.attrs[n] for n in ("stride", "padding", "dilation")]
    image, weight, groups = given[0].double(), constants[1].double(), p.attrs["groups"]
    made = getattr(torch, p.op)(image, weight, bias, *window, groups)
    if len(given) > 1:
        made = made + given[1].double()
    activation = p.attr("activation")
    return made if activation is None else ACTIVATIONS[activation](made)
