"""The epilogue in Triton does what the reference in torch does, for every activation and cast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import triton
import triton.language as tl

from tessella.device.launch import launch
from tessella.kernels.epilogue.triton_device import activate, cast, finish, rounded
from tessella.operations.epilogue import ACTIVATIONS
from tests.support.kernels.compile_only import compile_all

SIZE = 256


@triton.jit
def _finish_kernel(x, scale, bias, residual, alpha, beta, gamma, out, ACTIVATION: tl.constexpr):
    rows = tl.arange(0, 16)
    at = rows[:, None] * 16 + rows[None, :]
    # as a kernel writes it: what is absent is None all the way
    scales = None if scale is None else tl.load(scale + rows)[None, :]
    biases = None if bias is None else tl.load(bias + rows)[None, :]
    residuals = None if residual is None else tl.load(residual + at)
    y = finish(tl.load(x + at), scales, biases, residuals, alpha, beta, gamma, ACTIVATION)
    tl.store(out + at, cast(y, out.dtype.element_ty))


@triton.jit
def _activate_kernel(x, out, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, activate(tl.load(x + at), ACTIVATION))


@triton.jit
def _cast_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, cast(tl.load(x + at), out.dtype.element_ty))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    x = torch.cat(
        [torch.linspace(-9, 9, 192), torch.logspace(-8, 2, 32), -torch.logspace(-8, 2, 32)]
    )
    out = torch.full_like(x, torch.nan)
    launch(_activate_kernel, (1,), x, out, ACTIVATION=activation, SIZE=SIZE)
    right = ACTIVATIONS[activation](x.double())
    torch.testing.assert_close(out.double(), right, rtol=1e-6, atol=3e-7)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_not_a_number_stays_so(activation: str) -> None:
    x = torch.full((SIZE,), torch.nan)
    out = torch.zeros_like(x)
    launch(_activate_kernel, (1,), x, out, ACTIVATION=activation, SIZE=SIZE)
    assert out.isnan().all()


def test_int8_rounds_half_to_even_and_saturates() -> None:
    x = torch.cat([torch.arange(-64, 64) / 2, torch.linspace(-1e9, 1e9, 128)])
    out = torch.zeros(SIZE, dtype=torch.int8)
    launch(_cast_kernel, (1,), x, out, SIZE=SIZE)
    assert torch.equal(out, x.round().clamp(-128, 127).to(torch.int8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_saturates(dtype: torch.dtype) -> None:
    # numbers of few bits only: how the interpreter rounds to fp8 is not how a GPU does
    x = torch.cat([torch.arange(-8.0, 8.0), torch.tensor([1e3, -1e3, 1e6, -1e6])]).repeat(16)[:SIZE]
    out = torch.zeros(SIZE, dtype=dtype)
    launch(_cast_kernel, (1,), x, out, SIZE=SIZE)
    limit = torch.finfo(dtype).max
    assert torch.equal(out[:16].float(), x[:16])
    assert torch.equal(out[18:20].float(), torch.tensor([limit, -limit]))


@triton.jit
def _round_kernel(x, out, BITS: tl.constexpr, LEAST: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, rounded(tl.load(x + at), BITS, LEAST))


@pytest.mark.parametrize(
    ("dtype", "bits", "least"), [(torch.float8_e4m3fn, 3, -6), (torch.float8_e5m2, 2, -14)]
)
def test_numbers_are_rounded_to_fp8_once(dtype: torch.dtype, bits: int, least: int) -> None:
    """Beside every two neighbours of fp8, the middle and the float32 numbers next to it."""
    every = torch.arange(256).to(torch.uint8).view(dtype).float()
    every = every[every.isfinite()].sort().values
    middle = (every[1:] + every[:-1]) / 2
    x = torch.cat(
        [every, middle, *(torch.nextafter(middle, torch.tensor(far)) for far in (1e9, -1e9))]
    )
    x = torch.cat([x, torch.full((1024 - len(x),), torch.nan)])
    out = torch.zeros(1024)
    launch(_round_kernel, (1,), x, out, BITS=bits, LEAST=least, SIZE=1024)
    right = x.to(dtype).float()
    assert torch.equal(out.nan_to_num(1e9), right.nan_to_num(1e9))
    assert not torch.equal(x.half().to(dtype).float().nan_to_num(1e9), right.nan_to_num(1e9))
    assert torch.equal(out.half().float().nan_to_num(1e9), out.nan_to_num(1e9))


@pytest.mark.parametrize("present", range(8))
@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("gamma", [None, 3.0])
def test_finish(present: int, integer: bool, gamma: float | None) -> None:
    generator = torch.Generator().manual_seed(present)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x = (draw(16, 16) * 100).to(torch.int32) if integer else draw(16, 16)
    optional = (draw(16), draw(16), draw(16, 16))
    scale, bias, residual = (t if present >> i & 1 else None for i, t in enumerate(optional))
    out = torch.full((16, 16), torch.nan)
    launch(_finish_kernel, (1,), x, scale, bias, residual, 0.5, -2.0, gamma, out, ACTIVATION="relu")
    right = 0.5 * x.double()
    right = right if scale is None else right * scale
    right = right if bias is None else right + bias
    right = right if residual is None else right - 2.0 * residual
    clamped = right.relu() * (gamma or 1)
    torch.testing.assert_close(out.double(), clamped, rtol=1e-6, atol=1e-5)
    if residual is None:  # the number that is its factor else is the floor
        numbers = (0.5, -0.25, gamma, out)
        launch(_finish_kernel, (1,), x, scale, bias, None, *numbers, ACTIVATION="floor")
        clamped = right.clamp(min=-0.25) * (gamma or 1)
        torch.testing.assert_close(out.double(), clamped, rtol=1e-6, atol=1e-5)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    x, row = torch.zeros(16, 16), torch.zeros(16)
    dtypes = (torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    for activation, dtype in zip((None, *ACTIVATIONS), dtypes * 2, strict=True):
        gamma = None if dtype == torch.float16 else 3.0
        args = (x, row, row, x, 0.5, 2.0, gamma, torch.zeros(16, 16, dtype=dtype))
        run = functools.partial(launch, _finish_kernel, (1,), *args, ACTIVATION=activation)
        yield f"{activation} {dtype}", run


def test_compiles_without_spills() -> None:
    found = compile_all("tests.kernels.epilogue.test_triton_device:cases")
    assert len(found) == 1 + len(ACTIVATIONS)
    assert all(one["spilled_bytes"] == 0 for (one,) in found.values())
