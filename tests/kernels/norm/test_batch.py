"""Batch norms in training beside float64, forward and backward, and compiled for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.kernels.norm import batch
from tests.support.kernels.compile_only import compile_all

ACTIVATIONS: dict[batch.Activation, Callable[[Tensor], Tensor]] = {
    None: lambda x: x, "relu": F.relu, "relu6": F.relu6, "silu": F.silu
}  # fmt: skip
# channels, norms, whether there is a residual, the activation, gradients of the result
CASES = [
    (24, 1, True, "relu", 2),
    (64, 1, False, "relu", 1),
    (304, 1, False, "silu", 2),
    (8, 1, True, None, 1),
    (16, 1, False, "relu6", 1),
    (40, 2, False, "relu", 2),
    (16, 2, False, None, 1),
]
EPS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of a tensor, by its norm


def images(shape: tuple[int, ...], dtype: torch.dtype, *, far: float = 0.0) -> Tensor:
    return (torch.randn(shape) + far).to(dtype).contiguous(memory_format=torch.channels_last)


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize(("channels", "count", "residual", "activation", "ways"), CASES)
def test_values_and_gradients(channels, count, residual, activation, ways, dtype):
    torch.manual_seed(channels)
    shape = (3, channels, 5, 7)
    xs = [images(shape, dtype, far=30.0) for _ in range(count)]  # a mean far from zero
    added = images(shape, dtype) if residual else None
    weights, biases, means = (
        [torch.randn(channels) + 1 for _ in range(count)] for _ in range(3)
    )  # fmt: skip
    variances = [torch.rand(channels) for _ in range(count)]
    ours = [
        batch.Norm(x, w, b, (m.clone(), v.clone()), momentum=0.3)
        for x, w, b, m, v in zip(xs, weights, biases, means, variances, strict=True)
    ]
    gradients = [images(shape, dtype) for _ in range(ways)]

    given = [[t.double().requires_grad_() for t in norm[:3]] for norm in ours]
    kept = [(m.double(), v.double()) for m, v in zip(means, variances, strict=True)]
    total = sum(
        F.batch_norm(x, m, v, w, b, True, 0.3, 1e-5)
        for (x, w, b), (m, v) in zip(given, kept, strict=True)
    )
    old = None if added is None else added.double().requires_grad_()
    expected = ACTIVATIONS[activation](total if old is None else total + old)
    expected.backward(sum(g.double() for g in gradients))

    y, found, bits = batch.normalize(ours, residual=added, activation=activation)
    made, of_residual = batch.backward(
        gradients, ours, found, bits, residual=residual, activation=activation
    )
    assert y.dtype == dtype
    assert off(y, expected.detach()) < EPS[dtype]
    for norm, (mean, variance), one, reference in zip(ours, kept, made, given, strict=True):
        assert off(norm.running[0], mean) < 2e-6
        assert off(norm.running[1], variance) < 2e-6
        bounds = (EPS[dtype], 2e-6, 2e-6)
        for gradient, of, bound in zip(one, reference, bounds, strict=True):
            assert off(gradient, of.grad) < bound
    if residual:
        assert off(of_residual, old.grad) < EPS[dtype]


def test_what_does_not_run():
    x = images((2, 8, 3, 3), torch.float32)
    assert batch.runs(x)
    assert not batch.runs(x.double())
    assert not batch.runs(x.contiguous())
    assert not batch.runs(x[:, :7])
    assert not batch.runs(x[:1, :, :1, :1])  # one value a channel has no variance


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    def run(channels: int, count: int, residual: bool, activation: batch.Activation) -> None:
        shape = (4, channels, 28, 28)
        numbers = torch.ones(channels)
        norms = [
            batch.Norm(images(shape, torch.float16), numbers, numbers, (numbers, numbers))
            for _ in range(count)
        ]
        added = images(shape, torch.float16) if residual else None
        y, found, bits = batch.normalize(norms, residual=added, activation=activation)
        batch.backward([y, y], norms, found, bits, residual=residual, activation=activation)

    yield "residual", lambda: run(1024, 1, True, "relu")
    yield "two", lambda: run(64, 2, False, "relu")


def test_compiles_without_spilling():
    for made in compile_all(f"{__name__}:launches").values():
        assert {"moments_kernel", "normalize_kernel", "gradient_sums_kernel"} <= {
            launch["kernel"] for launch in made
        }
        assert not [launch for launch in made if launch["spilled_bytes"]]
