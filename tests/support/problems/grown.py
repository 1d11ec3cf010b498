"""Transposed convolutions whose windows do not overlap, beside float64."""

from __future__ import annotations

from typing import Any

import torch

from tessella.kernels.conv import transposed
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

TOLERANCES = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


def problem(
    x: tuple[int, ...], filters: int, taps: tuple[int, ...], *, dtype: str = "float16",
    part_of: int = 0,
) -> Problem:  # fmt: skip
    """With a bias; ``part_of``: the result is the second part of so many channels."""
    made = (x[0], filters, *(n * t for n, t in zip(x[2:], taps, strict=True)))
    whole = TensorMeta(
        shape=(x[0], part_of or filters, *made[2:]), dtype=dtype, format="channels_last"
    )
    axes = len(taps)
    return Problem(
        op=f"conv_transpose{axes}d",
        inputs=(
            TensorMeta(shape=x, dtype=dtype, format="channels_last"),
            TensorMeta(shape=(x[1], filters, *taps), dtype=dtype),
            TensorMeta(shape=(filters,), dtype=dtype),
        ),
        outputs=(whole.part(1, filters),),
        attrs={
            "stride": taps, "padding": (0,) * axes, "output_padding": (0,) * axes, "groups": 1,
            "dilation": (1,) * axes,
        },
        constant=(1, 2),
    )  # fmt: skip


PROBLEMS = {
    "volumes": problem((2, 24, 3, 5, 4), 20, (2, 2, 2)),
    "part of a volume": problem((1, 64, 3, 5, 4), 32, (2, 2, 2), dtype="float32", part_of=48),
    "images": problem((1, 8, 5, 4), 3, (3, 1)),
}


def check(asked: Problem, config: dict[str, Any], device: str = "cpu") -> None:
    torch.manual_seed(0)
    assert transposed.fits(asked) is None
    metas = [meta for meta in asked.inputs if meta is not None]
    tensors = [m.empty(torch.device(device)).copy_(torch.randn(m.shape)) for m in metas]
    out = asked.output.empty(torch.device(device)).fill_(torch.nan)
    made = transposed.bind(asked, {1: tensors[1], 2: tensors[2]}, **config)(tensors[0], out=out)
    (expected,) = asked.operation.call([t.double() for t in tensors], asked.attrs)
    error = (made.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCES[asked.output.dtype], config
