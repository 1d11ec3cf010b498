"""Batch norms with the statistics of all processes' images, as one process with all of them has."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessella.core.errors import UsageError
from tessella.nn.prototxt.modules import BatchNorm

_TORCHS = nn.modules.batchnorm._BatchNorm.forward
_WITH_PARTS = ("BatchNormAct2d",)  # timm's: a norm, then its parts, one after the other


class SynchronizedNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm of any number of dimensions; each process has as many images.

    A layer of timm's that is a norm and an activation stays both: its parts run behind the norm.
    Mean and variance are exchanged one after the other, since a mean of squares would cancel.
    torch's own runs on GPUs alone.
    """

    def forward(self, input: Tensor) -> Tensor:
        made = self._normed(input) if self.training else super().forward(input)
        for part in self.children():
            made = part(made)
        return made

    def _normed(self, input: Tensor) -> Tensor:
        x = input.float()
        over = [0, *range(2, x.dim())]
        shape = (1, -1, *(1 for _ in range(2, x.dim())))
        size = dist.get_world_size()
        mean = _sum_of_all(x.mean(over)) / size
        centred = x - mean.view(shape)
        variance = _sum_of_all(centred.square().mean(over)) / size
        self._follow(mean.detach(), variance.detach(), size * x.numel() // x.shape[1])
        made = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            made = made * self.weight.view(shape) + self.bias.view(shape)
        return made.to(input.dtype)

    def _follow(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Move the running statistics."""
        if self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:  # recompute hides it from a second pass
            self.num_batches_tracked += 1
        share = self.momentum
        if share is None:
            assert self.num_batches_tracked is not None
            share = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance * count / max(1, count - 1), share)

    def _check_input_dim(self, input: Tensor) -> None:
        """All that ``F.batch_norm`` takes."""


def synchronized(module: nn.Module) -> nn.Module:
    """The module, whose batch norms are ``SynchronizedNorm`` from now on: their weights, hooks and
    places stay.

    Raises:
        UsageError: one of them computes something of its own.
    """
    for name, part in module.named_modules():
        if not isinstance(part, nn.modules.batchnorm._BatchNorm):
            continue
        kind: Any = type(part)
        if kind.forward is _TORCHS or kind is BatchNorm:
            part.__class__ = _over(kind)
        elif kind.__name__ in _WITH_PARTS:
            part.__class__ = SynchronizedNorm
        else:
            raise UsageError(
                "sync_norms knows what torch's batch norms compute",
                seen=f"{name}, a {kind.__module__}.{kind.__name__}, has a forward pass of its own",
                fix="leave sync_norms out",
            )
    return module


@functools.cache
def _over(kind: Any) -> Any:
    """A class of norms that is ``kind`` but where that calls torch's forward pass."""
    return type(kind.__name__, (kind, SynchronizedNorm), {})


class _Sum(torch.autograd.Function):
    """The sum over all processes, whose gradient is the sum of all processes' gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        made = own.clone()
        dist.all_reduce(made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        made = gradients[0].clone()
        dist.all_reduce(made)
        return made


def _sum_of_all(own: Tensor) -> Tensor:
    made: Tensor = _Sum.apply(own)
    return made
