"""Pools and means over axes that are not the last in memory, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import Format
from tests.support.problems.pools import (
    CHAINS,
    COLUMNS,
    FORMATS,
    GLOBAL,
    IMAGE,
    ONE,
    WINDOWS,
    agrees,
    chain_agrees,
    chained,
    chains,
    image,
    maximum,
    mean,
    over,
    problem,
)

# lanes beyond the edge compute with infinities, which NumPy, but no GPU, remarks on
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", WINDOWS)
def test_windows(case: str, format: Format) -> None:
    op, attrs = WINDOWS[case]
    agrees("windows", problem(op, IMAGE, attrs, format=format))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_windows_of_small_types(dtype: str) -> None:
    agrees("windows", problem("max_pool2d", IMAGE, maximum(), dtype))
    if dtype != "int8":
        agrees("windows", problem("avg_pool2d", IMAGE, mean(), dtype))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("side", [11, 12, 40])
def test_torchs_pools_of_8_bits_are_refused_where_torch_refuses(side: int, format: Format) -> None:
    """On a CPU it counts their pixels in 8 bits."""
    row = catalog.kernel("max_pool2d.aten")
    refused = row.refusal(
        problem("max_pool2d", (1, 8, side, side), maximum(), "int8", format=format)
    )
    x = torch.zeros(1, 8, side, side, dtype=torch.int8)
    if format == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    try:
        torch.max_pool2d(x, 3, 2, 1)
    except RuntimeError:
        assert "at most 127 pixels" in (refused or "")
    else:
        assert refused is None


@pytest.mark.parametrize("asked", CHAINS.values(), ids=CHAINS)
def test_chains(asked: Problem) -> None:
    chain_agrees(asked)


@pytest.mark.parametrize("asked", GLOBAL.values(), ids=GLOBAL)
def test_global_means(asked: Problem) -> None:
    chain_agrees(asked, algorithm="columns")


def test_slices_are_pooled_and_written() -> None:
    whole, place = image(c=48), image(5, 7, 64)
    asked = chains()["norm after max"]
    assert asked.output.shape == (2, 20, 5, 7)
    x, y = whole.part(1, 20), place.part(1, 20)
    assert x.strides is not None
    assert y.strides is not None
    chain_agrees(replace(asked, inputs=(x, *asked.inputs[1:]), outputs=(y,)))


def test_not_a_number_is_the_largest() -> None:
    asked = problem("max_pool2d", (1, 4, 5, 5), maximum())
    x = torch.randn(1, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    x[0, 1, 2, 2], x[0, 2] = torch.nan, -torch.inf
    row = catalog.kernel("max_pool2d.windows")
    made = asked.output.empty(CPU)
    row.load().bind(asked, {}, **row.configs(asked)[0])(x, out=made)
    right = torch.nn.functional.max_pool2d(x, 3, 2, 1)
    torch.testing.assert_close(made, right, equal_nan=True)


@pytest.mark.parametrize("asked", COLUMNS.values(), ids=COLUMNS)
def test_columns(asked: Problem) -> None:
    agrees("columns", asked)


REFUSED: dict[str, tuple[str, Problem, str]] = {
    "the mean of int8": ("windows", problem("avg_pool2d", IMAGE, mean(), "int8"), "torch.int8"),
    "windows of two sizes": (
        "windows", problem("adaptive_avg_pool2d", IMAGE, {"output_size": (2, 7)}), "several",
    ),
    "a large window": (
        "windows", problem("max_pool2d", (1, 1, 40, 40), maximum((40, 40))), "1600 pixels",
    ),
    "much before windows that overlap": (
        "windows", chained(
            [image()], ("relu", (0,), {}), ("max_pool2d", (1,), maximum()), format="channels_last"
        ), "overlap",
    ),
    "two poolings": (
        "windows", chained(
            [image()], ("max_pool2d", (0,), maximum()), ("max_pool2d", (1,), maximum()),
            format="channels_last",
        ), "one pooling",
    ),
    "a gate at the size of what is pooled": (
        "windows", chained(
            [image()], ("adaptive_avg_pool2d", (0,), ONE), ("mul", (0, 1), {"scalar": None}),
            format="channels_last",
        ), "of that shape",
    ),
    "rows": (
        "windows", chained(
            [image()], ("max_pool2d", (0,), maximum()),
            ("softmax", (1,), {"dim": 3, "dtype": None}),
            format="channels_last",
        ), "element-wise",
    ),
    "an empty batch": ("windows", problem("max_pool2d", (0, 2, 9, 9), maximum()), "nothing"),
    "the last axes": (
        "columns", problem("mean", IMAGE, over(2, 3), format="contiguous"), "last axes",
    ),
    "a chain that reduces the last axes": (
        "columns", chained(
            [image(format="contiguous")], ("adaptive_avg_pool2d", (0,), ONE), ("neg", (1,), {}),
            format="contiguous",
        ), "last axes",
    ),
    "a chain with windows": (
        "columns", chains()["norm after max"], "global",
    ),
    "axes apart": ("columns", problem("mean", (3, 4, 5), over(0, 2)), "together"),
    "axes in another order": (
        "columns", problem("sum", (3, 4, 5, 6), over(0)), "together",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("algorithm", "asked", "why"), REFUSED.values(), ids=REFUSED)
def test_what_they_cannot_do_is_told(algorithm: str, asked: Problem, why: str) -> None:
    assert why in str(catalog.kernel(f"{asked.op}.{algorithm}").refusal(asked))


def test_another_format_is_refused() -> None:
    asked = problem("max_pool2d", IMAGE, maximum())
    other = replace(asked, outputs=(replace(asked.output, format="contiguous"),))
    assert "format" in str(catalog.kernel("max_pool2d.windows").refusal(other))
