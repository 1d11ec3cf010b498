"""Max pooling in training beside torch's, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from tessella.kernels.pool import trained
from tests.support.kernels.compile_only import compile_all

CASES = [
    ((2, 24, 9, 11), (3, 2, 1)),
    ((2, 8, 6, 7), (2, None, 0)),
    ((1, 5, 4, 4), (3, 1, 1)),
    ((2, 300, 5, 6), ((3, 2), (1, 2), (1, 0))),
    ((2, 8, 9, 9), (2, 3, 0)),  # gaps between windows
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "how"), CASES)
def test_values_and_gradients(shape, how, dtype):
    """Equal numbers in a window, NaN and −∞ among them."""
    torch.manual_seed(0)
    x = (torch.randn(shape) * 2).round().to(dtype).contiguous(memory_format=torch.channels_last)
    x[0, 0, 0, 0], x[0, 1] = float("nan"), float("-inf")
    window = trained.Window.of(*how, 1)
    assert trained.runs(x, window)
    y, places = trained.max_pool(x, window)
    reference = x.clone().requires_grad_()
    expected = F.max_pool2d(reference, *how)
    assert torch.equal(y.nan_to_num(9), expected.detach().nan_to_num(9))
    gradient = torch.randn(y.shape).round().to(dtype)
    expected.backward(gradient)
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    assert torch.equal(trained.max_pool_backward(gradient, places, x.shape, window), reference.grad)


def test_what_does_not_run():
    x = torch.zeros(1, 8, 9, 9).contiguous(memory_format=torch.channels_last)
    assert trained.Window.of(3, 2, 1, 2) is None  # gaps in the window
    assert not trained.runs(x, trained.Window.of(9, 1, 0, 1))  # more places than are told apart
    assert not trained.runs(x, trained.Window.of((12, 1), 1, 0, 1))  # no window fits
    assert not trained.runs(x.contiguous(), trained.Window.of(2, 2, 0, 1))


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    x = torch.zeros(4, 64, 56, 56, dtype=torch.float16).contiguous(
        memory_format=torch.channels_last
    )
    window = trained.Window.of(3, 2, 1, 1)
    y, places = (torch.zeros(4, 64, 28, 28, dtype=t) for t in (torch.float16, torch.uint8))

    def forward() -> None:
        trained.max_pool(x, window)

    def backward() -> None:
        trained.max_pool_backward(y, places, x.shape, window)

    yield "forward", forward
    yield "backward", backward


def test_compiles_without_spilling():
    for made in compile_all(f"{__name__}:launches").values():
        assert made
        assert not [launch for launch in made if launch["spilled_bytes"]]
