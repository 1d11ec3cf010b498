"""A user's kernel against its reference: values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tessella.core.errors import KernelError
from tessella.operations.user_operators import Tensors, as_tuple

# largest error over largest value, where the user gives no tolerance
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def compare(
    name: str,
    function: Callable[..., Tensors],
    reference: Callable[..., Tensors],
    args: Sequence[Any],
    *,
    gradients: bool,
    tolerance: float | None,
) -> float:
    """The largest error over the largest value, against the reference in float64.

    Raises:
        KernelError: it is larger than ``tolerance``.
    """
    made = _differentiated(function, args, gradients)
    wanted = _differentiated(reference, _double(args), gradients)
    limit = tolerance or max((TOLERANCES.get(t.dtype, 0.0) for t in made[0]), default=0.0)
    worst = 0.0
    for what, ours, right in zip(("result", "gradient"), made, wanted):
        for position, (a, b) in enumerate(zip(ours, right, strict=True)):
            error = _error(a, b)
            worst = max(worst, error)
            if not error <= limit:
                raise KernelError(
                    f"{what} {position} of {name} is not that of its reference",
                    seen=f"error {error:.2e} of the largest value, allowed {limit:.0e}",
                    fix="correct the kernel, its gradient or its reference",
                )
    return worst


def _double(args: Sequence[Any]) -> list[Any]:
    return [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


def _differentiated(
    function: Callable[..., Tensors], args: Sequence[Any], gradients: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of floating arguments for a fixed random cotangent."""
    leaves = [
        a.detach().requires_grad_(gradients)
        if isinstance(a, Tensor) and a.is_floating_point()
        else a
        for a in args
    ]
    outputs = as_tuple(function(*leaves))
    floating = [o for o in outputs if o.requires_grad]
    if not floating:
        return list(outputs), []
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in floating]
    wanted = [a for a in leaves if isinstance(a, Tensor) and a.requires_grad]
    grads = torch.autograd.grad(floating, wanted, cotangents, materialize_grads=True)
    return [o.detach() for o in outputs], list(grads)


def _error(made: Tensor, right: Tensor) -> float:
    """Largest absolute error over the largest absolute value."""
    if made.shape != right.shape:
        return float("inf")
    if made.numel() == 0:
        return 0.0
    made, right = made.detach().double(), right.detach().double().to(made.device)
    return float((made - right).abs().max() / right.abs().max().clamp_min(1e-30))
