"""A layer norm and the product of its rows in one launch, beside float64."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tessella.core.errors import UsageError
from tessella.kernels.gemm import norm_first
from tessella.operations import problems
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a GPU, or Triton's interpreter",
)
EPS = 1e-5
LIMITS = {"float16": 2e-3, "bfloat16": 1.2e-2}


def parts(*lead: int, n: int, k: int, dtype: str = "float16", **more: Any) -> list[Problem]:
    """The two steps, as a graph has them."""

    def meta(*shape: int) -> TensorMeta:
        return TensorMeta(shape=shape, dtype=dtype)

    rows, vector = meta(*lead, k), meta(k)
    norm = Problem(
        op="layer_norm", inputs=(rows, vector, vector), outputs=(rows,), constant=(1, 2),
        attrs={"normalized_shape": (k,), "eps": EPS},
    )  # fmt: skip
    return [norm, problems.linear(rows, meta(n, k), meta(n), constant=(1, 2), **more)]


CASES = {
    "even": parts(2, 70, n=96, k=128),
    "odd": parts(33, n=70, k=52, activation="gelu"),
    "bfloat16": parts(1, 20, n=40, k=64, dtype="bfloat16", activation="relu"),
    "gamma": parts(5, n=8, k=16, gamma=0.5),
}


@runs
@pytest.mark.parametrize("name", CASES)
def test_every_configuration_agrees_with_float64(name: str) -> None:
    """Also of rows whose mean is 60 times their deviation."""
    problem = problems.norm_linear(*CASES[name])
    assert problem.misfit is None
    assert norm_first.fits(problem) is None
    generator = torch.Generator().manual_seed(5)
    dtype = getattr(torch, problem.output.dtype)
    x, weight, bias, by, plus = (
        torch.randn(m.shape, generator=generator).to(DEVICE) for m in problem.given
    )
    x[..., 0, :] += 60.0
    given = [t.to(dtype) for t in (x, weight, bias, by + 1, plus)]
    x, weight, bias, by, plus = (t.double() for t in given)
    right = F.linear(F.layer_norm(x, x.shape[-1:], by, plus, EPS), weight, bias)
    activation = problem.attr("activation")
    right = problem.attr("gamma") * (ACTIVATIONS[activation](right) if activation else right)
    named = dict(zip(("input", "weight", "bias", "norm_weight", "norm_bias"), given, strict=True))
    ordered = problem.operation.ordered(**{name: t.double() for name, t in named.items()})
    (whole,) = problem.operation.call(ordered, problem.attrs)
    torch.testing.assert_close(whole, right)
    constants = dict(zip(problem.operation.positions(list(named)[1:]), given[1:], strict=True))
    for config in norm_first.configs(problem):
        out = problem.output.empty(torch.device(DEVICE)).fill_(torch.nan)
        made = norm_first.bind(problem, constants, **config)(given[0], out=out)
        assert (made.double() - right).abs().max() < LIMITS[
            problem.output.dtype
        ] * right.abs().max()


def test_what_is_no_such_pair_is_told() -> None:
    norm, layer = CASES["even"]
    rows = TensorMeta(shape=(2, 70, 96), dtype="float16")
    adds = problems.linear(layer["input"], layer["weight"], None, rows, constant=(1,))
    with pytest.raises(UsageError, match="adds no residual"):
        problems.norm_linear(norm, adds)
    plain = replace(norm, inputs=norm.inputs[:1], constant=())
    with pytest.raises(UsageError, match="a weight and a bias"):
        problems.norm_linear(plain, layer)
    many = problems.norm_linear(*parts(norm_first.MOST_ROWS + 1, n=8, k=8))
    assert "rows" in str(norm_first.fits(many))
    wide = problems.norm_linear(*parts(8, n=8, k=8, dtype="float32"))
    assert "float16" in str(norm_first.fits(wide))
    adding = replace(
        problems.norm_linear(norm, layer), inputs=(*layer.inputs[:3], rows, None, *norm.inputs[1:])
    )
    assert "no residual" in str(norm_first.fits(adding))
    computed = replace(problems.norm_linear(norm, layer), constant=(1, 2))
    assert "known" in str(norm_first.fits(computed))
