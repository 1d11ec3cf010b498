"""The epilogue: what a convolution or a matrix product does to its result before storing it.

``out = store(gamma · activation(alpha · scale · product + bias + beta · residual))``, where scale
and bias have one number an output channel. The names are what the attribute ``activation`` may
hold. ``gamma`` is above zero: what a layer of codes divides by where no factor passes through its
activation (1 / the result's scale, behind a GELU).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tessella.operations.problem import Problem, is_gamma

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
}

aten = torch.ops.aten

# operation → function(x, *, out).
# torch.clamp_min for relu: aten::relu.out computes elsewhere and copies.
OUT: dict[str, Callable[..., Any]] = {
    "relu": lambda x, *, out: torch.clamp_min(x, 0, out=out),
    "relu6": lambda x, *, out: torch.clamp(x, 0, 6, out=out),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": aten.silu.out,
    "gelu": aten.gelu.out,
    "gelu_tanh": lambda x, *, out: aten.gelu.out(x, approximate="tanh", out=out),
    "hardswish": aten.hardswish.out,
    "hardsigmoid": aten.hardsigmoid.out,
    "mish": aten.mish.out,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "neg": torch.neg,
    "abs": torch.abs,
    "erf": torch.erf,
}

GAMMA_OF_HALVES = 2.0**-7, 2.0**14  # least and most, for ``in_halves``


def finish(
    product: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 1.0,
    axis: int = -1,
) -> torch.Tensor:
    """``gamma · activation(alpha · scale · product + bias + beta · residual)``.

    Any tensor may be None.

    Args:
        bias, scale: one number for each position on ``axis``.
        beta: where it is 0 the residual is not read, whatever it holds.
        gamma: above zero.

    Raises:
        ValueError: ``gamma`` is not.
    """
    _require_gamma(gamma)
    x = product if alpha == 1 else alpha * product
    if scale is not None:
        x = x * _along(axis, scale, x)
    if bias is not None:
        x = x + _along(axis, bias, x)
    if residual is not None and beta != 0:
        x = x + (residual if beta == 1 else beta * residual)
    x = x if activation is None else ACTIVATIONS[activation](x)
    return x if gamma == 1 else x * gamma


def finish_(
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 1.0,
    axis: int = -1,
) -> torch.Tensor:
    """``finish`` in place, for kernels that own ``x``."""
    if alpha != 1:
        x.mul_(alpha)
    if scale is not None:
        x.mul_(_along(axis, scale, x))
    if bias is not None:
        x.add_(_along(axis, bias, x))
    if residual is not None and beta != 0:
        x.add_(residual, alpha=beta)
    if activation is not None:
        OUT[activation](x, out=x)
    return x if gamma == 1 else x.mul_(gamma)


def store(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` as it is stored: integers round half to even; integers and fp8 saturate."""
    if x.dtype == dtype:
        return x
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return x.round().clamp(limits.min, limits.max).to(dtype)
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        return x.clamp(-limit, limit).to(dtype)
    return x.to(dtype)


def finish_as(
    dtype: str | None,
    product: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    scale: torch.Tensor | None,
    *,
    axis: int,
    **rest: Any,
) -> torch.Tensor:
    """``finish`` for references; stored as ``dtype`` if one is given, as layers on int8 say.

    These have kernels that read the vectors by the channel: nothing is broadcast, and on the meta
    device, where a plan's steps are checked, only shapes are looked at.
    """
    _require_gamma(rest.get("gamma", 1.0))
    residual = None if residual is None else exact(residual)
    if dtype is None:
        return finish(product, bias, residual, scale, axis=axis, **rest)
    for name, vector in (("bias", bias), ("scale", scale)):
        if vector is not None and tuple(vector.shape) != (product.shape[axis],):
            raise ValueError(f"{name} {tuple(vector.shape)} for {product.shape[axis]} channels")
    if residual is not None and residual.shape != product.shape:
        raise ValueError(f"residual {tuple(residual.shape)} for {tuple(product.shape)}")
    stored = getattr(torch, dtype)
    if product.is_meta:
        return torch.empty(product.shape, dtype=stored, device="meta")
    return store(finish(product, bias, residual, scale, axis=axis, **rest), stored)


def in_halves(problem: Problem) -> bool:
    """Whether ``half_device`` may compute the activation: GELU of an e4m3 result, with a factor
    that float16 holds, and by which what float16 does not hold is more than e4m3 holds.
    """
    gelu = problem.attr("activation") == "gelu" and problem.output.dtype == "float8_e4m3fn"
    least, most = GAMMA_OF_HALVES
    return gelu and least <= problem.attr("gamma") <= most


def _require_gamma(gamma: Any) -> None:
    if not is_gamma(gamma):
        raise ValueError(f"gamma is a number above zero that float32 holds, not {gamma!r}")


def exact(x: torch.Tensor) -> torch.Tensor:
    """What a reference computes with: float64 for the types that are too small to (int8, fp8)."""
    if x.is_floating_point() and x.dtype.itemsize > 1:
        return x
    return torch.empty(x.shape, dtype=torch.float64, device="meta") if x.is_meta else x.double()


def _along(axis: int, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A vector as a view that broadcasts along ``axis`` of ``x``."""
    return vector if axis == -1 else vector.view(-1, *(1,) * (x.dim() - 1 - axis))
