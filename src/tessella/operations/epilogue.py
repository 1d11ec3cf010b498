"""The epilogue: what a convolution or a matrix product does to its result before storing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F

T = TypeVar("T")  # a tensor, or the description of one


@dataclass(frozen=True, kw_only=True)
class Epilogue(Generic[T]):
    """``store(gamma · activation(alpha · scale · product + bias + beta · residual))``.

    Attributes:
        bias, scale: one number an output channel; None where there is none.
        residual: of the result's shape; None where there is none.
        activation: a name of ``ACTIVATIONS``, or None.
        beta: where it is 0 the residual is not read, whatever it holds.
        floor: what ``relu`` makes of lower numbers: behind a ReLU a factor and a sum are the
            weights', the bias' and this one.
        gamma: a number above zero: what a layer on quantized values divides by where no factor
            passes through its activation (1 / the result's scale, behind a GELU).
    """

    bias: T | None = None
    residual: T | None = None
    scale: T | None = None
    activation: str | None = None
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0
    floor: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether the product itself is the result."""
        tensors = (self.bias, self.residual, self.scale)
        numbers = (self.activation, self.alpha, self.gamma)
        return tensors == (None, None, None) and numbers == (None, 1, 1)

    @property
    def on_device(self) -> tuple[str | None, float]:
        """``activation`` and ``beta`` as a GPU's texts take them: a ReLU with a floor is called
        ``floor``, and the floor stands where a residual has its factor.
        """
        return ("floor", self.floor) if self.floor != 0 else (self.activation, self.beta)

    @property
    def is_plain(self) -> bool:
        """Whether something is only added to the product (bias, residual), which is activated."""
        return self.scale is None and (self.alpha, self.beta, self.gamma) == (1, 1, 1)

    def of(
        self,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> Epilogue[torch.Tensor]:
        """This epilogue with other tensors; a residual that a ``beta`` of 0 forbids to read
        becomes None.
        """
        return Epilogue(
            bias=bias,
            residual=None if self.beta == 0 else residual,
            scale=scale,
            activation=self.activation,
            alpha=self.alpha,
            beta=self.beta,
            gamma=self.gamma,
            floor=self.floor,
        )

    def without(self, *fields: str) -> Epilogue[T]:
        """The epilogue that is left after a library has done the part of some fields."""
        defaults = Epilogue[T]()
        return replace(self, **{field: getattr(defaults, field) for field in fields})


NOTHING = Epilogue[torch.Tensor]()
TENSORS = ("bias", "residual", "scale")
NUMBERS: Mapping[str, Any] = {
    "activation": None, "alpha": 1.0, "beta": 1.0, "gamma": 1.0, "floor": 0.0
}  # fmt: skip

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
    "sin": torch.sin,
    "cos": torch.cos,
}


def is_gamma(number: Any) -> bool:
    """Whether it can be ``gamma``: above zero, and a normal number in float32, as kernels take it.

    Plans come from strangers: this is asked of whatever JSON holds.
    """
    if not isinstance(number, int | float) or isinstance(number, bool):
        return False
    limits = torch.finfo(torch.float32)
    return bool(limits.tiny <= number <= limits.max)


def floor_refusal(epilogue: Epilogue[T]) -> str | None:
    """Why ``floor`` is none, or None. Plans come from strangers, as for ``is_gamma``."""
    floor = epilogue.floor
    if not isinstance(floor, int | float) or isinstance(floor, bool):
        return f"floor is a number, not {floor!r}"
    if floor == 0:
        return None
    if not abs(floor) <= torch.finfo(torch.float32).max:  # nor a NaN
        return f"floor is a finite number in float32, not {floor!r}"
    return None if epilogue.activation == "relu" else "only relu has a floor"


def bias_inside(
    epilogue: Epilogue[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor | None, Epilogue[torch.Tensor]]:
    """The bias that a library's product of this element type can add itself, and what remains."""
    bias = epilogue.bias
    if bias is None or bias.dtype != dtype or epilogue.scale is not None or epilogue.alpha != 1:
        return None, epilogue
    return bias, epilogue.without("bias")


def finish(
    product: torch.Tensor, epilogue: Epilogue[torch.Tensor], *, axis: int = -1
) -> torch.Tensor:
    """The epilogue of a product whose channels lie along ``axis``; nothing is rounded by storing.

    Raises:
        ValueError: ``gamma`` is not above zero.
    """
    _require_gamma(epilogue.gamma)
    x = product if epilogue.alpha == 1 else epilogue.alpha * product
    if epilogue.scale is not None:
        x = x * _along(axis, epilogue.scale, x)
    if epilogue.bias is not None:
        x = x + _along(axis, epilogue.bias, x)
    if epilogue.residual is not None and epilogue.beta != 0:
        x = x + (epilogue.residual if epilogue.beta == 1 else epilogue.beta * epilogue.residual)
    if epilogue.floor != 0:
        x = x.clamp(min=epilogue.floor)
    elif epilogue.activation is not None:
        x = ACTIVATIONS[epilogue.activation](x)
    return x if epilogue.gamma == 1 else x * epilogue.gamma


def finish_(x: torch.Tensor, epilogue: Epilogue[torch.Tensor], *, axis: int = -1) -> torch.Tensor:
    """``finish`` in place, for kernels that own ``x``."""
    if epilogue.alpha != 1:
        x.mul_(epilogue.alpha)
    if epilogue.scale is not None:
        x.mul_(_along(axis, epilogue.scale, x))
    if epilogue.bias is not None:
        x.add_(_along(axis, epilogue.bias, x))
    if epilogue.residual is not None and epilogue.beta != 0:
        x.add_(epilogue.residual, alpha=epilogue.beta)
    if epilogue.floor != 0:
        x.clamp_(min=epilogue.floor)
    elif epilogue.activation is not None:
        OUT[epilogue.activation](x, out=x)
    return x if epilogue.gamma == 1 else x.mul_(epilogue.gamma)


def finish_as(
    dtype: str | None, product: torch.Tensor, epilogue: Epilogue[torch.Tensor], *, axis: int
) -> torch.Tensor:
    """``finish`` for references; stored as ``dtype`` if one is given, as layers on int8 say.

    These have kernels that read the vectors by the channel: nothing is broadcast, and on the meta
    device, where a plan's steps are checked, only shapes are looked at.
    """
    _require_gamma(epilogue.gamma)
    residual = None if epilogue.residual is None else exact(epilogue.residual)
    epilogue = replace(epilogue, residual=residual)
    if dtype is None:
        return finish(product, epilogue, axis=axis)
    for name, vector in (("bias", epilogue.bias), ("scale", epilogue.scale)):
        if vector is not None and tuple(vector.shape) != (product.shape[axis],):
            raise ValueError(f"{name} {tuple(vector.shape)} for {product.shape[axis]} channels")
    if residual is not None and residual.shape != product.shape:
        raise ValueError(f"residual {tuple(residual.shape)} for {tuple(product.shape)}")
    stored = getattr(torch, dtype)
    if product.is_meta:
        return torch.empty(product.shape, dtype=stored, device="meta")
    return store(finish(product, epilogue, axis=axis), stored)


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


def exact(x: torch.Tensor) -> torch.Tensor:
    """What a reference computes with: float64 for the types that are too small to (int8, fp8)."""
    if x.is_complex() or (x.is_floating_point() and x.dtype.itemsize > 1):
        return x
    return torch.empty(x.shape, dtype=torch.float64, device="meta") if x.is_meta else x.double()


def _require_gamma(gamma: Any) -> None:
    if not is_gamma(gamma):
        raise ValueError(f"gamma is a number above zero that float32 holds, not {gamma!r}")


def _along(axis: int, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A vector as a view that broadcasts along ``axis`` of ``x``."""
    return vector if axis == -1 else vector.view(-1, *(1,) * (x.dim() - 1 - axis))
