"""Two 1 × 1 convolutions in a row, and what is right in float64."""

from __future__ import annotations

from typing import Any

import torch

from tessella.operations import problems
from tessella.operations.epilogue import store
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import Format, TensorMeta

Tensors = dict[int, torch.Tensor]


def problem_of(
    dtype: str = "float16",
    channels: tuple[int, int, int] = (64, 256, 64),
    *,
    N: int = 8,
    size: tuple[int, int] = (28, 28),
    residual: bool = True,
    keep: bool = True,
    constant: tuple[int, ...] = (1, 2, 4),
    format: Format = "channels_last",
    beta: float = 1.0,
    activation: str | None = "relu",
) -> Problem:
    """x [N, channels[0], …] → channels[1] → channels[2]; int8 with a scale a channel."""

    def image(c: int) -> TensorMeta:
        return TensorMeta(shape=(N, c, *size), dtype=dtype, format=format)

    def convolution(c: int, k: int, residual: bool, **epilogue: Any) -> Problem:
        weight = TensorMeta(shape=(k, c, 1, 1), dtype=dtype, format="channels_last")
        vector = TensorMeta(shape=(k,), dtype="float32")
        return problems.conv(
            image(c), weight, vector, image(k) if residual else None,
            vector if dtype == "int8" else None,
            constant=tuple(i for i in constant if i != 4 or dtype == "int8"), **epilogue,
        )  # fmt: skip

    c, k, out = channels
    first = convolution(c, k, residual, activation=activation, beta=beta)
    return problems.conv2d_chain(
        first, convolution(k, out, False, activation=activation), keep=keep
    )


def operands_of(problem: Problem, seed: int) -> Tensors:
    """Random operands; those of int8 are such that float64 and float32 round alike."""
    generator = torch.Generator().manual_seed(seed)
    made: Tensors = {}
    for i, meta in enumerate(problem.inputs):
        if meta is None:
            continue
        values = torch.randn(meta.shape, generator=generator)
        if meta.dtype == "int8":
            values = (20 * values).round().clamp(-127, 127)
        elif i in (4, 7):
            values = torch.exp2(torch.randint(-8, -5, meta.shape, generator=generator).float())
        elif problem.inputs[0].dtype == "int8":
            values = (8 * values).round() / 4
        made[i] = values.to(getattr(torch, meta.dtype)).contiguous(
            memory_format=torch.channels_last if len(meta.shape) == 4 else torch.contiguous_format
        )
    return made


def exact(problem: Problem, operands: Tensors) -> list[torch.Tensor]:
    given = [operands[i].double() if i in operands else None for i in range(8)]
    made = operation(problem.op).call(given, problem.attrs)
    return [store(t, torch.int8).double() if problem.attr("dtype") else t for t in made]
