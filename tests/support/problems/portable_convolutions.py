"""Convolutions that the portable kernels take."""

from __future__ import annotations

import math
import os
from dataclasses import asdict

import pytest

from tessella.kernels import catalog
from tessella.kernels.conv import channelwise
from tests.support.problems.convolutions import Case

ALGORITHMS = ("gemm", "implicit_gemm", "implicit_precomp_gemm", "direct")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="numbers are tests/gpu's where there is one"
)

LAST = "channels_last"
CASES = {
    "plain": Case(x=(1, 16, 9, 7), w=(8, 16, 3, 3), padding=1),
    "last": Case(x=(1, 16, 9, 7), w=(8, 16, 3, 3), padding=1, x_format=LAST),
    "to last": Case(x=(1, 16, 5, 7), w=(20, 16, 3, 1), padding=(1, 0), out_format=LAST),
    "from last": Case(
        x=(1, 16, 5, 7), w=(8, 16, 1, 3), padding=(0, 1), x_format=LAST, out_format="contiguous",
    ),
    "odd": Case(x=(2, 5, 9, 7), w=(7, 5, 3, 3), padding=1, stride=2, bias="float32"),
    "odd last": Case(x=(2, 5, 9, 7), w=(7, 5, 3, 3), padding=1, stride=2, x_format=LAST),
    "pointwise": Case(x=(2, 17, 3, 5), w=(9, 17, 1, 1), x_format=LAST, residual=True, beta=0.5),
    "one pixel": Case(x=(1, 3, 1, 1), w=(4, 3, 5, 5), padding=2),
    "empty": Case(x=(0, 3, 8, 8), w=(4, 3, 3, 3)),
    "groups": Case(x=(1, 8, 6, 7), w=(12, 4, 3, 2), groups=2, dilation=(2, 1), padding=(0, 3)),
    "depthwise": Case(x=(2, 6, 9, 7), w=(6, 1, 3, 3), groups=6, padding=1, activation="relu"),
    "depthwise last": Case(
        x=(1, 6, 10, 7), w=(12, 1, 5, 5), groups=6, padding=2, stride=2, x_format=LAST,
        bias="float32",
    ),
    "depthwise half": Case(x=(1, 4, 6, 7), w=(4, 1, 3, 3), groups=4, padding=1, dtype="float16"),
    "depthwise dilated": Case(x=(1, 4, 11, 9), w=(4, 1, 3, 3), groups=4, dilation=2, stride=(3, 1)),
    "depthwise 7": Case(
        x=(2, 12, 8, 9), w=(12, 1, 7, 7), groups=12, padding=3, x_format=LAST, dtype="float16",
        bias="float32", residual=True, scale=True, activation="silu", gamma=2.0,
    ),
    "depthwise pairs": Case(
        x=(2, 5, 13, 17), w=(10, 1, 3, 5), groups=5, stride=(2, 3), dilation=(3, 2), x_format=LAST,
        padding=(0, 4), activation="gelu",
    ),
    "depthwise int8": Case(
        x=(1, 40, 8, 9), w=(40, 1, 5, 5), groups=40, padding=2, dtype="int8", x_format=LAST,
        scale=True, bias="float32", residual=True, activation="relu",
    ),
    "depthwise int8 sums": Case(
        x=(1, 6, 7, 7), w=(6, 1, 3, 3), groups=6, padding=1, dtype="int8", out="int32",
        x_format=LAST,
    ),
    "depthwise argument": Case(
        x=(1, 24, 8, 8), w=(24, 1, 3, 3), groups=24, padding=1, stride=2, constant=False,
        x_format=LAST, dtype="float16",
    ),
    "depthwise between formats": Case(
        x=(1, 6, 9, 8), w=(6, 1, 5, 3), groups=6, padding=(2, 1), x_format=LAST,
        out_format="contiguous",
    ),
    "view": Case(x=(1, 5, 6, 7), w=(6, 5, 2, 2), x_format="strided"),
    "argument": Case(x=(1, 16, 6, 6), w=(8, 16, 3, 3), constant=False, padding=1),
    "argument last": Case(
        x=(1, 6, 5, 5), w=(8, 6, 3, 3), constant=False, padding=1, x_format=LAST, w_format=LAST,
    ),
    "whole epilogue": Case(
        x=(1, 8, 5, 6), w=(9, 8, 3, 3), bias="float32", residual=True, scale=True, alpha=0.5,
        beta=-2.0, activation="silu", x_format=LAST,
    ),
    "factor": Case(
        x=(1, 8, 5, 6), w=(9, 8, 3, 3), bias="float32", scale=True, gamma=3.0, activation="silu",
    ),
    "int8 factor": Case(
        x=(1, 32, 5, 5), w=(24, 32, 3, 3), dtype="int8", x_format=LAST, scale=True,
        activation="relu", gamma=0.25,
    ),
    "float16": Case(x=(1, 32, 5, 5), w=(24, 32, 3, 3), dtype="float16", padding=1, bias="float16"),
    "int8": Case(
        x=(1, 32, 5, 5), w=(24, 32, 3, 3), dtype="int8", padding=1, x_format=LAST, scale=True,
        bias="float32", residual=True, activation="relu",
    ),
    "int8 sums": Case(x=(1, 5, 5, 5), w=(6, 5, 3, 3), dtype="int8", out="int32"),
    "one axis": Case(x=(2, 4, 17), w=(8, 4, 5), stride=2, padding=2, bias="float32"),
    "three axes": Case(x=(2, 4, 5, 6, 7), w=(8, 4, 3, 2, 1), padding=(1, 0, 0), stride=(2, 1, 1)),
    "three axes depthwise": Case(x=(1, 4, 5, 6, 7), w=(4, 1, 2, 3, 3), groups=4, padding=1),
}  # fmt: skip

