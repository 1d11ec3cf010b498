"""What a fused graph calls for a transformer's parts, with gradients.

Forward they are torch's own operations, of which its compiler makes code together with what stands
around them. Where our kernels do not run (other types or devices), so are their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tessella.kernels.norm import layer
from tessella.kernels.pointwise import trained as pointwise
from tessella.nn import fp8
from tessella.nn.fused_ops import call


def heads_attended(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """Self-attention of [N, L, width], to [N, L, heads · E]."""
    made = F.scaled_dot_product_attention(*heads_of(x, weight, bias, heads))
    return made.transpose(1, 2).flatten(2)


def heads_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, heads: int, eight: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [N, heads, L, E] by one linear layer of [N, L, width].

    Args:
        eight: the layer multiplies 8-bit numbers (``nn.fp8``).
    """
    low = _lowered(x, weight)
    if low is not None and pointwise.runs(x):
        made: tuple[Tensor, Tensor, Tensor] = _Heads.apply(x.to(low), weight, bias, heads, eight)
        return made
    return _cut((fp8.linear if eight else F.linear)(x, weight, bias), heads)


def _cut(packed: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    cut = packed.view(*packed.shape[:2], 3, heads, packed.shape[-1] // (3 * heads))
    q, k, v = cut.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def patches_convolved(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution of [N, C, H, W] whose windows lie side by side: a linear layer of patches."""
    rows, channels, height, width = x.shape
    p, q = weight.shape[2:]
    patches = x.permute(0, 2, 3, 1).reshape(rows, height // p, p, width // q, q, channels)
    patches = patches.transpose(2, 3).flatten(3)
    return linear(patches, weight.permute(0, 2, 3, 1).flatten(1), bias).permute(0, 3, 1, 2)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer; in 16 bits the gradients of its float32 numbers are sums in float32, which
    are not rounded first.
    """
    low = _lowered(input, weight)
    if low is None:
        return F.linear(input, weight, bias)
    made: Tensor = _Linear.apply(input.to(low), weight, bias)
    return made


def _lowered(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The type in which autocast multiplies rows by float32 weights, if it does."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or weight.dtype != torch.float32 or x.dim() < 2:
        return None
    return torch.get_autocast_dtype(device)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        low = weight.to(x.dtype)
        ctx.save_for_backward(x, low)
        ctx.biased = bias is not None
        return F.linear(x, low, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        of_x, of_weight = _products(ctx, gradient)
        of_bias = gradient.flatten(0, -2).sum(0, dtype=torch.float32) if ctx.biased else None
        return of_x, of_weight, of_bias


def _products(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a linear layer's input and of its weight, as far as they are asked for."""
    x, weight = ctx.saved_tensors
    rows = gradient.flatten(0, -2)
    of_x = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
    asked = ctx.needs_input_grad[1]
    return of_x, fp8.weight_gradient(rows, x.flatten(0, -2)) if asked else None


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, heads: int, eight: bool
    ) -> tuple[Tensor, ...]:
        ctx.biased, ctx.eight = bias is not None, eight
        if eight:
            rounded = fp8.rounded(weight, fp8.VALUES)
            ctx.save_for_backward(x, *rounded)
            rows = fp8.rounded(x.flatten(0, -2), fp8.VALUES)
            made = fp8.product(rows, rounded, bias, x.dtype)
            return _cut(made.view(*x.shape[:-1], len(weight)), heads)
        low = weight.to(x.dtype)
        ctx.save_for_backward(x, low)
        return _cut(F.linear(x, low, None if bias is None else bias.to(x.dtype)), heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        parts = [g.transpose(1, 2).flatten(2).contiguous() for g in gradients]
        if ctx.eight:
            x, weight, factors = ctx.saved_tensors
            packed, sums, codes, scales = call("rounded_join", parts, factors, fp8.GRADIENTS)
            made = fp8.gradients(
                ctx.needs_input_grad, (codes, scales), packed.flatten(0, -2), x, (weight, factors)
            )
        else:
            packed, sums = call("joined", parts)
            made = _products(ctx, packed)
        return *made, sums if ctx.biased else None, None, None


def gelu(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """``gelu(x + bias)``."""
    if pointwise.runs(x, bias):
        made: Tensor = _Gelu.apply(x, bias, approximate)
        return made
    return F.gelu(x + bias.to(x.dtype), approximate=approximate)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.tanh = approximate == "tanh"
        return F.gelu(x.float() + bias, approximate=approximate).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, bias = ctx.saved_tensors
        made, of_bias = call("gelu_backward", gradient.contiguous(), x, bias, ctx.tanh)
        return made, of_bias, None


def dense(
    x: Tensor, weight: Tensor, bias: Tensor, approximate: str, weight2: Tensor,
    bias2: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Two linear layers of 8-bit numbers around a GELU, which makes and takes such."""
    low = torch.get_autocast_dtype(x.device.type)
    hidden = torch.empty(1, len(weight), dtype=low, device=x.device)
    if pointwise.runs(hidden, bias) and len(weight) <= pointwise.WIDEST:
        made: Tensor = _Dense.apply(x.to(low), weight, bias, approximate == "tanh", weight2, bias2)
        return made
    return fp8.linear(gelu(fp8.linear(x, weight), bias, approximate), weight2, bias2)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, tanh: bool, weight2: Tensor,
        bias2: Tensor | None,
    ) -> Tensor:  # fmt: skip
        first, second = (fp8.rounded(w, fp8.VALUES) for w in (weight, weight2))
        rows = fp8.rounded(x.flatten(0, -2), fp8.VALUES)
        hidden = fp8.product(rows, first, None, x.dtype)
        made, codes, scales = call("rounded_gelu", hidden, bias, fp8.VALUES, tanh)
        ctx.save_for_backward(x, hidden, bias, made, *first, *second)
        ctx.tanh, ctx.biased = tanh, bias2 is not None
        out = fp8.product((codes, scales), second, bias2, x.dtype)
        return out.view(*x.shape[:-1], len(weight2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, hidden, bias, made, *weights = ctx.saved_tensors
        first, second = (weights[0], weights[1]), (weights[2], weights[3])
        rows, asked = gradient.flatten(0, -2), ctx.needs_input_grad
        of_made, of_second = fp8.gradients(
            (True, asked[4]), fp8.weighted(rows, second), rows, made, second
        )
        of_hidden, of_bias, codes, scales = call(
            "rounded_gelu_backward", of_made, hidden, bias, first[1], fp8.GRADIENTS, ctx.tanh
        )
        of_x, of_first = fp8.gradients(asked, (codes, scales), of_hidden, x, first)
        of_bias2 = rows.sum(0, dtype=torch.float32) if ctx.biased else None
        return of_x, of_first, of_bias, None, of_second, of_bias2


def layer_normed(
    x: Tensor, added: Tensor | None, added_bias: Tensor | None, weight: Tensor, bias: Tensor,
    eps: float, keeps: bool, lower: bool, full: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """``total = x + added + added_bias`` and its layer norm.

    Returns:
        ``total``, if it ``keeps`` that; the norm as a linear layer takes it, if ``lower``; the norm
        as torch makes it, if ``full``.
    """
    device = x.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    given = [x] if added is None else [x, added]
    alike = {t.dtype for t in given} <= {torch.float32, low}
    ours = alike and all(layer.runs(t, weight) for t in given) and bias.dtype == torch.float32
    if ours:
        how = (eps, keeps, lower, full, low)
        made = list(_LayerNorm.apply(x, added, added_bias, weight, bias, how))
        return tuple(made.pop(0) if asked else None for asked in (keeps, lower, full))  # type: ignore[return-value]
    if added is not None:
        x = x + (added if added_bias is None else added + added_bias.to(added.dtype))
    y = F.layer_norm(x, weight.shape, weight, bias, eps)
    return x if keeps else None, y if lower else None, y if full else None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, added_bias: Tensor | None, weight: Tensor,
        bias: Tensor, how: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        eps, *asked, low = how
        total = x.view_as(x)
        if added is not None:
            more = added.float() if added_bias is None else added.float() + added_bias
            total = (x.float() + more).to(torch.promote_types(x.dtype, added.dtype))
        y, mean, inverse = torch.native_layer_norm(total.float(), weight.shape, weight, bias, eps)
        ctx.set_materialize_grads(False)
        ctx.asked = asked
        ctx.types = [None if t is None else t.dtype for t in (x, added, added_bias)]
        ctx.save_for_backward(total, mean, inverse, weight)
        made = (total, y if low is None else y.to(low), y.view_as(y))
        return tuple(one for one, wanted in zip(made, asked, strict=True) if wanted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        left = list(gradients)
        beside, *given = [left.pop(0) if asked else None for asked in ctx.asked]
        total, mean, inverse, weight = ctx.saved_tensors
        of_x, of_added, of_bias = ctx.types
        other = next((t for t in (of_x, of_added) if t not in (None, total.dtype)), None)
        of_norm = [g.contiguous() for g in given if g is not None] or [torch.zeros_like(total)]
        beside = None if beside is None else beside.contiguous()
        made = call(
            "layer_norm_backward", of_norm, total, mean, inverse, weight, beside, other,
            of_bias is not None,
        )  # fmt: skip
        found = {total.dtype: made.pop(0)}
        if other is not None:
            found[other] = made.pop(0)
        columns = made.pop() if of_bias is not None else None
        added = None if of_added is None else found[of_added]
        return found[of_x], added, columns, *made, None
