"""The gradients of layer norms and GELUs, with their columns' sums, beside float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from tessella.kernels.norm import layer
from tessella.kernels.pointwise import trained
from tessella.kernels.softmax import entropy
from tests.support.kernels.compile_only import compile_all

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EPS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # by a gradient's norm


def close(found: torch.Tensor | None, expected: torch.Tensor, eps: float) -> None:
    assert found is not None
    assert (found.double() - expected).norm() < eps * expected.norm()


@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_a_layer_norm_with_the_sum_before_it(dtype, monkeypatch):
    """Several tiles a block, a width that is no power of two, gradients from three sides."""
    monkeypatch.setattr(layer, "multiprocessors", lambda: 1)
    torch.manual_seed(0)
    x, weight = (torch.randn(3, 7, 96) * 2 + 5).to(dtype), torch.rand(96) + 0.5
    first, beside = torch.randn(2, 3, 7, 96).unbind()
    second = torch.randn(3, 7, 96).bfloat16()
    reference, factor = (t.double().requires_grad_() for t in (x, weight))
    shift = torch.zeros(96, dtype=torch.double, requires_grad=True)
    made = F.layer_norm(reference, (96,), factor, shift, 1e-5)
    ((made * (first.double() + second.double())).sum() + (reference * beside).sum()).backward()
    rows = x.double().reshape(-1, 96)
    mean, inverse = rows.mean(1).float(), (rows.var(1, unbiased=False) + 1e-5).rsqrt().float()
    assert layer.runs(x, weight)
    found = layer.gradients(
        [first, second], x, mean, inverse, weight, beside=beside, low=torch.bfloat16, sums=True
    )
    assert found.x.dtype == dtype
    close(found.x, reference.grad, EPS[dtype])
    close(found.low, reference.grad, 8e-3)
    close(found.weight, factor.grad, 3e-6)
    close(found.bias, shift.grad, 2e-6)
    close(found.columns, reference.grad.sum((0, 1)), 3e-6)
    alone = layer.gradients([first], x, mean, inverse, weight)
    assert alone.low is alone.columns is None
    close(alone.bias, first.double().sum((0, 1)), 2e-6)


@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_a_gelu_with_the_bias_before_it(dtype, tanh, monkeypatch):
    monkeypatch.setattr(trained, "multiprocessors", lambda: 1)
    monkeypatch.setattr(trained, "_COLUMNS", 32)
    torch.manual_seed(0)
    x = torch.cat([torch.randn(29, 80) * 2, torch.full((1, 80), 30.0), torch.full((1, 80), -30.0)])
    x, bias, gradient = x.to(dtype), torch.randn(80), torch.randn(31, 80).to(dtype)
    given, added = (t.double().requires_grad_() for t in (x, bias))
    F.gelu(given + added, approximate="tanh" if tanh else "none").backward(gradient.double())
    assert trained.runs(x, bias)
    made, of_bias = trained.gelu_gradients(gradient, x, bias, tanh=tanh)
    assert made.dtype == dtype
    close(made, given.grad, EPS[dtype])
    close(of_bias, added.grad, 2e-6)


@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
def test_the_same_as_numbers_of_eight_bits(tanh, monkeypatch):
    """Each row's largest one is the largest there is; all are as near as eight bits can be."""
    monkeypatch.setattr(trained, "multiprocessors", lambda: 1)
    torch.manual_seed(0)
    x, gradient = (torch.randn(5, 7, 72) * torch.logspace(-6, 2, 7)[:, None] for _ in range(2))
    x, gradient, bias = x.bfloat16(), gradient.bfloat16(), torch.randn(72)
    factors = torch.logspace(-3, 3, 72)
    made, codes, scales = trained.rounded_gelu(x, bias, E4M3, tanh=tanh)
    wanted = F.gelu(x.double() + bias, approximate="tanh" if tanh else "none")
    close(made, wanted, 8e-3)
    near(codes, scales, made.double())
    rounded = trained.rounded_gelu_gradients(gradient, x, bias, factors, E5M2, tanh=tanh)
    for one, other in zip(
        rounded, trained.gelu_gradients(gradient, x, bias, tanh=tanh), strict=False
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    near(*rounded[2:], rounded[0].double() * factors)
    parts = [gradient, x, made]
    rounded = trained.rounded_join(parts, torch.cat([factors] * 3), E5M2)
    for one, other in zip(rounded, trained.joined(parts), strict=False):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    near(*rounded[2:], rounded[0].double() * torch.cat([factors] * 3))


def near(codes: torch.Tensor, scales: torch.Tensor, wanted: torch.Tensor) -> None:
    """Numbers of 8 bits with scales are as near as they can be to float64 ones, which may be of
    numbers before their rounding to 16 bits."""
    limits = torch.finfo(codes.dtype)
    wanted = wanted.flatten(0, -2)
    assert torch.equal(codes.float().abs().amax(1), torch.full((len(codes),), limits.max))
    torch.testing.assert_close(scales[:, 0].double(), wanted.abs().amax(1) / limits.max,
                               rtol=2**-7, atol=0)  # fmt: skip
    step = limits.eps / 2 * wanted.abs() + limits.smallest_normal * limits.eps * scales
    assert bool(((codes.double() * scales - wanted).abs() <= step + 2**-7 * wanted.abs()).all())


def test_three_matrices_side_by_side(monkeypatch):
    monkeypatch.setattr(trained, "multiprocessors", lambda: 1)
    monkeypatch.setattr(trained, "_JOINED_COLUMNS", 32)
    parts = list(torch.randn(3, 5, 7, 72).bfloat16().unbind())
    made, sums = trained.joined(parts)
    assert torch.equal(made, torch.cat(parts, -1))
    close(sums, made.double().sum((0, 1)), 2e-6)


def test_what_does_not_run():
    x, weight = torch.zeros(4, 64), torch.zeros(64)
    assert layer.runs(x, weight)
    assert not layer.runs(x.double(), weight)
    assert not layer.runs(torch.zeros(64, 64).t(), weight)
    assert not layer.runs(torch.zeros(4, 16384), torch.zeros(16384))
    assert not trained.runs(x, weight.half())
    assert not trained.runs(x, weight[:5])


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    x, weight = torch.zeros(64, 1024), torch.zeros(1024)
    low, rows = x.bfloat16(), torch.zeros(64)
    scores, targets = (
        torch.zeros(64, 50304, dtype=torch.bfloat16),
        torch.zeros(64, dtype=torch.int64),
    )

    def run() -> None:
        layer.gradients([low, x], x, rows, rows, weight, beside=x, low=torch.bfloat16, sums=True)
        for tanh in (False, True):
            trained.gelu_gradients(low, low, weight, tanh=tanh)
        trained.joined([low] * 3)
        wide, factors = torch.zeros(64, 4096, dtype=torch.bfloat16), torch.zeros(4096)
        for tanh in (False, True):
            trained.rounded_gelu(wide, factors, E4M3, tanh=tanh)
            trained.rounded_gelu_gradients(wide, wide, factors, factors, E5M2, tanh=tanh)
        trained.rounded_join([low] * 3, factors[:3072], E5M2)
        entropy.losses(scores, targets, -100)
        entropy.gradient(scores, targets, rows, rows[:1], -100)

    yield "a language model's", run


def test_compile_without_spilling():
    """Cross entropy, too, since a process that compiles takes seconds to begin."""
    (made,) = compile_all(f"{__name__}:launches").values()
    names = [one["kernel"] for one in made]
    assert [name for name in names if name != "column_sums_kernel"] == [
        "layer_gradients_kernel", "gelu_gradient_kernel", "gelu_gradient_kernel", "joined_kernel",
        *["rounded_gelu_kernel", "gelu_gradient_kernel"] * 2, "rounded_join_kernel",
        "entropy_kernel", "entropy_gradient_kernel",
    ]  # fmt: skip
    assert not any(one["spilled_bytes"] for one in made)
