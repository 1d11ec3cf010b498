"""Operators that torch ends the process in for some values, with a defined result for these.

A client chooses the numbers, so none may stop a server. An integer quotient or remainder by zero
is 0, as in NumPy (torch raises on a CPU, and one client's zero, or the zeros that fill a batch up,
would fail the others' requests); the least integer divided by −1 is itself, as it wraps, where the
processor stops with SIGFPE. Floating point needs no guard: its operators are called as they are.

An index outside of its axis is torch's error on a CPU. A GPU cannot refuse in the middle of a
graph: it would end the process, so there such an index counts on from the other end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tessella.core.dtype import dtype_name

QUOTIENTS = ("aten::div", "aten::divide", "aten::floor_divide")
REMAINDERS = ("aten::remainder", "aten::fmod")


def guarded(operator: torch._ops.OpOverload, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The operator, or what stands in for it: the same function with no value that it dies of.

    Args:
        inputs: the tensors that it will read, or what else has their ``dtype``; a number with a
            fraction among them makes a quotient one, which needs no guard.
    """
    guard = _GUARDS.get(operator._schema.name)
    if guard is None or (guard is _divided and any(map(_has_fractions, inputs))):
        return operator
    return functools.partial(guard, operator)


def _has_fractions(tensor: Any) -> bool:
    kind = "" if tensor is None else dtype_name(tensor.dtype)
    return kind.startswith(("float", "bfloat", "complex"))


def _divided(operator: torch._ops.OpOverload, x: Any, other: Any, **named: Any) -> Any:
    """A quotient or a remainder of integers, defined for every divisor."""
    dtype = torch.result_type(x, other)
    name = operator._schema.name
    rounded = name not in QUOTIENTS[:2] or named.get("rounding_mode") is not None
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or not rounded:
        return operator(x, other, **named)
    least = torch.iinfo(dtype).min
    if not isinstance(other, torch.Tensor) and other in (0, -1):
        negative = other == -1 and name in QUOTIENTS
        return -x.to(dtype) if negative else torch.zeros_like(x, dtype=dtype)
    if not isinstance(other, torch.Tensor):
        return operator(x, other, **named)
    zero = other == 0
    wraps = (other == -1) & (x == least) if least else zero
    made = operator(x, other.to(dtype).masked_fill(zero, 1).where(~wraps, 1), **named)
    return made.where(~zero, 0)


def _deformed(
    operator: torch._ops.OpOverload, x: Any, weight: Any, offset: Any, *rest: Any, **named: Any
) -> Any:
    """A deformable convolution; an offset that is no number leads out of the image.

    torchvision compares it with the image's edges, which says neither in nor out, and reads.
    """
    return operator(x, weight, offset.nan_to_num(nan=torch.inf), *rest, **named)


def _along(
    operator: torch._ops.OpOverload, x: Any, dim: int, index: Any, *rest: Any, **named: Any
) -> Any:
    """Elements read or written at places along one axis."""
    if index.is_cuda and x.dim() and x.shape[dim]:
        index = index.remainder(x.shape[dim])
    return operator(x, dim, index, *rest, **named)


def _at(
    operator: torch._ops.OpOverload, x: Any, indices: Sequence[Any], *rest: Any, **named: Any
) -> Any:
    """Elements read or written at places along the first axes; masks take axes of their own."""
    whole = all(i is None or i.dtype not in (torch.bool, torch.uint8) for i in indices)
    if x.is_cuda and whole and x.numel():
        indices = [i if i is None else i.remainder(n) for i, n in zip(indices, x.shape)]
    return operator(x, indices, *rest, **named)


_ALONG = ("index_select", "gather", "scatter", "scatter_add", "scatter_reduce")
_GUARDS: dict[str, Callable[..., Any]] = {
    **{f"aten::{name}": _along for name in _ALONG},
    **dict.fromkeys(("aten::index", "aten::index_put"), _at),
    **dict.fromkeys((*QUOTIENTS, *REMAINDERS), _divided),
    "torchvision::deform_conv2d": _deformed,
}
