"""Batch norms with the statistics of all processes' images, as one process with all of them has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SynchronizedNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm of any number of dimensions; each process has as many images.

    Mean and variance are exchanged one after the other, since a mean of squares would cancel.
    torch's own runs on GPUs alone.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
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
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = self.momentum or 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance * count / max(1, count - 1), share)

    def _check_input_dim(self, input: Tensor) -> None:
        """All that ``F.batch_norm`` takes."""


def synchronized(module: nn.Module) -> nn.Module:
    """The module with its batch norms replaced; parameters and buffers are the same tensors."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        made = SynchronizedNorm(
            module.num_features, module.eps, module.momentum, module.affine,
            module.track_running_stats,
        )  # fmt: skip
        made._parameters, made._buffers = module._parameters, module._buffers
        return made.train(module.training)
    for name, part in module.named_children():
        module._modules[name] = synchronized(part)
    return module


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
