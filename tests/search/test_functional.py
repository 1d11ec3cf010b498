"""conv2d, matmul and linear on tensors: torch's answers, and errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tessella import kernels
from tessella.core.errors import KernelError, UsageError
from tessella.device.float32_math import float32_math
from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.search import find as search
from tessella.search import functional, limits, tuning
from tessella.search.tuning import TimingCache
from tests.support.kernels import scratch


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


def test_the_search_is_held_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    kernels.linear(x, w)
    assert (own_cache / "timings.jsonl").exists()

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(search, "time_interleaved", forbidden)
    kernels.linear(torch.randn(4, 8), w)
    functional._ready.clear()  # another process: the file answers
    functional._caches.clear()
    kernels.linear(x, w)
    with pytest.raises(AssertionError, match="measured again"):
        kernels.linear(torch.randn(5, 8), w)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda t: kernels.conv2d(t(1, 3, 5, 5), t(4, 2, 3, 3)), "do not go together.*3 channels"),
        (lambda t: kernels.conv2d(t(1, 3, 2, 2), t(4, 3, 3, 3)), "larger than the padded input"),
        (lambda t: kernels.conv2d(t(1, 3, 5, 5), t(4, 3, 3)), "as many as its weight"),
        (lambda t: kernels.conv2d(t(1, 3, 5, 5), t(4, 3, 3, 3), stride=0), "at least 1"),
        (lambda t: kernels.conv2d(t(1, 3, 5, 5), t(4, 3, 3, 3), stride=(1, 1, 1)), "stride"),
        (lambda t: kernels.conv2d(t(1, 3, 5, 5), t(4, 3, 3, 3), padding="same"), "one integer"),
        (lambda t: kernels.conv2d(t(1, 3, 5, 5), t(4, 3, 3, 3), padding=1.0), "one integer"),
        (lambda t: kernels.conv2d(t(1, 3, 5, 5).numpy(), t(4, 3, 3, 3)), "dense tensors of torch"),
        (lambda t: kernels.matmul(t(2, 3), t(3, 2).to_sparse()), "dense tensors of torch"),
        (
            lambda t: kernels.conv2d(t(1, 3, 5, 5), t(4, 3, 3, 3), t(3)),
            "bias has the shape 3, not 4",
        ),
        (lambda t: kernels.linear(t(2, 3), t(4, 5)), "a weight 4×5"),
        (lambda t: kernels.linear(t(2, 3), t(4, 3), activation="mish!"), "unknown activation"),
        (
            lambda t: kernels.linear(t(2, 3), t(4, 3), residual=t(2, 3)),
            "residual has the shape 2×3, not 2×4",
        ),
        (lambda t: kernels.matmul(t(2, 3), t(4, 5)), "do not fit together"),
        (lambda t: kernels.matmul(t(3), t(3, 2)), "takes matrices"),
        (
            lambda t: kernels.conv2d_dgrad(t(1, 4, 5, 5), t(4, 3, 3, 3), (1, 3, 5, 5)),
            "grad has the shape",
        ),
        (lambda t: kernels.conv2d_dgrad(t(1, 4, 3, 3), t(4, 3, 3, 3), (5, 5)), "input_size"),
        (
            lambda t: kernels.conv2d_dgrad(t(1, 4, 3, 3), t(4, 3, 3, 3), (1, 7, 5, 5)),
            "for 7 channels",
        ),
        (
            lambda t: kernels.conv2d_wgrad(t(1, 4, 3, 3), t(1, 3, 5, 5), 3, groups=2),
            "2 groups for 3 channels",
        ),
        (lambda t: kernels.conv2d(t(1, 0, 5, 5), t(4, 0, 3, 3)), "without channels or taps"),
        (lambda t: kernels.linear(t(2, 3), t(4, 3), alpha=float("nan")), "finite"),
        (lambda t: kernels.linear(t(2, 3), t(4, 3), math="bf16"), "one of two ways"),
    ],
)
def test_wrong_arguments_say_so(call, what: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=what):
        call(torch.randn)


def test_out_may_be_an_operand_or_empty() -> None:
    x, w = torch.randn(6, 6), torch.randn(6, 6)
    right = x.double() @ w.double().t()
    assert kernels.linear(x, w, out=x) is x
    close(x, right)
    both = torch.randn(7, 6)
    right = both[:6].double() @ w.double().t() + 2 * both[:6].double()
    kernels.linear(both[:6], w, residual=both[:6], beta=2.0, out=both[1:])  # overlaps in part
    close(both[1:], right)
    empty = torch.empty(0, 6)
    assert kernels.linear(torch.randn(0, 6), w, out=empty) is empty
    with pytest.raises(UsageError, match="out="):
        kernels.linear(torch.randn(0, 6), w, out=torch.empty(3))


def test_out_is_checked_where_the_kernel_makes_its_own_result() -> None:
    x, w = (torch.ones(s, dtype=torch.int8) for s in ((4, 8), (3, 8)))
    with pytest.raises(UsageError, match="out="):
        kernels.linear(x, w, out=torch.empty(4, 3))


def test_kernels_see_aligned_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def bind(problem: Problem, constants: object, *, pieces: int):  # type: ignore[no-untyped-def]
        call = scratch_bind(problem, {}, pieces=pieces)

        def watched(*inputs: torch.Tensor, **buffers: torch.Tensor) -> torch.Tensor:
            seen.extend(t.data_ptr() % 16 for t in (*inputs, buffers["out"]))
            return call(*inputs, **buffers)

        return watched

    scratch_bind = scratch.bind
    monkeypatch.setattr(scratch, "bind", bind)
    monkeypatch.setattr(catalog, "KERNELS", (*catalog.KERNELS, scratch.ROW))
    monkeypatch.setattr(catalog, "BY_ID", {**catalog.BY_ID, scratch.ROW.id: scratch.ROW})
    x, w, out = (torch.randn(n + 1)[1:] for n in (4 * 8, 3 * 8, 4 * 3))
    x, w, out = x.view(4, 8), w.view(3, 8), out.view(4, 3)
    assert x.data_ptr() % 16
    assert kernels.linear(x, w, out=out, algorithm="scratch") is out
    close(out, x.double() @ w.double().t())
    assert seen
    assert not any(seen)


def test_the_folder_of_timings_may_be_missing_broken_or_forbidden(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    own_cache.write_text("a file, not a folder: nothing can be read or written below it")
    close(kernels.linear(x, w), x.double() @ w.double().t())
    assert limits.limits("cpu", own_cache).copy_bytes_s > 0
    own_cache.unlink()
    own_cache.mkdir()
    (own_cache / "timings.jsonl").write_bytes(b"\xff\xfe broken\n\n{}\n")
    assert TimingCache(own_cache / "timings.jsonl").get("", "", "", 1) is None
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert tuning._cache_folder().name.startswith("tessella-")
    # a path that a user names must be a cache's
    for path in (own_cache, own_cache / "timings.jsonl"):
        with pytest.raises(UsageError, match="no timing cache"):
            tuning.require_cache(path)
    tuning.require_cache(own_cache / "new.jsonl")
    written = TimingCache(own_cache / "new.jsonl")
    written.put("cpu", "a problem", 1, tuning.Trial(kernel="add.aten", time_us=1.0))
    tuning.require_cache(own_cache / "new.jsonl")


def test_the_file_of_timings_is_read_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = functional.timing_cache()
    monkeypatch.setattr(functional, "TimingCache", None)
    assert functional.timing_cache() is first


def test_rounding_is_restored_when_threads_leave_in_any_order() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    first, second = float32_math("tf32"), float32_math("ieee")
    first.__enter__()
    second.__enter__()
    assert matmul.fp32_precision == "ieee"
    first.__exit__(None, None, None)
    assert matmul.fp32_precision == "ieee"
    second.__exit__(None, None, None)
    assert matmul.fp32_precision == before


def test_channels_last_of_three_axes_is_torchs_own_kernel() -> None:
    x = torch.randn(1, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d)
    w, r = torch.randn(4, 3, 2, 2, 2), torch.randn(1, 4, 3, 4, 5)
    made = kernels.conv3d(x, w, residual=r, algorithm="aten")
    close(made, F.conv3d(x.double(), w.double()) + r.double())
    assert made.is_contiguous(memory_format=torch.channels_last_3d)


def test_the_factor_behind_the_activation() -> None:
    x, w = (torch.randint(-9, 9, (4, 8), dtype=torch.int8) for _ in range(2))
    scale = torch.full((4,), 0.01)
    made = kernels.linear(x, w, scale=scale, activation="gelu", gamma=50.0)
    right = 50 * torch.nn.functional.gelu(0.01 * (x.double() @ w.double().T))
    assert made.dtype == torch.int8
    assert torch.equal(made, right.round().clamp(-128, 127).to(torch.int8))
