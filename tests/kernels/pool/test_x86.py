"""Pooling in machine code: torch's maxima to the last bit, NaNs and slices included; and means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella.kernels import catalog
from tessella.kernels.pool import x86
from tessella.operations.problem import Problem
from tests.support.instructions import isa as isa
from tests.support.problems.pools import agrees as is_the_mean
from tests.support.problems.pools import maximum, mean, problem
from tests.support.problems.shifted_pools import CPU, NETWORKS, numbers, pooled, problems

FEW_CHANNELS = "a pixel's channels have fewer than 32 bytes"
SIXTEEN_BIT = ("float16", "bfloat16")
BELOW = "bfloat16 below 0"  # what may be
DTYPES = (*SIXTEEN_BIT, "float32", "int8", "uint8", BELOW)


pytestmark = pytest.mark.usefixtures("isa")


def refusal(p: Problem) -> str | None:
    here = x86.code.instructions()
    assert here is not None
    return catalog.kernel(f"max_pool2d.{here.name}").refusal(p)


def asked(shape: tuple[int, ...], window: dict[str, Any], dtype: str) -> Problem:
    made = problem("max_pool2d", shape, window, dtype.removesuffix(" below 0"))
    marks = {"non_negative": True} if dtype in SIXTEEN_BIT else {}
    return replace(made, attrs={**made.attrs, **marks})


def needs_bfloat16(dtype: str) -> None:
    if dtype == BELOW and not x86.code.has_bfloat16():
        pytest.skip("this processor does not round to bfloat16")


def image(p: Problem, seed: int = 0) -> torch.Tensor:
    meta = p.inputs[0]
    if meta.dtype == "uint8":
        generator = torch.Generator().manual_seed(seed)
        return meta.empty(CPU).copy_(torch.randint(0, 256, meta.shape, generator=generator))
    drawn = numbers(meta, seed)
    return drawn.abs() if p.attr("non_negative") else drawn


def agrees(p: Problem, seed: int = 0) -> None:
    assert refusal(p) is None
    x = image(p, seed)
    before, call = x.clone(), x86.bind(p, {})
    wide = x.to(torch.int32) if x.dtype == torch.uint8 else x
    right = pooled(p, wide).to(x.dtype)
    for _ in range(2):
        out = p.output.empty(CPU).fill_(101)
        assert call(x, out=out) is out
        torch.testing.assert_close(out, right, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [40, 528])
@pytest.mark.parametrize("case", NETWORKS)
def test_what_networks_pool(case: str, channels: int, dtype: str) -> None:
    needs_bfloat16(dtype)
    size, window = NETWORKS[case]
    shape = (1, min(channels, 80), size, size) if size > 60 else (3, channels, size, size)
    agrees(asked(shape, window, dtype))


@given(problems(), st.integers(0, 2**31))
@settings(max_examples=200, deadline=None)
def test_any_window(p: Problem, seed: int) -> None:
    dtype = p.inputs[0].dtype
    p = asked(p.inputs[0].shape, dict(p.attrs), dtype)
    if refusal(p) is None:
        agrees(p, seed)
    else:
        assert refusal(p) in ("a window without a pixel", FEW_CHANNELS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_threads_share_the_work(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_bfloat16(dtype)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    p = asked((4, 200, 21, 23), maximum(), dtype)
    assert p.inputs[0].nbytes > x86.ALONE_BYTES
    for seed in range(5):
        agrees(p, seed)


def test_threads_share_the_channels_of_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    here = x86.code.require_instructions()
    for threads, channels in ((2, 320), (3, 784), (4, 203), (4, 64)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        p = problem("adaptive_avg_pool2d", (1, channels, 19, 19), {"output_size": (1, 1)})
        call = x86.bind(p, {})
        assert isinstance(call, x86.code.Launch)
        assert (call.items.count >= threads) == (channels not in (203, 64 * (here.lanes == 16)))
        is_the_mean(here.name, p)


def test_dilated_windows() -> None:
    agrees(asked((2, 40, 13, 11), maximum((2, 3), (1, 2), (1, 0), (3, 2)), "float32"))


def test_windows_of_any_size_are_counted_and_not_walked() -> None:
    """A stranger's plan may say such a thing."""
    huge = 2**40
    p = asked((1, 16, 6, 6), maximum((3, 3), (1, 1)), "float32")
    attrs = {"kernel_size": (huge, huge), "padding": (huge // 2, huge // 2)}
    p = replace(p, attrs={**p.attrs, **attrs}, outputs=(replace(p.output, shape=(1, 16, 7, 7)),))
    assert refusal(p) is None
    out = x86.bind(p, {})(x := image(p), out=p.output.empty(CPU))
    assert torch.equal(out[0, :, 3, 3].isnan(), x[0].isnan().any(2).any(1))
    far = replace(p, attrs={**p.attrs, "dilation": (huge, huge)})
    assert refusal(far) in ("distances have 32 bits", "a window without a pixel")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_slices_are_read_and_written_and_nothing_beside_them(dtype: str) -> None:
    p = asked((2, 36, 9, 9), maximum(), dtype)
    whole, target = (replace(m, shape=(2, 90, *m.shape[2:])) for m in (p.inputs[0], p.output))
    sliced = replace(p, inputs=(whole.part(1, 36),), outputs=(target.part(1, 36),))
    assert refusal(sliced) is None
    x, out = image(replace(p, inputs=(whole,))), target.empty(CPU).fill_(77)
    x86.bind(sliced, {})(x[:, 20:56], out=out[:, 30:66])
    right = pooled(p, x[:, 20:56].contiguous())
    torch.testing.assert_close(out[:, 30:66], right, rtol=0, atol=0, equal_nan=True)
    assert (out[:, :30] == 77).all()
    assert (out[:, 66:] == 77).all()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "float64"}, "cannot make float64"),
        ({"dtype": "float16"}, "numbers below 0"),
        ({"format": "contiguous"}, "channels must lie together"),
    ],
)
def test_what_it_leaves_to_others(changes: dict[str, Any], why: str) -> None:
    p = problem("max_pool2d", (2, 8, 9, 9), maximum(), **changes)
    assert why in str(refusal(p))


