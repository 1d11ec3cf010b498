"""A layer of one's own: written once, trained, compiled into a plan that a server can load.

    python -m examples.kernels.own_layer

Snake (Ziyin et al. 2020, arXiv:2006.08195), x + sin²(a·x)/a with a learned frequency a for each
channel, learns periodic functions, which ReLU does not. Forward and gradient are Triton kernels;
the gradient is an operator too. A plan names the operator; whoever loads it imports this module:

    tessella --import examples.kernels.own_layer serve snake.plan
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

import tessella as ts
from tessella.artifacts.plan import Plan
from tessella.core.spec import TensorSpec
from tessella.kernels.user import Launch, operator

BLOCK = 256


@triton.jit
def snake_kernel(x_ptr, a_ptr, out_ptr, n, channels, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    a = tl.load(a_ptr + at % channels, mask=at < n, other=1.0)
    sine = tl.sin(a * x)
    tl.store(out_ptr + at, x + sine * sine / a, mask=at < n)


@triton.jit
def snake_gradient_kernel(grad_ptr, x_ptr, a_ptr, dx_ptr, da_ptr, n, channels, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_ptr + at, mask=at < n)
    x = tl.load(x_ptr + at, mask=at < n)
    a = tl.load(a_ptr + at % channels, mask=at < n, other=1.0)
    sine, double = tl.sin(a * x), tl.sin(2.0 * a * x)
    tl.store(dx_ptr + at, grad * (1.0 + double), mask=at < n)
    tl.store(da_ptr + at, grad * (x * double - sine * sine / a) / a, mask=at < n)


def snake_reference(x: Tensor, a: Tensor) -> Tensor:
    return x + torch.sin(a * x).square() / a


def snake_gradient(grad: Tensor, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    dx, da = snake_backward(grad, x, a)
    return dx, da.sum(0)


@operator(
    "examples::snake_backward",
    shape=lambda grad, x, a: (torch.empty_like(x), torch.empty_like(x)),
    reference=lambda grad, x, a: (
        grad * (1 + torch.sin(2 * a * x)),
        grad * (x * torch.sin(2 * a * x) - torch.sin(a * x).square() / a) / a,
    ),
)
def snake_backward(grad: Tensor, x: Tensor, a: Tensor, *, out: tuple[Tensor, Tensor]) -> Launch:
    return _launch(snake_gradient_kernel, grad, x, a, *out)


@operator(
    "examples::snake",
    shape=lambda x, a: torch.empty_like(x),
    gradient=snake_gradient,
    reference=snake_reference,
)
def snake(x: Tensor, a: Tensor, *, out: Tensor) -> Launch:
    return _launch(snake_kernel, x, a, out)


def _launch(kernel, *tensors: Tensor) -> Launch:
    n, channels = tensors[-1].numel(), tensors[-1].shape[-1]
    return Launch(
        kernel=kernel,
        grid=(triton.cdiv(n, BLOCK),),
        args=(*tensors, n, channels),
        constants={"BLOCK": BLOCK},
    )


class Snake(nn.Module):
    """Takes [N, channels]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.full((channels,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return snake(x, self.frequency)


def main(steps: int = 60) -> tuple[float, float]:
    """Returns the last loss over the first, and the plan's largest error."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = nn.Sequential(nn.Linear(1, 32), Snake(32), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    x = torch.linspace(-6, 6, 257, device=device)[:, None]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (network(x) - torch.sin(3 * x)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(snake.last_launch, snake_backward.last_launch, sep="\n")
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {steps} steps")

    with tempfile.TemporaryDirectory() as folder:
        plan = compiled(network)
        print(plan)
        engine = ts.load(plan.save(Path(folder) / "snake.plan"))
        answer = engine(x)["output"]
    with torch.no_grad():
        wanted = network(x)
    error = float((answer - wanted).abs().max() / wanted.abs().max())
    print(f"the loaded plan's answers: largest error {error:.1e}")
    return losses[-1] / losses[0], error


def compiled(network: nn.Module) -> Plan:
    inputs = [TensorSpec(name="x", dtype="float32", shape=(1, 1))]
    return ts.compile(network, inputs=inputs, batch=(1, 16, 64))


if __name__ == "__main__":
    main()
