"""Gradients of a convolution on the GPU: configurations against float64, exactly where sums
are exact, the same in every run, nothing left unwritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tessella.kernels import catalog
from tessella.kernels.conv.hopper import dgrad as dgrad_sm90
from tessella.kernels.conv.hopper import wgrad as wgrad_sm90
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import MEMORY_FORMATS
from tessella.search.inspection import exactly
from tests.support.problems.gradients import problem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

GPU = torch.device("cuda")
OPERATIONS = ("conv2d_dgrad", "conv2d_wgrad")
TOLERANCES = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-5}

# x, weight, stride, padding, dilation
CASES = [
    ((2, 64, 8, 8), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1)),
    ((128, 64, 7, 7), (128, 64, 3, 3), (1, 1), (1, 1), (1, 1)),
    ((3, 72, 9, 9), (40, 72, 3, 3), (1, 1), (1, 1), (1, 1)),
    ((2, 64, 15, 12), (64, 64, 3, 3), (2, 2), (1, 1), (1, 1)),
    ((2, 64, 15, 12), (48, 64, 3, 5), (2, 1), (1, 3), (1, 1)),
    ((2, 128, 14, 14), (64, 128, 1, 1), (2, 2), (0, 0), (1, 1)),
    ((4, 24, 13, 13), (16, 24, 5, 5), (1, 1), (2, 2), (1, 1)),
    ((5, 16, 11, 11), (48, 16, 5, 5), (2, 2), (2, 2), (1, 1)),
    ((1, 8, 1, 1), (8, 8, 1, 1), (1, 1), (0, 0), (1, 1)),
    ((7, 480, 6, 6), (16, 480, 1, 1), (1, 1), (0, 0), (1, 1)),
    ((2, 32, 10, 10), (32, 32, 3, 3), (1, 1), (2, 2), (2, 2)),
    ((2, 32, 12, 12), (40, 32, 3, 3), (2, 2), (2, 2), (2, 2)),
    ((2, 40, 13, 13), (32, 40, 2, 2), (2, 2), (0, 0), (3, 3)),
    ((1, 256, 28, 28), (512, 256, 1, 1), (1, 1), (0, 0), (1, 1)),
    ((2, 64, 16, 16), (320, 64, 7, 7), (1, 1), (3, 3), (1, 1)),
    ((130, 64, 3, 3), (64, 64, 3, 3), (1, 1), (0, 0), (1, 1)),
    ((1, 64, 2, 2), (64, 64, 3, 3), (1, 1), (4, 4), (1, 1)),
    ((2, 64, 9, 3), (64, 64, 4, 4), (2, 2), (1, 1), (1, 1)),
]
OTHERS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"weight_format": "contiguous"},
    {"dtype": "bfloat16", "made": "float32"},
]


def drawn(asked: Problem, kind: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = []
    for meta in asked.inputs:
        values = torch.randn(meta.shape) if kind == "normal" else torch.randint(-2, 3, meta.shape)
        tensor = values.to(GPU, getattr(torch, meta.dtype))
        made.append(tensor.contiguous(memory_format=MEMORY_FORMATS[meta.format]))
    return made


def check(id: str, asked: Problem) -> None:
    """Configurations on normal numbers and on small whole ones."""
    row = catalog.kernel(id)
    assert row.load().fits(asked) is None
    dtype = getattr(torch, asked.output.dtype)
    for kind in ("normal", "whole"):
        inputs = drawn(asked, kind)
        (expected,) = operation(asked.op).call([exactly(t) for t in inputs], asked.attrs)
        for config in row.configs(asked)[::3]:  # of 12; each compiles
            out = asked.output.empty(GPU)
            scratch = row.workspace_bytes(asked, config)
            guarded = torch.full((scratch + 256,), 255, dtype=torch.uint8, device=GPU)
            more = {"workspace": guarded[:scratch]} if scratch else {}
            call = row.load().bind(asked, {}, **config)
            runs = []
            for _ in range(3):
                out.fill_(float("nan"))
                call(*inputs, out=out, **more)
                runs.append(out.clone())
            assert asked.output.matches(out)
            assert all(torch.equal(runs[0], run) for run in runs), config
            assert bool((guarded[scratch:] == 255).all()), config
            if kind == "whole":
                assert torch.equal(out, expected.to(dtype)), config
            else:
                error = (out.double() - expected).abs().max() / expected.abs().max()
                assert error < TOLERANCES[asked.inputs[0].dtype], (config, float(error))


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_hopper(op: str, case: Any) -> None:
    check(f"{op}.implicit_gemm.sm90", problem(op, *case))


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_hopper_other_types_and_formats(op: str, other: dict[str, Any]) -> None:
    asked = problem(op, *CASES[3], **other)
    if op == "conv2d_dgrad" and "made" in other:
        assert dgrad_sm90.fits(asked) is not None
        return
    check(f"{op}.implicit_gemm.sm90", asked)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_portable(op: str, format: Any, dtype: str) -> None:
    options = {"dtype": dtype, "format": format, "weight_format": format}
    for case in (CASES[4], CASES[12]):
        check(f"{op}.implicit_gemm", problem(op, *case, **options))
    depthwise = ((2, 36, 9, 9), (72, 1, 3, 3), (2, 1), (1, 1), (1, 2), 36)
    check(f"{op}.implicit_gemm", problem(op, *depthwise, **options))


@pytest.mark.parametrize("op", OPERATIONS)
def test_libraries(op: str) -> None:
    for library in ("cudnn", "aten"):
        row = catalog.kernel(f"{op}.{library}")
        asked = problem(op, *CASES[3])
        inputs = drawn(asked, "normal")
        (expected,) = operation(op).call([exactly(t) for t in inputs], asked.attrs)
        made = row.load().bind(asked, {})(*inputs)
        assert asked.output.matches(made)
        assert (made.double() - expected).abs().max() < 2e-3 * expected.abs().max()


def test_calls_are_captured_and_replayed() -> None:
    for op, module in (("conv2d_dgrad", dgrad_sm90), ("conv2d_wgrad", wgrad_sm90)):
        asked = problem(op, *CASES[3], weight_format="contiguous")
        inputs = drawn(asked, "normal")
        out = asked.output.empty(GPU)
        scratch = torch.empty(module.workspace_bytes(asked), dtype=torch.uint8, device=GPU)
        call = module.bind(asked, {})
        call(*inputs, out=out, workspace=scratch)
        expected = out.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(*inputs, out=out, workspace=scratch)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_constant_weights_are_packed_once() -> None:
    asked = problem("conv2d_dgrad", *CASES[0], weight_format="contiguous", constant=(1,))
    dy, weight = drawn(asked, "whole")
    (expected,) = operation(asked.op).call([exactly(dy), exactly(weight)], asked.attrs)
    out = asked.output.empty(GPU)
    dgrad_sm90.bind(asked, {1: weight})(dy, out=out)
    assert torch.equal(out.double(), expected)
