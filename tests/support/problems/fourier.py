"""Convolutions that Fourier transforms take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tessella.kernels import catalog
from tests.support.problems.convolutions import Case, draw, right, run

WHOLE = catalog.kernel("conv2d.fft")
TILES = catalog.kernel("conv2d.fft_tiling")
LAST = "channels_last"
# largest error over largest value, by what the products are made of
TOLERANCES = {"float32": 2e-6, "tf32": 3e-3, "float16": 3e-3, "bfloat16": 1.5e-2}


def assert_right(
    row: catalog.Kernel,
    case: Case,
    config: dict[str, Any],
    device: str = "cpu",
    *,
    integers: bool = False,
    seed: int = 0,
) -> None:
    """The kernel agrees with float64, as nearly as its type allows."""
    assert row.load().fits(case.problem) is None
    operands = draw(case, device, integers=integers, seed=seed)
    made = run(row, case, operands, config).double()
    expected = right(case, operands)
    if expected.numel() == 0:
        return
    tolerance = TOLERANCES["tf32" if case.math == "tf32" else case.dtype]
    error = float((made - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    assert error <= tolerance, f"{row.id} {config}: error {error:.2e}"


PLAIN = Case(x=(1, 5, 11, 9), w=(6, 5, 3, 3), padding=1)
EPILOGUE: dict[str, Any] = {
    "bias": "float32", "residual": True, "scale": True, "alpha": 0.5, "beta": -2.0,
}  # fmt: skip
CASES = {
    "plain": PLAIN,
    "constant no": replace(PLAIN, constant=False),
    "last": replace(PLAIN, x_format=LAST, w_format=LAST, constant=False),
    "to last": replace(PLAIN, out_format=LAST, padding=(0, 2)),
    "from last": replace(PLAIN, x_format=LAST, out_format="contiguous"),
    "more than a block": Case(x=(3, 19, 8, 7), w=(18, 19, 3, 2), padding=1, constant=False),
    "many images": Case(x=(17, 2, 5, 4), w=(3, 2, 3, 3), padding=1),
    "1x1": Case(x=(2, 3, 5, 6), w=(4, 3, 1, 1)),
    "11x11": Case(x=(1, 2, 15, 13), w=(3, 2, 11, 11), padding=5),
    "tall": Case(x=(1, 2, 17, 7), w=(3, 2, 8, 1), padding=(4, 0)),
    "one pixel": Case(x=(1, 3, 1, 1), w=(4, 3, 5, 5), padding=2),
    "wide padding": Case(x=(1, 2, 2, 3), w=(3, 2, 3, 3), padding=(4, 5)),
    "filter as large as the image": Case(x=(1, 2, 7, 6), w=(3, 2, 7, 6)),
    "stride": replace(PLAIN, stride=(2, 3)),
    "dilation": Case(x=(1, 3, 13, 12), w=(4, 3, 3, 4), dilation=(2, 3), padding=(2, 4)),
    "stride and dilation": Case(x=(1, 3, 17, 12), w=(4, 3, 3, 2), dilation=(3, 2), stride=2),
    "view": replace(PLAIN, x_format="strided"),
    "empty": Case(x=(0, 3, 8, 8), w=(4, 3, 3, 3)),
    "float16": replace(PLAIN, dtype="float16", bias="float16", residual=True),
    "float16 to float32": replace(PLAIN, dtype="float16", out="float32", x_format=LAST),
    "tf32": replace(PLAIN, math="tf32"),
    "whole epilogue": replace(PLAIN, activation="silu", **EPILOGUE),
    "whole epilogue last": replace(PLAIN, activation="relu", x_format=LAST, **EPILOGUE),
}  # fmt: skip
BOTH = pytest.mark.parametrize("row", [WHOLE, TILES], ids=lambda row: row.algorithm)