@pytest.mark.parametrize("channels", [20, 64, 528])
@pytest.mark.parametrize(
    "more", [{}, {"divisor": 5}, {"padded": False}, {"padded": False, "ceil_mode": True}], ids=str
)
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [
        ((2, 2), (2, 2), (0, 0)),
        ((3, 2), (1, 2), (0, 1)),
        ((9, 9), (1, 1), (0, 0)),
        ((3, 3), (1, 1), (1, 1)),
    ],
)
def test_means(kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int],
               more: dict[str, Any], channels: int) -> None:  # fmt: skip
    window, here = mean(kernel, stride, padding, **more), x86.code.require_instructions()
    for dtype in ("float32", *["bfloat16"] * x86.code.has_bfloat16()):
        is_the_mean(here.name, problem("avg_pool2d", (2, channels, 9, 9), window, dtype))


@pytest.mark.parametrize("channels", [8, 72, 203])
@pytest.mark.parametrize(
    ("sizes", "made"),
    [
        ((7, 7), (1, 1)),
        ((33, 61), (1, 1)),
        ((35, 76), (1, 2)),
        ((14, 28), (7, 4)),
        ((3, 5), (3, 5)),
    ],
)
def test_adaptive_means_of_equal_windows(
    sizes: tuple[int, int], made: tuple[int, int], channels: int
) -> None:
    here = x86.code.require_instructions()
    if channels < here.lanes:
        channels = here.lanes
    shape, attrs = (2, channels, *sizes), {"output_size": made}
    for dtype in ("float32", *["bfloat16"] * x86.code.has_bfloat16()):
        is_the_mean(here.name, problem("adaptive_avg_pool2d", shape, attrs, dtype))


@pytest.mark.parametrize("keepdim", [False, True])
def test_means_of_all_pixels(keepdim: bool) -> None:
    here = x86.code.require_instructions()
    for dtype in ("float32", *["bfloat16"] * x86.code.has_bfloat16()):
        for dim in ([2, 3], [-1, -2]):
            attrs = {"dim": dim, "keepdim": keepdim}
            is_the_mean(here.name, problem("mean", (2, 203, 7, 9), attrs, dtype))
    row = catalog.kernel(f"mean.{here.name}")
    asked = problem("mean", (2, 64, 7, 9), {"dim": [2, 3], "keepdim": True})
    assert row.refusal(replace(asked, attrs={"dim": 2, "keepdim": True})) is not None
    for dim, format in (([1, 2], "channels_last"), (None, "channels_last"), ([2, 3], "contiguous")):
        asked = problem("mean", (2, 64, 7, 9), {"dim": dim, "keepdim": True}, format=format)
        assert row.refusal(asked) is not None


def test_other_adaptive_means_are_left_to_others() -> None:
    row = catalog.kernel(f"adaptive_avg_pool2d.{x86.code.require_instructions().name}")

    def why(*sizes: int, made: tuple[int, int], dtype: str = "float32") -> str | None:
        return row.refusal(
            problem("adaptive_avg_pool2d", (2, 64, *sizes), {"output_size": made}, dtype)
        )

    assert why(9, 14, made=(3, 7)) is None
    assert why(9, 14, made=(2, 7)) == "windows of different sizes"
    assert why(9, 14, made=(18, 14)) == "windows of different sizes"
    assert str(why(2, 1025, made=(1, 1))).startswith("adds at most 1024 numbers of a row")
    assert why(8, 8, made=(1, 1), dtype="float16") is not None


def test_means_over_the_padding_are_left_to_others() -> None:
    window = mean(padding=(0, 0), kernel=(2, 2), ceil_mode=True)
    p = problem("avg_pool2d", (2, 32, 9, 9), window)
    assert "a window that reaches over the padding" in str(x86.fits(p))
    p = problem("avg_pool2d", (2, 32, 8, 8), mean((2, 2), (2, 2), (0, 0)), "float16")
    assert x86.fits(p) is not None
