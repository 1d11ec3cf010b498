"""Rows at places that were computed, beside torch's own ``gather``."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tessella.kernels.detect import gathered
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a GPU, or Triton's interpreter",
)


def asked(
    shape: tuple[int, ...], most: int, dtype: str = "float16", axis: int = 1, **more: Any
) -> Problem:
    made = (shape[0], most, *shape[2:])
    metas = [
        TensorMeta(shape=shape, dtype=dtype),
        TensorMeta(shape=made, dtype="int64", format="strided"),
    ]
    args = ({"input": 0}, axis, {"input": 1})
    return Problem(
        op="fallback", inputs=tuple(metas), outputs=(TensorMeta(shape=made, dtype=dtype),),
        attrs={"target": "aten::gather", "args": args, "kwargs": {}}, **more,
    )  # fmt: skip


@runs
@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize("shape", [(1, 9, 4), (3, 40, 37), (2, 5, 300)])
def test_rows_are_torch_s(shape: tuple[int, ...], expanded: bool) -> None:
    problem = asked(shape, 7, "float32")
    assert problem.misfit is None
    assert gathered.fits(problem) is None
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).to(DEVICE)
    wide = 1 if expanded else shape[2]
    index = torch.randint(shape[1], (shape[0], 7, wide), generator=generator).to(DEVICE)
    index = index.expand(-1, -1, shape[2])
    for config in gathered.configs(problem):
        made = gathered.bind(problem, {}, **config)(x, index)
        assert torch.equal(made, x.gather(1, index)), config
    wrong = index.clone()
    wrong[0, 0], wrong[-1, -1] = -1, shape[1]  # torch ends the process's context
    made = gathered.bind(problem, {})(x, wrong)
    assert not made[0, 0].any()
    assert not made[-1, -1].any()


def test_rows_of_a_constant_are_gathered() -> None:
    assert gathered.fits(asked((1, 9, 4), 3, constant=(0,))) is None
    assert "computed" in str(gathered.fits(asked((1, 9, 4), 3, constant=(1,))))


@pytest.mark.parametrize(("problem", "why"), [
    (asked((2, 9, 4), 3, axis=2), "rows of"), (asked((2, 9, 4, 4), 3), "rows of"),
    (asked((2, 9, 4), 3, "int64"), "floating"),
])  # fmt: skip
def test_other_questions_are_left_to_torch(problem: Problem, why: str) -> None:
    assert why in str(gathered.fits(problem))
