"""Ampere's convolutions without a GPU: what they refuse, and their own text run as C++.

Sums of small whole numbers are exact in any order: what a processor computes from the kernels'
source must be float64's answer, rounded once.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tessella.core.architectures import GPU_TARGETS
from tessella.device.machine import aimed_at
from tessella.kernels import catalog
from tessella.kernels.conv import tiles
from tessella.kernels.conv.ampere import direct, implicit_gemm
from tessella.kernels.conv.ampere.implicit_gemm_device import Tile
from tessella.operations.problem import Problem
from tests.support.emulators import ampere_on_cpu
from tests.support.problems.convolutions import Case, draw, right
from tests.support.problems.pooled_convolutions import operands_of, problem_of
from tests.support.problems.pooled_convolutions import right as pooled

CPU = torch.device("cpu")
LAST: Any = "channels_last"
LAYER = Case(x=(2, 16, 9, 7), w=(72, 16, 3, 3), padding=1, dtype="float16", x_format=LAST)
FIRST = Case(
    x=(1, 3, 15, 40), w=(64, 3, 7, 7), stride=2, padding=3, bias="float32", activation="relu",
    dtype="float16", x_format=LAST,
)  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "case", "reason"),
    [
        (implicit_gemm, LAYER, None),
        (implicit_gemm, replace(LAYER, residual=True, scale=True, gamma=2.0), None),
        (implicit_gemm, replace(LAYER, dtype="float32"), "multiplies"),
        (implicit_gemm, replace(LAYER, out="float32"), "does not make"),
        (implicit_gemm, replace(LAYER, x=(2, 64, 9, 7), groups=4), "one group"),
        (implicit_gemm, replace(LAYER, x_format="contiguous"), "channels_last"),
        (implicit_gemm, replace(LAYER, w=(70, 16, 3, 3)), "multiple of 16 bytes"),
        (implicit_gemm, FIRST, "more than 32 taps"),
        (implicit_gemm, replace(LAYER, x=(0, 16, 9, 7)), "empty"),
        (implicit_gemm, replace(LAYER, x=(2**12, 16, 256, 256)), "2³¹"),
        (direct, FIRST, None),
        (direct, replace(FIRST, constant=False), "constant"),
        (direct, replace(FIRST, residual=True), "no residual"),
        (direct, replace(FIRST, w=(72, 3, 7, 7)), "multiple of 64"),
        (direct, replace(FIRST, stride=1), "whole word"),
        (direct, replace(FIRST, x=(2, 3, 15, 39)), "16 bytes"),
        (direct, replace(FIRST, x=(2, 8, 32, 40), w=(64, 8, 7, 7)), "few channels"),
        (direct, replace(FIRST, x=(2, 3, 32, 2**15)), "shared memory"),
        (direct, problem_of(), None),
        (direct, problem_of(pool=(2, 2), pool_padding=0), "windows of 3×3"),
        (direct, problem_of(out="int8"), "makes float16 or bfloat16"),
    ],
)  # fmt: skip
def test_refuses_what_it_cannot_do(kernel: Any, case: Case | Problem, reason: str | None) -> None:
    with aimed_at("sm_80"):
        refused = kernel.fits(case if isinstance(case, Problem) else case.problem)
    assert (refused is None) if reason is None else reason in str(refused)


def test_a_gpu_with_wgmma_does_not_try_it() -> None:
    for row in map(catalog.kernel, ("conv2d.implicit_gemm.sm80", "conv2d.direct.sm80")):
        tried = set()
        for target in GPU_TARGETS:
            with aimed_at(target):
                if row.runs_on(target) and row.outclassed(LAYER.problem) is None:
                    tried.add(target)
        assert tried == set(GPU_TARGETS) - {"sm_75", "sm_90"}


def test_configurations_fit_the_chip() -> None:
    case = replace(LAYER, x=(8, 256, 14, 14), w=(1024, 256, 1, 1), padding=0, residual=True)
    for target, limit in (("sm_80", 163 << 10), ("sm_86", 99 << 10)):
        with aimed_at(target):
            found = [Tile(**config) for config in implicit_gemm.configs(case.problem, 99)]
        assert found
        assert all(
            t.shared_bytes(2, implicit_gemm._beside(case.problem)) <= limit // t.blocks
            for t in found
        )


needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@needs_gcc
@pytest.mark.parametrize(
    ("case", "tile"),
    [
        (replace(LAYER, bias="float32", activation="relu"), (32, 64, 128, 2, 2, 4, 2, False, True)),
        (
            replace(LAYER, x=(2, 64, 5, 6), w=(72, 64, 3, 3), residual=True),
            (32, 64, 64, 1, 2, 4, 1, False, False, 2),
        ),
        (
            Case(x=(1, 64, 9, 7), w=(72, 64, 1, 1), stride=2, residual=True, scale=True,
                 alpha=0.5, beta=2.0, gamma=4.0, dtype="bfloat16", x_format=LAST),
            (32, 64, 64, 1, 2, 4, 2, True, True),
        ),
        (
            Case(x=(1, 48, 6, 7), w=(80, 48, 2, 3), stride=(2, 1), dilation=2, padding=2,
                 residual=True, scale=True, bias="float32", activation="relu", dtype="int8",
                 x_format=LAST),
            (32, 64, 64, 2, 1, 3, 1, False),
        ),
        (
            Case(x=(1, 80, 7, 9), w=(96, 80, 1, 1), residual=True, scale=True, beta=0.5,
                 bias="float32", dtype="int8", x_format=LAST),
            (32, 64, 64, 1, 2, 3, 2, True, True),
        ),
    ],
    ids=["taps", "patches", "residual first", "int8, residual last", "int8, below zero"],
)  # fmt: skip
def test_its_text_on_a_processor(
    case: Case, tile: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implicit_gemm, "multiprocessors", lambda: 1)
    problem, cut, operands = case.problem, Tile(*tile), draw(case, integers=True)
    out, want = nothing(case), right(case, operands)
    blocks, factors, numbers = implicit_gemm.launch_of(problem, cut)
    weight = operands[1]
    assert weight is not None
    ampere_on_cpu.run(
        implicit_gemm.code_of(problem, cut, ampere_on_cpu.machine(weight.dtype)),
        "conv_implicit_gemm",
        blocks,
        (operands[0], tiles.pack(weight, filters_last=False), *operands[2:], out),
        factors,
        numbers,
        tmp_path,
    )
    assert torch.equal(out, want.to(out.dtype))


@needs_gcc
def test_a_first_layer_on_a_processor(tmp_path: Path) -> None:
    """An infinite number is seen by the pixels whose filter is over it, and by no others."""
    case = replace(FIRST, w=(128, 3, 7, 7), gamma=0.5)  # two blocks of filters
    problem, operands = case.problem, draw(case, integers=True)
    x, weight, bias = operands[:3]
    assert x is not None
    assert weight is not None
    x[0, 0, 5, 7] = torch.inf
    layer, out, want = (
        direct.layer_of(problem, rows=3, warps=2),
        nothing(case),
        right(case, operands),
    )
    blocks, factors, numbers = direct.launch_of(problem, layer)
    ampere_on_cpu.run(
        direct.code_of(problem, layer, ampere_on_cpu.machine(out.dtype)),
        "conv_direct",
        blocks,
        (x, direct.pack(weight, layer), bias, out),
        factors,
        numbers,
        tmp_path,
    )
    assert torch.equal(out.nan_to_num(7, 8, 9), want.to(out.dtype).nan_to_num(7, 8, 9))


@needs_gcc
@pytest.mark.parametrize(
    ("asked", "rows", "lines"),
    [
        ({}, 3, 2),
        (
            {"dtype": "bfloat16", "pool_padding": 0, "ceil_mode": True, "gamma": 0.5, "taps": 3,
             "padding": 0, "bias": None, "activation": None, "filters": 128},
            4, 1,
        ),
    ],
    ids=["ResNet's", "over the edge"],
)  # fmt: skip
def test_a_pooled_first_layer_on_a_processor(
    asked: dict[str, Any], rows: int, lines: int, tmp_path: Path
) -> None:
    problem = problem_of((17, 40), N=1, **asked)
    operands = operands_of(problem, seed=0)
    operands[0][0, 1, 9, 11] = torch.nan
    layer = direct.layer_of(problem, rows=rows, lines=lines, warps=lines)
    out = problem.output.empty(CPU).fill_(7)
    with aimed_at("sm_80"):
        assert direct.fits(problem) is None
    blocks, factors, numbers = direct.launch_of(problem, layer)
    assert blocks == -(-problem.output.shape[2] // rows) * (problem.output.shape[1] // 64)
    ampere_on_cpu.run(
        direct.code_of(problem, layer, ampere_on_cpu.machine(out.dtype)),
        "conv_direct",
        blocks,
        (operands[0], direct.pack(operands[1], layer), operands.get(2), out),
        factors,
        numbers,
        tmp_path,
    )
    torch.testing.assert_close(out, pooled(problem, operands), rtol=0, atol=0, equal_nan=True)


def nothing(case: Case) -> torch.Tensor:
    """A result that nobody has written: not a number."""
    made = case.problem.output.empty(torch.device("cpu"))
    return made.fill_(torch.nan if made.is_floating_point() else 77)
