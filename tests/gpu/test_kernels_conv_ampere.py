"""Convolutions by Ampere's instructions on a newer GPU: right in every way that a search tries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.device.machine import aimed_at
from tessella.kernels import catalog
from tessella.kernels.conv.ampere import direct
from tests.support.problems.convolutions import Case, check
from tests.support.problems.pooled_convolutions import operands_of, problem_of, right
from tests.support.problems.portable_convolutions import LAST

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

SHAPES = {
    "layer": Case(x=(9, 64, 28, 30), w=(80, 64, 3, 3), padding=1, bias="float32"),
    "few pixels": Case(x=(3, 512, 7, 7), w=(512, 512, 3, 3), padding=1, activation="relu"),
    "strided": Case(x=(3, 32, 17, 13), w=(48, 32, 3, 3), stride=2, padding=1, scale=True),
    "dilated": Case(x=(2, 48, 19, 20), w=(32, 48, 3, 3), dilation=2, activation="gelu"),
    "pointwise": Case(x=(20, 80, 29, 29), w=(256, 80, 1, 1), bias="float32", residual=True),
    "residual of taps": Case(x=(4, 128, 14, 14), w=(64, 128, 3, 3), padding=1, residual=True),
}
FIRST = Case(x=(5, 3, 64, 72), w=(128, 3, 7, 7), stride=2, padding=3, bias="float32",
             activation="relu", x_format=LAST)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_way(name: str, dtype: str) -> None:
    kernel = catalog.kernel("conv2d.implicit_gemm.sm80")
    case = replace(SHAPES[name], dtype=dtype, x_format=LAST)
    case = replace(case, scale=case.scale or dtype == "int8")
    with aimed_at("sm_80"):
        for config in kernel.load().configs(case.problem, 99):
            check(kernel, case, config, device="cuda", integers=True)
        for constant in (True, False):
            check(kernel, replace(case, constant=constant), device="cuda")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_first_layers(dtype: str) -> None:
    kernel, case = catalog.kernel("conv2d.direct.sm80"), replace(FIRST, dtype=dtype)
    with aimed_at("sm_80"):
        for config in kernel.configs(case.problem):
            check(kernel, case, config, device="cuda", integers=True)
            check(kernel, case, config, device="cuda")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("window", [{}, {"pool_padding": 0, "ceil_mode": True}], ids=str)
def test_pooled_first_layers(window: dict[str, Any], dtype: str) -> None:
    problem = problem_of((64, 72), N=5, filters=128, dtype=dtype, **window)
    operands = operands_of(problem, seed=0)
    x, constants = operands[0].cuda(), {i: operands[i].cuda() for i in (1, 2)}
    with aimed_at("sm_80"):
        for config in direct.configs(problem):
            out = problem.output.empty(x.device).fill_(7)
            direct.bind(problem, constants, **config)(x, out=out)
            assert torch.equal(out.cpu(), right(problem, operands)), config
