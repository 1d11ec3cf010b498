"""Linear on a CPU with AVX-512 or AVX2: the 1×1 convolution of one image whose pixels are the rows.

Nothing moves: rows of C numbers are pixels of C channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from tessella.device.packing import packed
from tessella.kernels.catalog import Call, Config
from tessella.kernels.shared import x86_convolution
from tessella.operations.epilogue import NUMBERS
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

WINDOW = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}


def fits(problem: Problem) -> str | None:
    return refusal(problem) or x86_convolution.fits(as_convolution(problem))


def refusal(problem: Problem) -> str | None:
    """Why rows of this problem are not pixels of an image, or None."""
    rows = (problem["input"], problem.output, problem.epilogue.residual)
    if any(m is not None and (m.format != "contiguous" or len(m.shape) < 2) for m in rows):
        return "needs contiguous rows"
    if problem["weight"].format == "strided":
        return "the weight must be dense"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    return x86_convolution.configs(as_convolution(problem))


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: int) -> Call:
    problem.require_constants(constants)
    return x86_convolution.bind(as_convolution(problem), with_filter(constants), **config)


def with_filter(constants: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The constants, the weight as a filter of one place: the same one for all batch sizes, as its
    packed forms are found by it."""
    filters = packed(constants[1], ("as a filter",), lambda w: w.detach()[:, :, None, None])
    return {**constants, 1: filters}


def as_convolution(problem: Problem) -> Problem:
    """The 1×1 convolution that the problem is."""
    x, weight, epilogue = problem["input"], problem["weight"], problem.epilogue
    residual = epilogue.residual
    kept = (*NUMBERS, "dtype", "non_negative", "wide_sums")
    numbers = {name: n for name, n in problem.attrs.items() if name in kept}
    return replace(
        problem,
        op="conv2d",
        inputs=(
            _image(x),
            TensorMeta(shape=(*weight.shape, 1, 1), dtype=weight.dtype),
            epilogue.bias,
            None if residual is None else _image(residual),
            epilogue.scale,
        ),
        outputs=(_image(problem.output),),
        attrs={**WINDOW, **numbers},
    )


def _image(meta: TensorMeta) -> TensorMeta:
    """[..., C] → [1, C, 1, rows], channels last."""
    *rows, channels = meta.shape
    shape = (1, channels, 1, math.prod(rows))
    return replace(meta, shape=shape, format="channels_last")
