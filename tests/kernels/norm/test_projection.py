"""1×1 convolutions with their norms beside float64, forward and backward, and compiled for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.device.machine import aimed_at
from tessella.kernels.norm import projection
from tests.support.kernels.compile_only import compile_all

# channels of what is read, of one or two, and of the result; residual, ReLU, gradients of it
CASES = [
    ((16,), 64, True, True, 2),
    ((16, 32), 64, False, True, 1),
    ((32,), 64, False, False, 1),
    ((64,), 128, True, False, 2),
]
# of a tensor, by its norm: products of means of 3 are 10 times as large as what varies about them
EPS = {torch.float32: 1e-5, torch.float16: 1e-3}


def images(channels: int, dtype: torch.dtype, *, far: float = 0.0) -> Tensor:
    made = (torch.randn(3, channels, 7, 11) + far).to(dtype)
    return made.contiguous(memory_format=torch.channels_last)


def projections(
    deeps: tuple[int, ...], channels: int, dtype: torch.dtype
) -> list[projection.Projection]:
    return [
        projection.Projection(
            images(deep, dtype, far=3.0), torch.randn(channels, deep, 1, 1) / deep**0.5,
            torch.randn(channels), torch.randn(channels),
            (torch.randn(channels), torch.rand(channels)), momentum=0.3,
        )
        for deep in deeps
    ]  # fmt: skip


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize(("deeps", "channels", "residual", "relu", "ways"), CASES)
def test_values_and_gradients(deeps, channels, residual, relu, ways, dtype):
    torch.manual_seed(channels)
    ours = projections(deeps, channels, dtype)
    added = images(channels, dtype) if residual else None
    gradients = [images(channels, dtype) for _ in range(ways)]
    kept = [tuple(t.double() for t in one.running) for one in ours]
    given = [
        [t.double().requires_grad_() for t in (one.x, one.weight.to(dtype), *one[2:4])]
        for one in ours
    ]

    y, found, bits = projection.project(ours, residual=added, relu=relu)
    made, of_residual = projection.backward(gradients, ours, found, bits, residual=residual)

    total = sum(
        F.batch_norm(F.conv2d(x, w), m, v, g, b, True, 0.3, 1e-5)
        for (x, w, g, b), (m, v) in zip(given, kept, strict=True)
    )
    old = None if added is None else added.double().requires_grad_()
    total = total if old is None else total + old
    positive = (y > 0).double() if relu else torch.ones_like(y).double()
    assert y.dtype == dtype
    assert off(y, F.relu(total).detach() if relu else total.detach()) < EPS[dtype]
    # by the signs that rounding has left, as ours are
    total.backward(sum(g.double() for g in gradients) * positive)
    for one, (mean, variance), mine, theirs in zip(ours, kept, made, given, strict=True):
        assert off(one.running[0], mean) < 1e-5
        assert off(one.running[1], variance) < 1e-5
        for gradient, of in zip(mine, theirs, strict=True):
            assert off(gradient, of.grad) < EPS[dtype]
    if residual:
        assert off(of_residual, old.grad) < EPS[dtype]


def test_what_does_not_run(monkeypatch):
    monkeypatch.setattr(projection, "TAKEN", {(16, 32)})
    x, weight = images(16, torch.float16), torch.zeros(32, 16, 1, 1)
    assert projection.runs(x, weight)
    assert not projection.runs(x.float(), weight)
    assert not projection.runs(x.contiguous(), weight)
    assert not projection.runs(x, weight.half())
    assert not projection.runs(x, weight[:, :8])
    assert not projection.runs(x[:1, :, :1, :1], weight)  # one value a channel has no variance
    for target, runs in (("sm_75", False), ("sm_80", True)):  # Triton knows no tensor cores of one
        with aimed_at(target):
            assert projection.runs(x, weight) == runs
    assert not projection.widens((64, 16, 1, 1))
    assert not projection.widens((32, 16, 3, 3))


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    def run(deeps: tuple[int, ...], channels: int) -> None:
        ours = projections(deeps, channels, torch.bfloat16)
        residual = images(channels, torch.bfloat16) if len(ours) == 1 else None
        y, kept, bits = projection.project(ours, residual=residual, relu=True)
        projection.backward([y, y], ours, kept, bits, residual=residual is not None)

    yield "first", lambda: run((64, 64), 256)
    yield "deep", lambda: run((256,), 1024)


def test_compiles_without_spilling():
    for made in compile_all(f"{__name__}:launches").values():
        assert not [launch for launch in made if launch["spilled_bytes"]]
        for kernel in ("products_kernel", "project_kernel", "gradient_kernel"):
            on_tensor_cores = [one["opcodes"]["HGMMA"] for one in made if one["kernel"] == kernel]
            assert on_tensor_cores
            assert all(on_tensor_cores)
