"""What a fused graph calls, with gradients: batch norms with what follows them, max pooling, and
depthwise convolutions.

Where our kernels do not run (other types, strides or devices), torch does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tessella.kernels.conv import trained as depthwise
from tessella.kernels.conv import volumes
from tessella.kernels.norm import batch, projection
from tessella.kernels.norm.batch import Activation
from tessella.kernels.norm.projection import widens as widens
from tessella.kernels.pool import trained
from tessella.kernels.softmax import entropy as rows_of_scores
from tessella.nn.fused_dense import Found
from tessella.nn.fused_ops import call, traced

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
        count = len(how)
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.joins, ctx.count = activation or "", residual is not None, count
        given = [(*tensors[3 * n : 3 * n + 3], *how[n][:2]) for n in range(count)]
        given += [(None,) * 5] * (2 - count)
        numbers = [number for one in how for number in one[2:]]
        y, *statistics, bits = call(
            "normalize", *given[0], *given[1], numbers, residual, ctx.activation
        )
        kept = bits if bits.numel() else None
        ctx.save_for_backward(kept, *tensors, *statistics[: 2 * count])
        return (y, y.view_as(y)) if twice else (y,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return _backward("normalize_backward", ctx, gradients, 3, ctx.activation)


def _backward(
    name: str, ctx: Any, gradients: Sequence[Tensor | None], width: int, *more: object
) -> tuple[Any, ...]:
    """What the backward pass of norms returns, of which each was given ``width`` tensors."""
    given = [g.contiguous(memory_format=torch.channels_last) for g in gradients if g is not None]
    count: int = width * ctx.count
    if not given:
        return (None,) * (4 + count)
    bits, *saved = ctx.saved_tensors
    made = call(name, given, saved[:count], saved[count:], bits, ctx.joins, *more)
    joined = made.pop() if ctx.joins else None
    return (None, None, None, joined, *made)


def projected(
    before: Sequence[tuple[Tensor, Tensor, int]],
    given: Sequence[Sequence[Any]],
    residual: Tensor | None,
    activation: Activation,
    twice: bool,
) -> Any:
    """``normed`` of what 1×1 convolutions make.

    Args:
        before: the input, the weight and the step of each norm's convolution.
        given: each norm as in ``Found``, without its input.
        activation: a ReLU or none.
    """
    found = [Found(*norm) for norm in given]
    xs = [_as_computed(x, weight) for x, weight, _ in before]
    weights = [weight for _, weight, _ in before]
    x = xs[0][0]
    ours = all(alike and projection.runs(x, w) for (x, alike), w in zip(xs, weights, strict=True))
    ours = ours and all(n.weight.dtype == n.bias.dtype == torch.float32 for n in found)
    ours = ours and all(t.dtype == x.dtype for t, _ in xs)
    if residual is not None:
        shape = (
            x.shape[0],
            weights[0].shape[0],
            *(-(-side // before[0][2]) for side in x.shape[2:]),
        )
        ours = (
            ours and batch.runs(residual) and (residual.shape, residual.dtype) == (shape, x.dtype)
        )
    if not ours:
        made = [torch.conv2d(x, weight, stride=step) for x, weight, step in before]
        norms = [n._replace(input=y) for n, y in zip(found, made, strict=True)]
        return normed(norms, residual, activation, twice)
    how = [(n.running_mean, n.running_var, n.momentum, n.eps) for n in found]
    steps = [step for *_, step in before]
    read = [
        t if step == 1 else _Apart.apply(t, step) for (t, _), step in zip(xs, steps, strict=True)
    ]
    tensors = [
        t for x, w, n in zip(read, weights, found, strict=True) for t in (x, w, n.weight, n.bias)
    ]
    results = _Projected.apply(how, activation == "relu", twice, residual, *tensors)
    return results if twice else results[0]


class _Apart(torch.autograd.Function):
    """Every so-manieth pixel, in channels_last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: int) -> Tensor:
        ctx.step, ctx.shape = step, x.shape
        return x[:, :, ::step, ::step].contiguous(memory_format=torch.channels_last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        made = gradient.new_zeros(ctx.shape).to(memory_format=torch.channels_last)
        made[:, :, :: ctx.step, :: ctx.step] = gradient
        return made, None


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: list[tuple[Any, ...]],
        relu: bool,
        twice: bool,
        residual: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        count = len(how)
        ctx.joins, ctx.count = residual is not None, count
        given = [(*tensors[4 * n : 4 * n + 4], *how[n][:2]) for n in range(count)]
        given += [(None,) * 6] * (2 - count)
        numbers = [number for one in how for number in one[2:]]
        y, bits, *kept = call("project", *given[0], *given[1], numbers, residual, relu)
        ctx.save_for_backward(bits if relu else None, *tensors, *kept[: 4 * count])
        return (y, y.view_as(y)) if twice else (y,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return _backward("project_backward", ctx, gradients, 4)


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
        ctx.window, ctx.shape = [side for pair in window for side in pair], x.shape
        y, places = call("max_pool", x, ctx.window)
        ctx.save_for_backward(places)
        made: Tensor = y
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        return call("max_pool_backward", gradient, places, list(ctx.shape), ctx.window), None


def _as_computed(input: Tensor, weight: Tensor) -> tuple[Tensor, bool]:
    """The input as autocast has it, and whether the weight is one of float32 that goes with it."""
    device = input.device.type
    lowered = torch.is_autocast_enabled(device)
    x = input.to(torch.get_autocast_dtype(device)) if lowered else input
    return x, weight.dtype == torch.float32 and (lowered or x.dtype == weight.dtype)


def convolved(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """A depthwise convolution with gradients; ours where the tensor is of channels_last."""
    x, alike = _as_computed(input, weight)
    window = _window(weight, stride, padding, dilation)
    if window is None or not (alike and depthwise.runs(x, weight, window)):
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    made: Tensor = _Convolved.apply(x, weight, bias, [side for pair in window for side in pair])
    return made


def _window(weight: Tensor, stride: Any, padding: Any, dilation: Any) -> depthwise.Window | None:
    """The window by torch's arguments; None for one with gaps, or with margins by a name."""
    if isinstance(padding, str) or tuple(_pair(dilation)) != (1, 1):
        return None
    kernel = (weight.shape[2], weight.shape[3])
    return depthwise.Window(kernel, _pair(stride), _pair(padding))


def _pair(given: Any) -> tuple[int, int]:
    sides = (given,) if isinstance(given, int) else tuple(given)
    return (sides[0], sides[-1])


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, window: list[int]
    ) -> Tensor:
        ctx.window = window
        ctx.save_for_backward(x, weight)
        made: Tensor = call("depthwise", x, weight, bias, window)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = call("depthwise_backward", gradient, weight, list(x.shape), ctx.window)
        if ctx.needs_input_grad[1]:
            of_weight = torch.ops.aten.convolution_backward(
                gradient, x, weight.to(x.dtype), None, ctx.window[2:4], ctx.window[4:], [1, 1],
                False, [0, 0], x.shape[1], [False, True, False],
            )[1].to(weight.dtype)  # fmt: skip
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum((0, 2, 3), dtype=torch.float32)
        return of_x, of_weight, of_bias, None


def volumes_convolved(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """A convolution of volumes with gradients; ours where the tensor is of channels_last."""
    x, alike = _as_computed(input, weight)
    named = isinstance(padding, str)
    window = () if named else tuple(map(_triple, (stride, padding, dilation)))
    if named or not (alike and volumes.runs(x, weight, window, groups)):
        return torch.conv3d(input, weight, bias, stride, padding, dilation, groups)
    made: Tensor = _Volumes.apply(x, weight)
    return made if bias is None else made + bias.to(made.dtype).view(-1, 1, 1, 1)


def _triple(given: Any) -> tuple[int, ...]:
    return (given,) * 3 if isinstance(given, int) else (*given, *given, *given)[:3]


class _Volumes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        low = weight.to(x.dtype)
        ctx.save_for_backward(x, low)
        ctx.dtype = weight.dtype
        made: Tensor = call("volumes", x, low)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, low = ctx.saved_tensors
        of_x = of_weight = None
        gradient = gradient.contiguous(memory_format=torch.channels_last_3d)
        if ctx.needs_input_grad[0]:
            of_x = call("volumes", gradient, volumes.turned(low))
        if ctx.needs_input_grad[1]:
            padding = [taps // 2 for taps in low.shape[2:]]
            of_weight = torch.ops.aten.convolution_backward(
                gradient, x, low, None, [1] * 3, padding, [1] * 3, False, [0] * 3, 1,
                [False, True, False],
            )[1].to(ctx.dtype)  # fmt: skip
        return of_x, of_weight


def instances_normed(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """An instance norm with gradients, in whose result channels lie where they lie in the input.

    torch's is a batch norm of N · C channels, whose results and gradients are contiguous: behind
    it each convolution of a channels_last network copies what it is given, which took a quarter of
    a 3-D U-Net's step, and none could be ours. This is for a compiler, which makes passes of it.
    """
    if not (use_input_stats and running_mean is None and traced(input)):
        return F.instance_norm(
            input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )
    return cast(Tensor, _Instances.apply(input, weight, bias, eps))


class _Instances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        wide = torch.promote_types(x.dtype, torch.float32)
        along = tuple(range(2, x.dim()))
        variance, mean = torch.var_mean(x.to(wide), along, correction=0, keepdim=True)
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        y = (x.to(wide) - mean) * scale
        y = y if weight is None else y * _by_channel(weight, x)
        return (y if bias is None else y + _by_channel(bias, x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        along, places = tuple(range(2, x.dim())), math.prod(x.shape[2:])
        y = (x.to(mean.dtype) - mean) * scale
        of_bias = gradient.to(mean.dtype).sum(along, keepdim=True)
        of_weight = (y * gradient).sum(along, keepdim=True)
        of_x = (gradient - (of_bias + y * of_weight) / places) * scale
        of_x = of_x if weight is None else of_x * _by_channel(weight, x)
        sums = [
            None if given is None else found.sum(0).view(-1).to(given.dtype)
            for given, found in ((weight, of_weight), (bias, of_bias))
        ]
        return of_x.to(x.dtype), *sums, None


def _by_channel(numbers: Tensor, x: Tensor) -> Tensor:
    return numbers.view(1, -1, *(1,) * (x.dim() - 2))


def entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """A cross entropy with gradients; ours where it is a mean over rows of scores."""
    usual = weight is None and size_average is reduce is None and reduction == "mean"
    if not usual or label_smoothing or not rows_of_scores.runs(input, target):
        return F.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    made: Tensor = _Entropy.apply(input, target, ignore_index)
    return made


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, ignored: int) -> Tensor:
        losses, norms = call("entropy", scores, targets, ignored)
        count = (targets != ignored).sum()
        ctx.save_for_backward(scores, targets, norms, count)
        ctx.ignored = ignored
        made: Tensor = losses.sum() / count
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        scores, targets, norms, count = ctx.saved_tensors
        factor = (gradient / count).float()
        return call("entropy_backward", scores, targets, norms, factor, ctx.ignored), None, None
