"""Linear layers that multiply 8-bit floating numbers in training: ``precision="fp8"``.

Forward and for the input's gradient both operands are rounded to eight bits, each row of inputs,
gradients and weights scaled by its largest magnitude of this very step, so there is no state to
keep. The weight's gradient is a product of 16-bit numbers: its sum runs over the rows, whose scales
it could not take out, and both operands would have to be turned.

A step of BERT-large takes 0.92 of bf16's time, of GPT-2 0.975 and of a ViT-B/16 as long (H200).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tessella.core.errors import UsageError, first_line
from tessella.nn.zoo import stages

VALUES = torch.float8_e4m3fn  # of activations and weights
GRADIENTS = torch.float8_e5m2
# Sums stay in the tensor cores, whose own have 14 bits: an error of 0.0021 beside 0.0017 of the
# result's rounding and 0.025 of the operands'; products take a tenth less (H200, 16,384 rows)
FAST_SUMS = True
# Inputs and outputs of a layer. Products of 25,216 rows take 0.76 to 0.8 of bf16's time where the
# least is 768, and 0.85 of it or more than all where it is 512 (H200)
LEAST = 768
TILE = 16  # what tensor cores take of a row at once: inputs and outputs are multiples
_SMALLEST = 2.0**-100  # the largest magnitude of a row of zeros, so that its scale is a number
Rounded = tuple[Tensor, Tensor]  # 8-bit numbers, and factors of their rows


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of [..., K] under autocast, by products of 8-bit numbers, with gradients.

    Sums are float32; the result has autocast's type. Gradients of weight and bias are float32.
    """
    low = torch.get_autocast_dtype(input.device.type)
    made: Tensor = _Linear.apply(input.to(low), weight, bias)
    return made


def rounded(x: Tensor, dtype: torch.dtype) -> Rounded:
    """8-bit numbers of [N, K], and the float32 factors [N, 1] of its rows, which give ``x``."""
    largest = x.abs().amax(1, keepdim=True).float().clamp(min=_SMALLEST)
    scale = largest / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype).contiguous(), scale  # GPUs take rows as they lie alone


