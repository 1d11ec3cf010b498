"""A first layer and its pooling as one kernel, without a GPU: refusals, its own text, machine code.

What a processor computes from the kernel's source must be torch's, bit for bit: sums of small whole
numbers are exact in any order.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tessella.core.errors import UsageError
from tessella.device import launch
from tessella.device.machine import HOPPER
from tessella.kernels import catalog
from tessella.kernels.conv.hopper import pooled as kernel
from tessella.operations import problems, shapes
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta
from tests.support.emulators.pooled_on_cpu import conv_pool
from tests.support.kernels.compile_only import compile_all
from tests.support.problems.pooled_convolutions import (
    GOOGLENET,
    SQUEEZENET,
    Tensors,
    operands_of,
    problem_of,
    right,
)

CPU = torch.device("cpu")


# ------------------------------------------------------------------ what it takes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        (GOOGLENET, None),
        (SQUEEZENET, None),
        ({"dtype": "bfloat16", "out": "int8", "gamma": 3.0, "bias": None}, None),
        ({"constant": (1,)}, None),  # a bias may come from anywhere
        ({"channels": 1, "taps": 5, "padding": 2}, None),
        ({"channels": 4, "taps": 5}, None),
        ({"dtype": "float32"}, "multiplies"),
        ({"dtype": "int8"}, "multiplies"),
        ({"out": "float32"}, "makes int8 or float16"),
        ({"constant": ()}, "must be constant"),
        ({"alpha": 0.5}, "no residual, scale or alpha"),
        ({"bias": "float64"}, "a bias of"),
        ({"activation": "silu"}, "order of numbers"),
        ({"format": "contiguous"}, "channels_last"),
        ({"filters": 32}, "64 channels out"),
        ({"dilation": 2}, "no dilation"),
        ({"pool": (2, 2)}, "3×3 with stride 2"),
        ({"pool": (3, 1)}, "3×3 with stride 2"),
        ({"N": 0}, "nothing to pool"),
        ({"size": (2**12, 2**16)}, "2³¹"),
        ({"size": (64, 100)}, "300 values"),
        ({"stride": (2, 1)}, "whole word"),
        ({"stride": 8}, "no window reads"),
        ({"channels": 8}, "few channels: 49 times"),
        ({"channels": 16, "taps": (1, 3), "stride": (1, 2), "padding": 0}, "do not fit a request"),
        ({"channels": 1, "taps": (19, 5), "stride": (19, 6), "padding": 0}, "do not fit a request"),
    ],
)
def test_refuses_what_it_cannot_do(change: dict[str, Any], reason: str | None) -> None:
    refused = kernel.fits(problem_of(**change))
    assert (refused is None) if reason is None else reason in str(refused)


def test_refuses_what_is_added_or_scaled_a_channel() -> None:
    problem = problem_of()
    for i, extra in ((3, problem.output), (4, TensorMeta(shape=(64,), dtype="float32"))):
        inputs = [*problem.inputs, None, None]
        inputs[i] = extra
        assert "no residual" in str(kernel.fits(replace(problem, inputs=tuple(inputs))))
    grouped = replace(problem, attrs={**problem.attrs, "groups": 3})
    assert "one group" in str(kernel.fits(grouped))
    named = replace(problem, attrs={**problem.attrs, "padding": "same"})
    assert "two axes" in str(catalog.kernel("conv2d_pool.direct.sm90").refusal(named))
    spread = replace(problem, attrs={**problem.attrs, "pool_dilation": (2, 2)})
    assert "dilation of windows" in str(kernel.fits(spread))


def test_no_pooling_of_something_else() -> None:
    x, weight = (TensorMeta(shape=s, dtype="float16") for s in ((1, 3, 32, 32), (64, 3, 7, 7)))
    first = problems.conv(x, weight)
    window = {"kernel_size": (3, 3), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1)}
    other = Problem(op="max_pool2d", inputs=(x,), outputs=(x,), attrs=window)
    for second, why in ((other, "the pooling reads"), (first, "a conv2d and a max_pool2d")):
        assert why in str(problems.unpoolable(first, second))
        with pytest.raises(UsageError, match="no convolution and its pooling"):
            problems.conv2d_pool(first, second)


def test_work_is_the_convolution_s() -> None:
    problem = problem_of(N=3)
    assert problem.flops == 2 * 3 * 112 * 112 * 64 * 147


@pytest.mark.parametrize("N", [1, 8, 128, 256])
@pytest.mark.parametrize("change", [{}, GOOGLENET, SQUEEZENET])
def test_configurations(N: int, change: dict[str, Any]) -> None:
    problem = problem_of(N=N, **change)
    configs = kernel.configs(problem)
    assert len({repr(c) for c in configs}) == len(configs) == kernel.TRIED
    for config in configs:
        stem = kernel.stem_of(problem, **config)
        assert stem.bands * stem.rows >= stem.out_h > (stem.bands - 1) * stem.rows
        assert kernel.TOGETHER * (stem.shared_bytes + 1024) <= 228 * 1024
        assert stem.stages >= 4
        assert stem.pitch <= 256  # of a TMA box
        assert (stem.first - stem.lead) % 8 == 0
        assert stem.lead + 57 * stem.step + 4 * stem.words <= stem.pitch
    if N == 1:  # more blocks than bands of the whole height
        assert kernel.stem_of(problem, **configs[0]).tasks > 16


@pytest.mark.parametrize(
    ("change", "products"),
    [({}, 10), (GOOGLENET, 10), (SQUEEZENET, 3), ({"channels": 4, "taps": 5, "stride": 1}, 7)],
)
def test_few_products_are_wasted(change: dict[str, Any], products: int) -> None:
    """7 rows of taps by 21 values are 147, or 168 in parts of eight: of ten products 160 count."""
    assert kernel.stem_of(problem_of(**change)).products == products


# ------------------------------------------------------------------ what it computes


@pytest.mark.parametrize("change", [{}, GOOGLENET, {"out": "int8", "gamma": 0.25}])
def test_the_reference_is_torch_s(change: dict[str, Any]) -> None:
    problem = problem_of((29, 24), dtype="bfloat16", **change)
    x, weight, bias = operands_of(problem, 1).values()
    middle = F.conv2d(x.double(), weight.double(), bias.double(), 2, 3).relu()
    middle = (middle * problem.attr("gamma")).round()  # half to even; nothing without a gamma
    pooling = (3, 2, problem.attrs["pool_padding"], 1, problem.attrs["ceil_mode"])
    wanted = F.max_pool2d(middle.clamp(-128, 127) if problem.gamma else middle, *pooling)
    (made,) = operation(problem.op).call(
        (x.double(), weight.double(), bias.double()), problem.attrs
    )
    assert made.dtype == (torch.int8 if problem.gamma else torch.float64)
    assert torch.equal(made.double(), wanted)
    assert problem.output.shape == made.shape


def on_cpu(problem: Problem, operands: Tensors, folder: Path, **config: int) -> torch.Tensor:
    assert kernel.fits(problem) is None
    out = problem.output.empty(CPU).fill_(77)
    return conv_pool(problem, operands, out, folder, **config)


# size, how it differs from ResNet's; rows of a band, blocks. All with tasks that a block continues
CASES: dict[str, tuple[tuple[int, int], dict[str, Any], int, int]] = {
    "ResNet": ((32, 64), {}, 3, 2),
    "GoogLeNet": ((32, 64), GOOGLENET, 5, 1),
    "windows of one row, one column": ((24, 48), {"ceil_mode": True}, 4, 2),
    "SqueezeNet": ((27, 40), {**SQUEEZENET, "dtype": "bfloat16"}, 2, 2),
    "two bands across, odd rows": ((21, 136), {"N": 1}, 4, 2),
    "one row": ((7, 8), {"N": 1, "padding": 0, "pool_padding": 1}, 1, 1),
    "int8": ((29, 48), {"out": "int8", "gamma": 0.25, "activation": "relu6"}, 4, 2),
    "int8, negative": ((24, 48), {"out": "int8", "gamma": 0.5, "activation": None}, 8, 1),
    "no bias": ((24, 48), {"bias": None, "activation": None}, 2, 3),
    "one channel": ((20, 72), {"channels": 1, "taps": 5, "padding": 2, "bias": "float16"}, 3, 1),
    "stride 1": ((14, 30), {"N": 3, "channels": 4, "taps": 5, "stride": 1, "padding": 2}, 4, 2),
    "rows only once": ((24, 48), {"taps": 2, "padding": 1, "bias": "bfloat16"}, 3, 1),
    "other strides": (
        (24, 64), {"channels": 2, "taps": (5, 4), "stride": (3, 1), "padding": (0, 2)}, 2, 1
    ),
}  # fmt: skip


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", CASES)
def test_the_source_on_a_processor_is_exact(name: str, tmp_path: Path) -> None:
    size, change, rows, grid = CASES[name]
    problem = problem_of(size, **change)
    operands = operands_of(problem, 0)
    made = on_cpu(problem, operands, tmp_path, rows=rows, grid=grid, stages=5)
    assert torch.equal(made, right(problem, operands))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_what_is_infinite_or_no_number_stays_where_it_is_read(tmp_path: Path) -> None:
    """Beside a run it is multiplied by nothing; a window with one is that."""
    problem = problem_of((24, 64), N=1, activation=None)
    operands = operands_of(problem, 0)
    # the value before the run of pixel 5 of the convolution, and the one behind that of pixel 8
    operands[0][0, 2, 3, 6], operands[0][0, 0, 20, 20] = torch.inf, torch.nan
    operands[1].abs_().add_(1)
    made = on_cpu(problem, operands, tmp_path, rows=3, grid=1)
    wanted = right(problem, operands)
    assert wanted.isnan().any()
    assert wanted.isinf().any()
    assert wanted.isfinite().any()
    assert torch.equal(made.isnan(), wanted.isnan())
    assert torch.equal(made.nan_to_num(1.0), wanted.nan_to_num(1.0))


# ------------------------------------------------------------------ machine code

COMPILED: dict[str, dict[str, Any]] = {
    "ResNet, int8": {"N": 128, "out": "int8", "gamma": 0.25, "bias": "float16"},
    "GoogLeNet, bfloat16": {"N": 128, "dtype": "bfloat16", **GOOGLENET},
    "SqueezeNet": {"N": 128, **SQUEEZENET},
}


def compiled_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, change in COMPILED.items():
        problem = problem_of(**change)
        weight = torch.zeros(problem.inputs[1].shape, dtype=getattr(torch, problem.inputs[1].dtype))
        bias = problem.inputs[2].empty(CPU)
        call = kernel.bind(problem, {1: weight, 2: bias}, **kernel.configs(problem)[0])
        x, out = (meta.empty(torch.device("meta")) for meta in (problem.inputs[0], problem.output))
        yield name, functools.partial(call, x, out=out)


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict[str, Any]]]:
    return compile_all("tests.kernels.conv.test_pool_sm90:compiled_cases")


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_products_from_registers(
    name: str, compiled: dict[str, list[dict[str, Any]]]
) -> None:
    (made,) = compiled[name]
    problem = problem_of(**COMPILED[name])
    stem = kernel.stem_of(problem)
    assert made["kernel"] == "conv_pool"
    assert made["threads"] == kernel.THREADS
    assert made["spilled_bytes"] == 0
    assert made["registers"] <= 65536 // (kernel.TOGETHER * kernel.THREADS)
    assert made["shared_bytes"] == stem.shared_bytes
    # the first row of a band, and two for each row of windows
    assert made["opcodes"]["HGMMA"] == 3 * stem.products
    assert made["opcodes"]["UTMALDG"] > 0
    assert not {"LDL", "STL", "UTMASTG"} & set(made["opcodes"])


def test_blocks_go_on_with_the_next_band() -> None:
    problem = problem_of(N=128)
    weight, bias = (problem.inputs[i].empty(CPU) for i in (1, 2))
    x, out = (meta.empty(torch.device("meta")) for meta in (problem.inputs[0], problem.output))
    with launch.preparing(), launch.watching() as launches:
        kernel.bind(problem, {1: weight, 2: bias}, rows=14)(x, out=out)
    assert launches[0].grid == (kernel.TOGETHER * HOPPER.multiprocessors, 1, 1)


@pytest.mark.parametrize("changes", [
    {"kernel_size": (0, 3)}, {"kernel_size": "3"}, {"pool_stride": (0, 0)}, {"pool_stride": None},
    {"pool_padding": (2, 2)}, {"pool_padding": (-1, 0)}, {"ceil_mode": "yes"}, {"stride": (0, 2)},
    {"padding": (10**9, 0)}, {"gamma": 0.0}, {"gamma": "2"}, {"dtype": "no such type"},
    {"activation": ["relu"]}, {"activation": "gelu"}, {"groups": 0}, {"next": 1},
], ids=str)  # fmt: skip
def test_what_a_stranger_s_plan_may_not_ask(changes: dict[str, Any]) -> None:
    """As the runtime asks: the shapes first, then the kernel; any error is told as the plan's."""
    row = catalog.kernel("conv2d_pool.direct.sm90")
    plain = problem_of(N=2, bias="float16")

    def refused(problem: Problem) -> bool:
        try:
            made = shapes.made(problem.op, problem.inputs, problem.attrs)
            same = made == [(m.dtype, m.shape) for m in problem.outputs]
            return not same or row.refusal(problem) is not None
        except Exception:
            return True

    assert not refused(plain)
    assert refused(replace(plain, attrs={**plain.attrs, **changes}))