DEPTHWISE_CASES = {  # by ``direct`` only
    "dilated last": Case(
        x=(2, 8, 17, 13), w=(8, 1, 3, 3), groups=8, padding=(5, 3), dilation=(4, 2), x_format=LAST,
        residual=True, beta=0.5,
    ),
    "far beside": Case(
        x=(1, 4, 3, 2), w=(4, 1, 2, 2), groups=4, padding=(9, 7), x_format=LAST, bias="float32",
    ),
    "strided": Case(
        x=(2, 12, 11, 10), w=(12, 1, 2, 1), groups=12, stride=(3, 2), padding=(1, 0), x_format=LAST,
        dtype="float16", bias="float16", activation="hardswish",
    ),
    "view": Case(
        x=(1, 4, 5, 6), w=(4, 1, 3, 3), groups=4, padding=1, x_format="strided", out_format=LAST,
    ),
    "three axes": Case(
        x=(2, 4, 5, 6, 7), w=(4, 1, 3, 2, 2), groups=4, padding=(1, 2, 0), stride=(2, 1, 1),
        residual=True, bias="float32",
    ),
    **{name: CASES[f"depthwise {name}"] for name in ("7", "pairs", "int8 sums", "argument")},
}  # fmt: skip


def row(algorithm: str, case: Case) -> catalog.Kernel:
    return catalog.kernel(f"{case.problem.op}.{algorithm}")


SHAPES = sorted({shape for shapes in channelwise.SHAPES.values() for shape in shapes})


def strip_of(case: Case, shape: tuple[int, int, int], rows: int) -> dict[str, int]:
    """A configuration of ``direct`` for a depthwise case: two tiles of filters where it can be."""
    values, columns, lines = shape
    filters = case.w[0]
    values = math.gcd(values, filters) if filters == case.groups else 1
    vectors = filters // values
    strip = channelwise.Strip(
        values=values, columns=columns, lines=lines, rows=rows if lines else 1,
        vectors=vectors if vectors % 2 else vectors // 2, warps=1,
    )  # fmt: skip
    return asdict(strip)
