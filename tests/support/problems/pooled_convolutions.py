"""First layers with the pooling behind them, and what is right in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tessella.operations import problems, shapes
from tessella.operations.epilogue import store
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta

Tensors = dict[int, torch.Tensor]


def problem_of(
    size: tuple[int, int] = (224, 224),
    *,
    N: int = 2,
    dtype: str = "float16",
    out: str | None = None,
    channels: int = 3,
    filters: int = 64,
    taps: int | tuple[int, int] = 7,
    stride: int | tuple[int, int] = 2,
    padding: int | tuple[int, int] = 3,
    pool: tuple[int, int] = (3, 2),
    pool_padding: int = 1,
    ceil_mode: bool = False,
    bias: str | None = "float32",
    activation: str | None = "relu",
    gamma: float = 1.0,
    constant: tuple[int, ...] = (1, 2),
    format: Any = "channels_last",
    **more: Any,
) -> Problem:
    """ResNet's first layer, or another one."""
    taps = (taps, taps) if isinstance(taps, int) else taps
    first = problems.conv(
        TensorMeta(shape=(N, channels, *size), dtype=dtype, format=format),
        TensorMeta(shape=(filters, channels, *taps), dtype=dtype),
        None if bias is None else TensorMeta(shape=(filters,), dtype=bias),
        stride=stride, padding=padding, activation=activation, gamma=gamma,
        out_dtype=out or dtype, constant=constant[: 1 if bias is None else 2], **more,
    )  # fmt: skip
    if out is not None:
        first = replace(first, attrs={**first.attrs, "dtype": out})
    window = {
        "kernel_size": (pool[0],) * 2,
        "stride": (pool[1],) * 2,
        "padding": (pool_padding,) * 2,
        "dilation": (1, 1),
        "ceil_mode": ceil_mode,
    }
    ((made, shape),) = shapes.made("max_pool2d", (first.output,), window)
    pooled = Problem(
        op="max_pool2d",
        inputs=(first.output,),
        outputs=(replace(first.output, dtype=made, shape=shape),),
        attrs=window,
    )
    return problems.conv2d_pool(first, pooled)


GOOGLENET = {"pool_padding": 0, "ceil_mode": True}
SQUEEZENET = {"taps": 3, "padding": 0, **GOOGLENET}


def operands_of(problem: Problem, seed: int) -> Tensors:
    """Small whole numbers, so that no sum is rounded."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        i: torch.randint(-3, 4, meta.shape, generator=generator).to(getattr(torch, meta.dtype))
        for i, meta in enumerate(problem.inputs)
        if meta is not None
    }
    made[0] = made[0].contiguous(memory_format=torch.channels_last)
    return made


def right(problem: Problem, operands: Tensors) -> torch.Tensor:
    """torch's, in float64, rounded once."""
    given = [operands[i].double() if i in operands else None for i in range(len(problem.inputs))]
    attrs = {**problem.attrs, "dtype": "float64"}
    (made,) = operation(problem.op).call(given, attrs)
    return store(made, getattr(torch, problem.output.dtype))
