"""Programs, pools and means on a Hopper GPU: right in every type and format they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessella.operations.problem import Problem
from tests.support.problems import pools as pools
from tests.support.problems import programs as programs
from tests.support.problems import quantized as quantized

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

GPU = torch.device("cuda")


@pytest.mark.parametrize("asked", programs.CASES.values(), ids=programs.CASES)
def test_programs(asked: Problem) -> None:
    programs.agrees(asked, programs.tensors(asked, GPU))


@pytest.mark.parametrize("case", programs.ALONG)
def test_along_rows(case: str) -> None:
    asked = programs.alone(case)
    programs.agrees(asked, programs.tensors(asked, GPU))


@pytest.mark.parametrize("columns", [768, 1000, 4096, 16384])
def test_long_rows(columns: int) -> None:
    asked = programs.add_norm("float16", columns)
    programs.agrees(asked, programs.tensors(asked, GPU))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("format", pools.FORMATS)
@pytest.mark.parametrize("case", pools.WINDOWS)
def test_windows(case: str, format: pools.Format, dtype: str) -> None:
    op, attrs = pools.WINDOWS[case]
    pools.agrees("windows", pools.problem(op, pools.IMAGE, attrs, dtype, format), GPU)


def test_windows_of_int8() -> None:
    asked = pools.problem("max_pool2d", (3, 64, 33, 31), pools.maximum(), "int8")
    pools.agrees("windows", asked, GPU)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("asked", pools.COLUMNS.values(), ids=pools.COLUMNS)
def test_columns(asked: Problem, dtype: str) -> None:
    (x,), (y,) = asked.inputs, asked.outputs
    typed = replace(asked, inputs=(replace(x, dtype=dtype),), outputs=(replace(y, dtype=dtype),))
    pools.agrees("columns", typed, GPU)


@pytest.mark.parametrize("asked", pools.CHAINS.values(), ids=pools.CHAINS)
def test_chains(asked: Problem) -> None:
    pools.chain_agrees(asked, GPU)


@pytest.mark.parametrize("asked", pools.GLOBAL.values(), ids=pools.GLOBAL)
def test_global_means(asked: Problem) -> None:
    pools.chain_agrees(asked, GPU, "columns")


@pytest.mark.parametrize("kernel", ["quantize.tiled", "quantize.generated"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("scale", quantized.SCALES)
def test_every_code(kernel: str, dtype: str, scale: float) -> None:
    quantized.every_quantized_value(kernel, dtype, scale, GPU)
