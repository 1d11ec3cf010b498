"""Transposed convolutions as products, in Triton's interpreter, beside float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tessella.kernels.conv import transposed
from tests.support.problems.grown import PROBLEMS, check

TILES = [
    {"pixels": 32, "columns": 64, "depth": 16, "warps": 1},
    {"pixels": 16, "columns": 16, "depth": 32, "warps": 1},
]


@pytest.mark.parametrize("config", TILES, ids=repr)
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_pixel_becomes_a_block_of_pixels(name: str, config: dict[str, Any]) -> None:
    check(PROBLEMS[name], config)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"stride": (1, 1, 1)}, "overlap"),
        ({"padding": (1, 0, 0)}, "padding"),
        ({"output_padding": (1, 0, 0)}, "padding"),
        ({"dilation": (1, 2, 1)}, "dilation"),
    ],
)
def test_others_are_refused(changed: dict[str, Any], why: str) -> None:
    asked = PROBLEMS["volumes"]
    told = transposed.fits(replace(asked, attrs={**asked.attrs, **changed}))
    assert told is not None
    assert why in told
