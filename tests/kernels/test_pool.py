"""Pools and means over axes that are not the last in memory, against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.kernels import catalog, reference
from tessella.kernels.problem import Format, Problem, TensorMeta

CPU = torch.device("cpu")
# the interpreter cuts float32 to bfloat16 where a GPU rounds
TOLERANCES = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2, "int8": 0.0}
FORMATS: tuple[Format, ...] = ("contiguous", "channels_last")


def problem(
    op: str,
    shape: tuple[int, ...],
    attrs: dict[str, Any],
    dtype: str = "float32",
    format: Format = "channels_last",
) -> Problem:
    x = TensorMeta(shape=shape, dtype=dtype, format=format if len(shape) == 4 else "contiguous")
    (made,) = reference.call(op, [x.empty(torch.device("meta"))], attrs)
    kept: Format = format if made.dim() == 4 else "contiguous"
    out = TensorMeta(shape=tuple(made.shape), dtype=dtype, format=kept)
    return Problem(op=op, inputs=(x,), outputs=(out,), attrs=attrs)


def maximum(
    kernel: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (2, 2),
    padding: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    ceil_mode: bool = False,
) -> dict[str, Any]:
    return {
        "kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation,
        "ceil_mode": ceil_mode,
    }  # fmt: skip


def mean(
    kernel: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (2, 2),
    padding: tuple[int, int] = (1, 1),
    ceil_mode: bool = False,
    padded: bool = True,
    divisor: int | None = None,
) -> dict[str, Any]:
    return {
        "kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": ceil_mode,
        "count_include_pad": padded, "divisor_override": divisor,
    }  # fmt: skip


IMAGE = (2, 20, 9, 14)
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "max": ("max_pool2d", maximum()),
    "max, over the edge": ("max_pool2d", maximum(ceil_mode=True)),
    "max, dilated": ("max_pool2d", maximum((2, 3), (1, 2), (1, 0), (3, 2))),
    "max of all": ("max_pool2d", maximum((9, 14), (1, 1), (0, 0))),
    "mean": ("avg_pool2d", mean()),
    "mean, over the edge": ("avg_pool2d", mean(ceil_mode=True)),
    "mean of the image only": ("avg_pool2d", mean(ceil_mode=True, padded=False)),
    "mean by 5": ("avg_pool2d", mean((2, 2), (2, 2), (0, 0), divisor=5)),
    "mean, cut off": ("avg_pool2d", mean((2, 3), (2, 3), (0, 0))),
    "adaptive": ("adaptive_avg_pool2d", {"output_size": (3, 7)}),
}


def agrees(algorithm: str, asked: Problem, device: torch.device = CPU) -> None:
    """Every configuration gives float64's answer; where it stays exact, to the last bit."""
    row = catalog.kernel(f"{asked.op}.{algorithm}")
    assert row.refusal(asked) is None
    (meta,), out = asked.inputs, asked.output
    values = 40 * torch.randn(meta.shape, generator=torch.Generator().manual_seed(0))
    x = meta.empty(device).copy_(
        values.clamp(-127, 127).round() if meta.dtype == "int8" else values
    )
    (right,) = reference.call(asked.op, [x.double()], asked.attrs)
    for config in row.configs(asked):
        made = out.empty(device).fill_(77)
        row.load().bind(asked, {}, **config)(x, out=made)
        assert out.matches(made)
        error = (made.double() - right).abs().max() / right.abs().max()
        assert error <= (0.0 if "max" in asked.op else TOLERANCES[out.dtype]), config


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


def test_not_a_number_is_the_largest() -> None:
    asked = problem("max_pool2d", (1, 4, 5, 5), maximum())
    x = torch.randn(1, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    x[0, 1, 2, 2], x[0, 2] = torch.nan, -torch.inf
    row = catalog.kernel("max_pool2d.windows")
    made = asked.output.empty(CPU)
    row.load().bind(asked, {}, **row.configs(asked)[0])(x, out=made)
    right = torch.nn.functional.max_pool2d(x, 3, 2, 1)
    torch.testing.assert_close(made, right, equal_nan=True)


ONE = {"output_size": (1, 1)}


def over(*dim: int, keep: bool = False) -> dict[str, Any]:
    return {"dim": dim, "keepdim": keep, "dtype": None}


COLUMNS: dict[str, Problem] = {
    "a global pool": problem("adaptive_avg_pool2d", (3, 40, 5, 7), ONE),
    "of many pixels": problem("adaptive_avg_pool2d", (2, 70, 33, 21), ONE),
    "in float16": problem("adaptive_avg_pool2d", (3, 40, 5, 7), ONE, "float16"),
    "mean of pixels": problem("mean", (3, 40, 5, 7), over(-1, -2)),
    "mean of pixels, kept": problem("mean", (3, 40, 5, 7), over(2, 3, keep=True)),
    "sum of tokens": problem("sum", (3, 11, 40), over(1)),
    "sum of the batch": problem("sum", (9, 40), over(0)),
    "sum of channels": problem("sum", (3, 40, 5, 7), over(1), format="contiguous"),
}


@pytest.mark.parametrize("asked", COLUMNS.values(), ids=COLUMNS)
def test_columns(asked: Problem) -> None:
    agrees("columns", asked)


REFUSED: dict[str, tuple[str, Problem, str]] = {
    "the mean of int8": ("windows", problem("avg_pool2d", IMAGE, mean(), "int8"), "scale"),
    "windows of two sizes": (
        "windows", problem("adaptive_avg_pool2d", IMAGE, {"output_size": (2, 7)}), "several",
    ),
    "a large window": (
        "windows", problem("max_pool2d", (1, 1, 40, 40), maximum((40, 40))), "1600 pixels",
    ),
    "an empty batch": ("windows", problem("max_pool2d", (0, 2, 9, 9), maximum()), "nothing"),
    "the last axes": (
        "columns", problem("mean", IMAGE, over(2, 3), format="contiguous"), "last axes",
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


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """ResNet's pools, which ``test_pointwise`` compiles for a GPU that is not there."""
    pool = problem("max_pool2d", (2, 64, 112, 112), maximum(), "float16")
    last = problem("adaptive_avg_pool2d", (2, 2048, 7, 7), ONE, "float16")
    yield "max", functools.partial(_launch, "windows", pool)
    yield (
        "max int8",
        functools.partial(
            _launch, "windows", problem("max_pool2d", (2, 64, 56, 56), maximum(), "int8")
        ),
    )
    nchw = problem("avg_pool2d", (2, 64, 56, 56), mean(), "float16", "contiguous")
    yield "mean NCHW", functools.partial(_launch, "windows", nchw)
    yield "global mean", functools.partial(_launch, "columns", last)


def _launch(algorithm: str, asked: Problem) -> None:
    row = catalog.kernel(f"{asked.op}.{algorithm}")
    call = row.load().bind(asked, {}, **row.configs(asked)[0])
    call(asked.inputs[0].empty(CPU), out=asked.output.empty(CPU))
