"""Attention by cuDNN: what it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tessella.kernels import catalog
from tessella.kernels.problem import Problem, TensorMeta

ROW = catalog.kernel("scaled_dot_product_attention.cudnn")


def problem(
    dtype: str = "float16", width: int = 64, length: int = 33, causal: bool = False
) -> Problem:
    def heads(rows: int) -> TensorMeta:
        return TensorMeta(shape=(2, 3, rows, width), dtype=dtype)

    return Problem(
        op="scaled_dot_product_attention",
        inputs=(heads(length), heads(length), heads(length)),
        outputs=(replace(heads(length), format="strided"),),
        attrs={"is_causal": causal, "scale": None, "enable_gqa": False},
    )


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (problem("float32"), "float16 and bfloat16"),
        (problem(width=20), "multiple of 8"),
        (problem(width=256), "at most 128"),
        (problem(length=0), "empty"),
        (replace(problem(), inputs=(*problem().inputs, problem().inputs[0])), "mask"),
    ],
)
def test_what_it_refuses(asked: Problem, reason: str) -> None:
    assert reason in ROW.load().fits(asked)


def test_what_it_takes() -> None:
    assert ROW.load().fits(problem("bfloat16", 128)) is None
