"""Group norms to test kernels of statistics with, beside float64."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from tessella.kernels.norm import group
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import Format, TensorMeta

EPS = 1e-5


def problem(
    shape: tuple[int, ...],
    groups: int,
    *,
    dtype: str = "float16",
    format: Format = "channels_last",
    affine: bool = True,
) -> Problem:
    vector = TensorMeta(shape=shape[1:2], dtype=dtype) if affine else None
    made = TensorMeta(shape=(*shape[:2], *(1 for _ in shape[2:])), dtype="float32")
    return Problem(
        op="group_factors",
        inputs=(TensorMeta(shape=shape, dtype=dtype, format=format), vector, vector),
        outputs=(made, made),
        attrs={"num_groups": groups, "eps": EPS},
        constant=(1, 2) if affine else (),
    )


PROBLEMS = {
    "images": problem((2, 64, 18, 18), 8),
    "odd": problem((2, 30, 5, 7), 3, dtype="float32"),
    "instances": problem((2, 40, 3, 5, 7), 40, dtype="bfloat16"),
    "wide": problem((1, 96, 9, 9), 1, affine=False),
    "planes": problem((2, 12, 9, 9), 4, dtype="float32", format="contiguous"),
    "a pixel": problem((3, 8), 2, dtype="float32", format="contiguous", affine=False),
}


def check(
    asked: Problem,
    config: dict[str, Any],
    device: str = "cpu",
    far: float = 0.0,
    kernel: ModuleType = group,
) -> None:
    """What is normalized with the factors agrees with float64; ``far``: the mean of its numbers."""
    torch.manual_seed(0)
    metas = [meta for meta in asked.inputs if meta is not None]
    tensors = [m.empty(torch.device(device)).copy_(torch.randn(m.shape)) for m in metas]
    spread = torch.rand(asked.inputs[0].shape[1]).view(-1, *(1,) * (len(metas[0].shape) - 2)) * 3
    tensors[0].mul_(spread.to(device)).add_(far)
    nbytes = kernel.workspace_bytes(asked, **config) if config else 0
    space = torch.full((nbytes,), 77, dtype=torch.uint8, device=device)
    call = kernel.bind(asked, {i: tensors[i] for i in asked.constant}, **config)
    factor, shift = call(tensors[0], **({"workspace": space} if nbytes else {}))
    x, *vectors = (tensor.double() for tensor in tensors)
    expected = F.group_norm(x, asked.attrs["num_groups"], *vectors, eps=EPS)
    error = (x * factor + shift - expected).abs().max() / expected.abs().max()
    assert error < 1e-5 * (1 + far / 10), (config, float(error))
