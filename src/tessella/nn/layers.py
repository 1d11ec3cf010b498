"""Layers that run our kernels, with gradients: the training backend ``"tessella"``.

``Conv2d`` and ``Linear`` are torch's modules with another forward pass: same parameters, same names
in the state dict, so a checkpoint does not know which of the two trained it. Forward, the input's
and the weight's gradient each take the kernel that is fastest for their shapes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tessella import kernels
from tessella.artifacts.run import Backend
from tessella.core.dtype import Math
from tessella.core.errors import UsageError

Window = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]  # stride … dilation, groups

_AS_IS = nullcontext()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Conv2d(nn.Conv2d):
    """``torch.nn.Conv2d`` on our kernels."""

    def forward(self, input: Tensor) -> Tensor:
        if not _runs_here(input) or input.dim() != 4:
            return super().forward(input)
        padding = self.padding
        if self.padding_mode != "zeros" or padding == "same":
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=mode)
        if self.padding_mode != "zeros" or isinstance(padding, str):
            padding = (0, 0)
        window = (self.stride, padding, self.dilation, self.groups)
        return conv2d(input, self.weight, self.bias, window)


class Linear(nn.Linear):
    """``torch.nn.Linear`` on our kernels."""

    def forward(self, input: Tensor) -> Tensor:
        if not _runs_here(input):
            return super().forward(input)
        return linear(input, self.weight, self.bias)


_OURS: dict[type[nn.Module], type[nn.Module]] = {nn.Conv2d: Conv2d, nn.Linear: Linear}
_TORCHS = {ours: theirs for theirs, ours in _OURS.items()}


def convert(module: nn.Module, *, backend: Backend = "tessella") -> nn.Module:
    """Let every convolution and linear layer in ``module`` run on a backend; returns ``module``.

    In place: parameters, buffers, hooks and names stay. Classes that extend torch's layers have a
    forward pass of their own and are left alone.
    """
    known = {"tessella": _OURS, "torch": _TORCHS}
    if backend not in known:
        raise UsageError("unknown backend", seen=backend, fix=f"use {' or '.join(known)}")
    for layer in module.modules():
        layer.__class__ = known[backend].get(type(layer), type(layer))
    return module


def conv2d(input: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """Convolution of [N, C, H, W] with weight [K, C / groups, R, S], with gradients.

    Under autocast the convolution runs in autocast's element type, as torch's does.
    """
    tensors = _autocast(input, weight, bias)
    with _no_autocast(input):
        output: Tensor = _Conv2d.apply(*tensors, window, _math(input, torch.backends.cudnn.conv))
    return output


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Product of input [..., K] and weight [N, K] transposed, plus bias; see ``conv2d``."""
    tensors = _autocast(input, weight, bias)
    with _no_autocast(input):
        output: Tensor = _Linear.apply(*tensors, _math(input, torch.backends.cuda.matmul))
    return output


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, window: Window, math: Math
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.window, ctx.math = window, math
        return kernels.conv2d(input, weight, bias, *window, math=math)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad = _like(grad, input)
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = kernels.conv2d_dgrad(grad, weight, input.shape, *ctx.window, math=ctx.math)
        if ctx.needs_input_grad[1]:
            of_weight = kernels.conv2d_wgrad(
                grad, input, weight.shape[2:], *ctx.window, math=ctx.math
            )
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum((0, 2, 3))
        return of_input, of_weight, of_bias, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, math: Math) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.math = math
        return kernels.linear(input, weight, bias, math=math)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad_MN, input_MK = grad.reshape(-1, grad.shape[-1]), input.reshape(-1, input.shape[-1])
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = kernels.matmul(grad_MN, weight, math=ctx.math).view(input.shape)
        if ctx.needs_input_grad[1]:
            of_weight = kernels.matmul(grad_MN.mT, input_MK, math=ctx.math)
        if ctx.needs_input_grad[2]:
            of_bias = grad_MN.sum(0)
        return of_input, of_weight, of_bias, None


def _runs_here(input: Tensor) -> bool:
    """Whether our kernels run; not while torch traces, as a graph must hold torch's operators."""
    return input.dtype in DTYPES and not torch.compiler.is_compiling()


def _autocast(input: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    device = input.device.type
    if not torch.is_autocast_enabled(device):
        return [input, *others]
    dtype = torch.get_autocast_dtype(device)
    return [None if t is None else t.to(dtype) for t in (input, *others)]


def _no_autocast(input: Tensor) -> AbstractContextManager[Any]:
    """Autocast off around a kernel, which may use torch's functions for sums in float32."""
    device = input.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _AS_IS


def _math(input: Tensor, setting: Any) -> Math:
    """Torch's setting for rounding float32 products on a GPU; ``ieee`` on the CPU."""
    return "tf32" if input.is_cuda and setting.fp32_precision == "tf32" else "ieee"


def _like(grad: Tensor, input: Tensor) -> Tensor:
    """The gradient in the input's memory format, as kernels require."""
    if input.is_contiguous():
        return grad.contiguous()
    return grad.contiguous(memory_format=torch.channels_last)
