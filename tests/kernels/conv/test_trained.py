"""Depthwise convolutions in training beside float64, both ways, and compiled for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.kernels.conv import trained
from tessella.kernels.conv.trained import Window
from tests.support.kernels.compile_only import compile_all

EPS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of a tensor, by its norm
# channels, height and width, the window, element type
CASES = [
    (8, (6, 5), Window((7, 7), (1, 1), (3, 3)), torch.bfloat16),
    (40, (7, 10), Window((3, 3), (2, 2), (1, 1)), torch.float16),
    (8, (9, 7), Window((5, 3), (2, 1), (2, 0)), torch.float32),
    (8, (6, 7), Window((5, 5), (2, 2), (2, 2)), torch.float32),
]


def images(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last)


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("channels", "size", "window", "dtype"), CASES)
def test_values_and_gradients(channels, size, window, dtype):
    torch.manual_seed(channels)
    x = images((2, channels, *size), dtype)
    weight, bias = torch.randn(channels, 1, *window.kernel), torch.randn(channels)
    given = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = F.conv2d(*given, window.stride, window.padding, groups=channels)
    gradient = images(tuple(expected.shape), dtype)
    expected.backward(gradient.double())

    assert trained.runs(x, weight, window)
    y = trained.convolve(x, weight, bias, window)
    assert y.dtype == dtype
    assert off(y, expected.detach()) < EPS[dtype]
    of_x = trained.input_gradient(gradient, weight, x.shape, window)
    assert of_x.dtype == dtype
    assert off(of_x, given[0].grad) < EPS[dtype]


def test_what_does_not_run():
    x, weight = images((2, 8, 5, 5), torch.float32), torch.ones(8, 1, 3, 3)
    window = Window((3, 3), (1, 1), (1, 1))
    assert trained.runs(x, weight, window)
    assert not trained.runs(x.double(), weight, window)
    assert not trained.runs(x.contiguous(), weight, window)
    assert not trained.runs(x, torch.ones(8, 2, 3, 3), window)
    assert not trained.runs(x, weight, window._replace(stride=(3, 3)))
    assert not trained.runs(x, torch.ones(8, 1, 9, 9), Window((9, 9), (1, 1), (4, 4)))


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    weight, window = torch.ones(240, 1, 5, 5), Window((5, 5), (2, 2), (2, 2))
    gradient = images((4, 240, 14, 14), torch.bfloat16)
    yield "strided", lambda: trained.input_gradient(gradient, weight, (4, 240, 28, 28), window)


def test_compiles_without_spilling():
    (made,) = compile_all(f"{__name__}:launches")["strided"]
    assert made["kernel"] == "strided_gradient_kernel"
    assert not made["spilled_bytes"]
