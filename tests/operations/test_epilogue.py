"""The contract of products and convolutions in plain torch: scale, bias, residual, the factors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tessella.core.errors import UsageError
from tessella.kernels import catalog
from tessella.kernels.epilogue.sixteen_bit import in_sixteen_bits
from tessella.operations import problems
from tessella.operations.epilogue import ACTIVATIONS, Epilogue, finish, finish_, store
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(product: np.ndarray, bias: object, residual: object, scale: object) -> np.ndarray:
    return 1.5 * np.maximum(0.5 * scale * product + bias - 2.0 * residual, 0)


ATTRS = {"activation": "relu", "alpha": 0.5, "beta": -2.0, "gamma": 1.5}


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_matmul(transpose_a: bool, transpose_b: bool) -> None:
    a, b = draw(2, 3, 4), draw(2, 4, 5, seed=1)
    bias, residual, scale = draw(5, seed=2), draw(2, 3, 5, seed=3), draw(5, seed=4)
    inputs = (a.mT if transpose_a else a, b.mT if transpose_b else b, bias, residual, scale)
    attrs = {**ATTRS, "transpose_a": transpose_a, "transpose_b": transpose_b}
    (made,) = operation("matmul").call(inputs, attrs)
    right = whole(a.numpy() @ b.numpy(), *(t.numpy() for t in (bias, residual, scale)))
    np.testing.assert_allclose(made.numpy(), right, rtol=1e-12, atol=1e-12)


def test_linear() -> None:
    x, w = draw(3, 4), draw(5, 4, seed=1)
    rest = (draw(5, seed=2), draw(3, 5, seed=3), draw(5, seed=4))
    (made,) = operation("linear").call((x, w, *rest), ATTRS)
    right = whole(x.numpy() @ w.numpy().T, *(t.numpy() for t in rest))
    np.testing.assert_allclose(made.numpy(), right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_convolution(axes: int) -> None:
    x, w = draw(2, 3, *[4] * axes), draw(5, 3, *[1] * axes, seed=1)
    out = (2, 5, *[4] * axes)
    bias, residual, scale = draw(5, seed=2), draw(*out, seed=3), draw(5, seed=4)
    same = {"stride": [1] * axes, "padding": [0] * axes, "dilation": [1] * axes, "groups": 1}
    inputs = (x, w, bias, residual, scale)
    (made,) = operation(f"conv{axes}d").call(inputs, {**ATTRS, **same})
    product = np.einsum("nc...,kc->nk...", x.numpy(), w.numpy().reshape(5, 3))
    column = (5, *[1] * axes)
    right = whole(
        product, bias.numpy().reshape(column), residual.numpy(), scale.numpy().reshape(column)
    )
    np.testing.assert_allclose(made.numpy(), right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_small_types_are_computed_exactly(dtype: torch.dtype) -> None:
    x, w = (draw(7, 100, seed=s).mul(9).round().clamp(-100, 100).to(dtype) for s in (0, 1))
    (made,) = operation("matmul").call((x, w), {"transpose_b": True})
    assert made.dtype == torch.float64
    assert np.array_equal(made.numpy(), x.double().numpy() @ w.double().numpy().T)


def test_a_float32_bias_beside_16_bit_inputs() -> None:
    x, w, bias = draw(3, 4).half(), draw(5, 4, seed=1).half(), draw(5, seed=2).float()
    (made,) = operation("linear").call((x, w, bias), {})
    right = x.double() @ w.double().mT + bias.double()
    torch.testing.assert_close(made.double(), right, rtol=0, atol=5e-3)


def test_beta_0_does_not_read_the_residual() -> None:
    x, nans = draw(2, 3), torch.full((2, 3), torch.nan, dtype=torch.float64)
    unread = Epilogue(residual=nans, beta=0.0)
    assert torch.equal(finish(x, unread), x)
    assert torch.equal(finish_(x.clone(), unread), x)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_gamma_comes_before_the_rounding(activation: str | None, dtype: str) -> None:
    x, w = (draw(7, 9, seed=s).mul(9).round().clamp(-100, 100).to(torch.int8) for s in (0, 1))
    scale, stored = draw(7, seed=2).abs() / 99, getattr(torch, dtype)
    attrs = {"activation": activation, "gamma": 41.5, "dtype": dtype}
    (made,) = operation("linear").call((x, w, None, None, scale), attrs)
    product = torch.from_numpy(x.double().numpy() @ w.double().numpy().T) * scale
    right = product if activation is None else ACTIVATIONS[activation](product)
    assert made.dtype == stored
    assert torch.equal(made.double(), store(41.5 * right, stored).double())


HOSTILE = (math.nan, math.inf, -math.inf, 0.0, -0.0, -2.0, 1e300, 1e-300, 10**400, True, "2", None)


@pytest.mark.parametrize("gamma", HOSTILE, ids=lambda g: str(g)[:5])
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_what_gamma_may_not_be(gamma: Any, dtype: str | None) -> None:
    for device in ("cpu", "meta"):
        x = torch.ones(2, 3, device=device)
        with pytest.raises(ValueError, match="above zero"):
            operation("linear").call((x, x), {"gamma": gamma, "dtype": dtype})
    meta = TensorMeta(shape=(2, 3), dtype="float16")
    asked = problems.linear(meta, replace(meta, shape=(4, 3)))
    hostile = replace(asked, attrs={**asked.attrs, "gamma": gamma})
    for row in catalog.candidates("linear", "sm_90"):
        assert "above zero" in row.refusal(hostile), row.id
    with pytest.raises(UsageError, match="above zero"):
        problems.linear(meta, replace(meta, shape=(4, 3)), gamma=gamma)


@pytest.mark.parametrize(
    ("changes", "sixteen_bit"),
    [
        ({}, True), ({"gamma": 2.0**14}, True), ({"gamma": 2.0**15}, False),
        ({"gamma": 2.0**-7}, True), ({"gamma": 2.0**-8}, False), ({"activation": "silu"}, False),
        ({"dtype": "int8"}, False), ({"dtype": "float16"}, False),
        ({"activation": "silu", "dtype": "int8", "gamma": 64.0}, True),
        ({"activation": "silu", "dtype": "int8", "gamma": 65.0}, False),
    ],
)  # fmt: skip
def test_what_sixteen_bits_are_enough_for(changes: dict[str, Any], sixteen_bit: bool) -> None:
    """Its largest number times gamma saturates e4m3, and gamma is one of its own."""
    settings = {"gamma": 1.0, "activation": "gelu", "dtype": "float8_e4m3fn", **changes}
    x, weight = (TensorMeta(shape=(16, 16), dtype="float8_e4m3fn") for _ in range(2))
    out = settings.pop("dtype")
    problem = problems.linear(x, weight, out_dtype=out, **settings)
    assert in_sixteen_bits(problem) == sixteen_bit
    if sixteen_bit:
        assert 65504 * settings["gamma"] >= 448
        assert float(torch.tensor(settings["gamma"]).half()) == settings["gamma"]


def test_a_gamma_of_1_is_no_other_problem() -> None:
    meta = TensorMeta(shape=(4, 4), dtype="float16")
    plain = problems.linear(meta, meta)
    assert problems.linear(meta, meta, gamma=1).key == plain.key
    assert "gamma" not in plain.attrs
    assert problems.linear(meta, meta, gamma=2).key != plain.key


@pytest.mark.parametrize("axis", [1, -1])
def test_in_place_is_the_same(axis: int) -> None:
    x, residual, bias, scale = draw(2, 3, 3), draw(2, 3, 3, seed=1), draw(3, seed=2), draw(3)
    epilogue = Epilogue(bias=bias, residual=residual, scale=scale, **ATTRS)
    right = finish(x, epilogue, axis=axis)
    made = finish_(x, epilogue, axis=axis)
    assert made is x
    torch.testing.assert_close(made, right, rtol=1e-12, atol=1e-12)


def test_store() -> None:
    x = torch.tensor([0.5, 1.5, -2.5, 200.0, -200.0, 1e6])
    assert store(x, torch.int8).tolist() == [0, 2, -2, 127, -128, 127]
    assert store(x, torch.float8_e4m3fn).float().tolist()[-1] == 448
    assert store(x, torch.float8_e5m2).float().tolist()[-1] == 57344
    assert store(x, torch.float16).dtype == torch.float16
    assert store(torch.tensor([3e9, -3e9]).double(), torch.int32).tolist() == [2**31 - 1, -(2**31)]
