"""What a fused graph calls: batch norms with what follows them, and max pooling, with gradients.

Where our kernels do not run (other types, strides or devices), torch does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tessella.kernels.norm import batch
from tessella.kernels.norm.batch import Activation, Norm
from tessella.kernels.pool import trained
from tessella.nn.fused import Found

_TORCHS: dict[Activation, Callable[[Tensor], Tensor]] = {
    None: lambda x: x, "relu": F.relu, "relu6": F.relu6, "silu": F.silu
}  # fmt: skip


def normed(
    given: Sequence[Sequence[Any]],
    residual: Tensor | None,
    activation: Activation,
    twice: bool,
) -> Any:
    """``activation(sum of batch norms + residual)`` by the statistics of a batch, with gradients.

    Args:
        given: one norm or two, each as in ``Found``.
        twice: return the result two times, so that its gradients come from two sides.
    """
    found = [Found(*norm) for norm in given]
    x = found[0].input
    alike = [norm.input for norm in found] + ([] if residual is None else [residual])
    ours = all(batch.runs(t) and t.shape == x.shape and t.dtype == x.dtype for t in alike) and all(
        norm.weight.dtype == norm.bias.dtype == torch.float32 for norm in found
    )
    if ours:
        how = [(n.running_mean, n.running_var, n.momentum, n.eps) for n in found]
        tensors = [t for n in found for t in (n.input, n.weight, n.bias)]
        made = _Normed.apply(how, activation, twice, residual, *tensors)
        return made if twice else made[0]
    parts = [
        F.batch_norm(
            n.input, n.running_mean, n.running_var, n.weight, n.bias, True, n.momentum, n.eps
        )
        for n in found
    ]
    parts += [] if residual is None else [residual]
    y = _TORCHS[activation](functools.reduce(torch.add, parts))
    return (y, y) if twice else y


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: list[tuple[Any, ...]],
        activation: Activation,
        twice: bool,
        residual: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        norms = [
            Norm(*triple, (mean, variance) if mean is not None else None, momentum, eps)
            for triple, (mean, variance, momentum, eps) in zip(_triples(tensors), how, strict=True)
        ]
        y, found, bits = batch.normalize(norms, residual=residual, activation=activation)
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.joins, ctx.count = activation, residual is not None, len(norms)
        ctx.save_for_backward(bits, *tensors, *(t for statistics in found for t in statistics))
        return (y, y.view_as(y)) if twice else (y,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        given = [
            g.contiguous(memory_format=torch.channels_last) for g in gradients if g is not None
        ]
        if not given:
            nothing: list[Any] = [None] * (4 + 3 * ctx.count)
            return tuple(nothing)
        bits, *saved = ctx.saved_tensors
        tensors, numbers = saved[: 3 * ctx.count], saved[3 * ctx.count :]
        norms = [Norm(*triple) for triple in _triples(tensors)]
        found = [batch.Statistics(*numbers[2 * n : 2 * n + 2]) for n in range(ctx.count)]
        made, joined = batch.backward(
            given, norms, found, bits, residual=ctx.joins, activation=ctx.activation
        )
        returned: tuple[Any, ...] = (None, None, None, joined, *(t for one in made for t in one))
        return returned


def _triples(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each norm's input, weight and bias."""
    return list(zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True))


def pooled(
    input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1
) -> Tensor:
    """Max pooling of [N, C, H, W] with gradients; ours where the tensor is of channels_last."""
    window = trained.Window.of(kernel_size, stride, padding, dilation)
    if window is None or not trained.runs(input, window):
        return F.max_pool2d(input, kernel_size, stride, padding, dilation)
    made: Tensor = _Pooled.apply(input, window)
    return made


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: trained.Window) -> Tensor:
        y, places = trained.max_pool(x, window)
        ctx.save_for_backward(places)
        ctx.window, ctx.shape = window, x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        return trained.max_pool_backward(gradient, places, ctx.shape, ctx.window), None