def product(rows: Rounded, weight: Rounded, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``rows @ weight.T + bias`` of [M, K], [N, K] and [N], a 16-bit [M, N]."""
    with torch.autocast(rows[0].device.type, enabled=False):  # it would round the factors, too
        made: Tensor = torch._scaled_mm(
            rows[0], weight[0].t(), scale_a=rows[1], scale_b=weight[1].t(), out_dtype=dtype,
            bias=None if bias is None else bias.to(dtype), use_fast_accum=FAST_SUMS,
        )  # fmt: skip
    return made


def weighted(gradient: Tensor, weight: Rounded) -> Rounded:
    """A gradient [M, N] as ``input_gradient`` takes it: with the factors of the weight's rows,
    which its sum runs over."""
    return rounded(gradient * weight[1].t(), GRADIENTS)


def input_gradient(weighted: Rounded, weight: Rounded, dtype: torch.dtype) -> Tensor:
    """``gradient @ weight`` of [M, N] and [N, K], in 16 bits."""
    turned = weight[0].t().contiguous()
    return product(
        weighted, (turned, torch.ones_like(turned[:, :1], dtype=torch.float32)), None, dtype
    )


def weight_gradient(gradient: Tensor, rows: Tensor) -> Tensor:
    """``gradient.T @ rows`` of 16-bit [M, N] and [M, K], float32 without being rounded first."""
    if rows.is_cuda:
        return torch.mm(gradient.t(), rows, out_dtype=torch.float32)
    return (gradient.t() @ rows).float()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        low = rounded(weight, VALUES)
        ctx.save_for_backward(x, *low)
        ctx.biased = bias is not None
        made = product(rounded(x.flatten(0, -2), VALUES), low, bias, x.dtype)
        return made.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, *weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        low = weighted(rows, (weight[0], weight[1]))
        of_bias = rows.sum(0, dtype=torch.float32) if ctx.biased else None
        return *gradients(ctx.needs_input_grad, low, rows, x, (weight[0], weight[1])), of_bias


def gradients(
    asked: Sequence[bool], low: Rounded, gradient: Tensor, x: Tensor, weight: Rounded
) -> tuple[Tensor | None, Tensor | None]:
    """Of a layer's input and of its weight, as far as they are asked for."""
    of_x = input_gradient(low, weight, x.dtype).view(x.shape) if asked[0] else None
    return of_x, weight_gradient(gradient, x.flatten(0, -2)) if asked[1] else None


# --- layers ---------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """``torch.nn.Linear`` that trains in 8 bits under autocast, and answers as torch's does."""

    def forward(self, input: Tensor) -> Tensor:
        if not _trains(self, input):
            return super().forward(input)
        return linear(input, self.weight, self.bias)


class Attention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention``, whose self-attention without masks trains in 8 bits."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's."""
        masks = key_padding_mask is not None or attn_mask is not None
        alone = query is key and key is value and query.dim() == 3
        if not (_trains(self, query) and alone) or masks or need_weights:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights,
                is_causal,
            )  # fmt: skip
        rows, places, width = query.shape
        made = linear(query, self.in_proj_weight, self.in_proj_bias)
        parts = made.view(rows, places, 3, self.num_heads, width // self.num_heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        context = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        joined = context.transpose(1, 2).reshape(rows, places, width)
        return linear(joined, self.out_proj.weight, self.out_proj.bias), None


LAYERS = (Linear, Attention)
_WHOLE = (nn.Linear, nn.MultiheadAttention)


def _trains(layer: nn.Module, input: Tensor) -> bool:
    return layer.training and torch.is_autocast_enabled(input.device.type)


def to_fp8(module: nn.Module) -> int:
    """Let the large linear layers of a network train in 8 bits, in place; how many there are.

    Those of its first stage and of its head, which lose most by it, are left as they are.

    Raises:
        UsageError: the network has none.
    """
    *inner, last = [list(stage.modules.values()) for stage in stages(module)[1:]] or [[]]
    blocks = [part for part in last if sum(isinstance(p, _WHOLE) for p in part.modules()) > 1]
    parts = [part for stage in inner for part in stage] + blocks
    count = 0
    for layer in (layer for part in parts for layer in part.modules()):
        if type(layer) is nn.Linear and _pays(layer.weight):
            layer.__class__ = Linear
            count += 1
        elif type(layer) is nn.MultiheadAttention and _is_plain(layer):
            layer.__class__ = Attention
            count += 2
    if not count:
        raise UsageError(
            "the network has no linear layer that 8 bits would make faster",
            seen=f"{type(module).__name__}; a layer needs {LEAST} or more inputs and outputs, "
            f"multiples of {TILE}, between its first stage and its head",
            fix="train with precision bf16",
        )
    return count


def _pays(weight: Tensor) -> bool:
    return min(weight.shape) >= LEAST and all(side % TILE == 0 for side in weight.shape)


def _is_plain(layer: nn.MultiheadAttention) -> bool:
    weight = layer.in_proj_weight
    more = layer.bias_k is not None or layer.add_zero_attn or not layer.batch_first
    return weight is not None and not more and _pays(weight)


def require_products(device: torch.device) -> None:
    """Raise ``UsageError`` where products of 8-bit numbers do not run on a device."""
    if (why_not := _refusal(device)) is not None:
        raise UsageError(
            "fp8 needs a device that multiplies 8-bit floating numbers: a GPU of sm_89 or later",
            seen=why_not,
            fix="train with precision bf16",
        )


def _refusal(device: torch.device) -> str | None:
    """Why products of 8-bit numbers cannot run on a device; None where they can."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        known = (major, minor) >= (8, 9)
        return None if known else f"{torch.cuda.get_device_name(device)} is sm_{major}{minor}"
    a, scale = torch.zeros(TILE, TILE).to(VALUES), torch.ones(TILE, 1)
    try:
        product((a.to(GRADIENTS), scale), (a, scale), None, torch.bfloat16)
    except RuntimeError as error:  # a torch without it says so in this
        return first_line(error)
    return None
