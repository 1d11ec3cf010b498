"""conv2d, matmul and linear on tensors: torch's answers, and errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tessella import kernels
from tessella.core.errors import KernelError, UsageError
from tessella.kernels import auction, functional


def close(made: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert made.shape == right.shape
    assert (made.double() - right).abs().max() <= tolerance * right.abs().max()


@pytest.mark.parametrize("last", [False, True])
def test_conv2d_is_torchs_with_the_whole_epilogue(last: bool) -> None:
    x, w, b, r = (torch.randn(s) for s in ((2, 6, 9, 8), (4, 3, 3, 2), (4,), (2, 4, 5, 5)))
    if last:
        x, r = (t.to(memory_format=torch.channels_last) for t in (x, r))
    made = kernels.conv2d(
        x, w, b, stride=2, padding=1, groups=2, residual=r, activation="silu", alpha=0.5, beta=2.0
    )
    exact = F.conv2d(x.double(), w.double(), None, 2, 1, groups=2)
    close(made, F.silu(0.5 * exact + b.double().view(-1, 1, 1) + 2 * r.double()))
    assert made.is_contiguous(
        memory_format=torch.channels_last if last else torch.contiguous_format
    )


def test_convolutions_of_one_and_three_axes() -> None:
    x, w = torch.randn(2, 3, 11), torch.randn(5, 3, 4)
    close(kernels.conv1d(x, w, padding=2), F.conv1d(x.double(), w.double(), padding=2))
    x, w = torch.randn(1, 2, 4, 5, 6), torch.randn(3, 2, 2, 2, 2)
    close(
        kernels.conv3d(x, w, stride=(1, 2, 1)), F.conv3d(x.double(), w.double(), stride=(1, 2, 1))
    )


def test_gradients_of_a_convolution() -> None:
    x, w = torch.randn(2, 4, 7, 6).requires_grad_(), torch.randn(6, 2, 3, 3).requires_grad_()
    y = F.conv2d(x.double(), w.double(), None, 2, 1, groups=2)
    dy = torch.randn(y.shape)
    dx, dw = torch.autograd.grad(y, (x, w), dy.double())
    window = {"stride": 2, "padding": 1, "groups": 2}
    close(kernels.conv2d_dgrad(dy, w.detach(), x.shape, **window), dx)
    close(kernels.conv2d_wgrad(dy, x.detach(), 3, **window), dw)


def test_matmul_takes_transposed_views_as_they_are() -> None:
    a, b = torch.randn(6, 5), torch.randn(7, 6)
    close(kernels.matmul(a.t(), b.t()), a.t().double() @ b.t().double())
    a, b = torch.randn(3, 4, 5), torch.randn(3, 5, 2)
    c = torch.randn(3, 4, 2)
    close(kernels.matmul(a, b, residual=c, beta=-1.0), a.double() @ b.double() - c)
    close(kernels.matmul(a, b[0]), a.double() @ b[0].double())


def test_linear_of_int8_is_exact() -> None:
    x, w = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((5, 33), (9, 33)))
    assert torch.equal(kernels.linear(x, w), x.int() @ w.int().t())
    scale = torch.full((9,), 2.0**-9)
    made = kernels.linear(x, w, scale=scale, out_dtype=torch.int8)
    right = ((x.int() @ w.int().t()).double() * 2.0**-9).round().clamp(-128, 127)
    assert made.dtype == torch.int8
    assert torch.equal(made, right.to(torch.int8))


def test_strided_empty_and_given_tensors() -> None:
    x, w = torch.randn(2, 8, 9, 3).permute(0, 3, 2, 1)[:, :, ::2], torch.randn(4, 3, 1, 1)
    close(kernels.conv2d(x, w), F.conv2d(x.double(), w.double()))
    assert kernels.conv2d(torch.randn(0, 3, 8, 8), w).shape == (0, 4, 8, 8)
    out = torch.full((2, 5), 77.0)
    a, b = torch.randn(2, 3), torch.randn(5, 3)
    assert kernels.linear(a, b, out=out) is out
    close(out, a.double() @ b.double().t())
    with pytest.raises(UsageError, match="out="):
        kernels.linear(a, b, out=torch.empty(5, 2))


def test_an_algorithm_by_name() -> None:
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    close(kernels.linear(x, w, algorithm="aten"), x.double() @ w.double().t())
    with pytest.raises(UsageError, match=r"use one of .*aten"):
        kernels.linear(x, w, algorithm="magic")
    with pytest.raises(KernelError, match="must be constants"):
        kernels.linear(x, w, algorithm="mkl")


def test_the_auction_is_held_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    kernels.linear(x, w)
    assert (own_cache / "timings.jsonl").exists()

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(auction, "race", forbidden)
    kernels.linear(torch.randn(4, 8), w)
    functional._ready.clear()  # another process: the file answers
    functional._caches.clear()
    kernels.linear(x, w)
    with pytest.raises(AssertionError, match="measured again"):
        kernels.linear(torch.randn(5, 8), w)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda t: kernels.conv2d(t(1, 3, 5, 5), t(4, 2, 3, 3)), "channels do not match"),
        (lambda t: kernels.conv2d(t(1, 3, 2, 2), t(4, 3, 3, 3)), "larger than the padded input"),
        (lambda t: kernels.conv2d(t(1, 3, 5, 5), t(4, 3, 3)), "as many as its weight"),
        (lambda t: kernels.conv2d(t(1, 3, 5, 5), t(4, 3, 3, 3), stride=0), "at least 1"),
        (lambda t: kernels.conv2d(t(1, 3, 5, 5), t(4, 3, 3, 3), stride=(1, 1, 1)), "stride"),
        (lambda t: kernels.conv2d(t(1, 3, 5, 5), t(4, 3, 3, 3), t(3)), "bias must have"),
        (lambda t: kernels.linear(t(2, 3), t(4, 5)), "last axis"),
        (lambda t: kernels.linear(t(2, 3), t(4, 3), activation="mish!"), "unknown activation"),
        (lambda t: kernels.linear(t(2, 3), t(4, 3), residual=t(2, 3)), "the result's shape"),
        (lambda t: kernels.matmul(t(2, 3), t(4, 5)), "do not fit together"),
        (lambda t: kernels.matmul(t(3), t(3, 2)), "takes matrices"),
        (lambda t: kernels.conv2d_dgrad(t(1, 4, 5, 5), t(4, 3, 3, 3), (1, 3, 5, 5)), "gradient"),
    ],
)
def test_wrong_arguments_say_so(call, what: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=what):
        call(torch.randn)
