"""A problem: what a kernel is asked to do, apart from the numbers. The key of tuning."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from tessella.core.dtype import Math
from tessella.core.errors import KernelError, UsageError
from tessella.core.record import digest

Format = Literal["contiguous", "channels_last", "strided"]


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """Shape, element type and memory format of one tensor.

    ``strided`` promises nothing but ``strides``, where they are known: the tensor may be a view.
    The other formats are dense.

    Attributes:
        strides: in elements, of a slice of a larger dense tensor; None for everything else.
    """

    shape: tuple[int, ...]
    dtype: str
    format: Format = "contiguous"
    strides: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return int(getattr(torch, self.dtype).itemsize)

    def empty(self, device: torch.device) -> torch.Tensor:
        """A new tensor of this shape, element type and format, with any content.

        A slice's rows lie apart in memory of its own, with the gaps that the larger tensor leaves.
        """
        if self.strides is not None:
            extent = max(d * s for d, s in zip(self.shape, self.strides, strict=True))
            flat = torch.empty(extent, dtype=getattr(torch, self.dtype), device=device)
            return flat.as_strided(self.shape, self.strides)
        return torch.empty(
            self.shape,
            dtype=getattr(torch, self.dtype),
            device=device,
            memory_format=memory_format(self.format, len(self.shape)),
        )

    def has(self, format: Format) -> bool:
        """Whether the format is this one, or the bytes are the same: one channel, or one pixel."""
        one = len(self.shape) == 4 and (self.shape[1] == 1 or self.shape[2:] == (1, 1))
        return self.format == format or (one and self.format != "strided")

    @property
    def dense_strides(self) -> tuple[int, ...]:
        """The strides that shape and format give a dense tensor; ``strided`` counts as contiguous.

        >>> TensorMeta(shape=(2, 3, 4, 5), dtype="float32", format="channels_last").dense_strides
        (60, 1, 15, 3)
        """
        axes = list(range(len(self.shape)))
        if self.format == "channels_last":
            axes.append(axes.pop(1))
        strides, step = [0] * len(axes), 1
        for axis in reversed(axes):
            strides[axis] = step
            step *= self.shape[axis]
        return tuple(strides)

    def part(self, axis: int, size: int) -> TensorMeta:
        """A slice of this dense tensor: ``size`` places of one axis; dense itself where it can be.

        >>> TensorMeta(shape=(2, 8, 4, 4), dtype="float32", format="channels_last").part(1, 3)
        TensorMeta(shape=(2, 3, 4, 4), dtype='float32', format='strided', strides=(128, 1, 32, 8))
        """
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        dense = TensorMeta(shape=shape, dtype=self.dtype, format=self.format)
        strides = self.dense_strides
        if all(
            d == 1 or one == other
            for d, one, other in zip(shape, strides, dense.dense_strides, strict=True)
        ):
            return dense
        return TensorMeta(shape=shape, dtype=self.dtype, format="strided", strides=strides)

    @property
    def extent(self) -> int:
        """Bytes from the first number to the end of the last, through gaps of a larger tensor."""
        steps = zip(self.shape, self.strides or self.dense_strides, strict=True)
        return (sum((size - 1) * step for size, step in steps) + 1) * self.itemsize

    @property
    def pixel_pitch(self) -> int | None:
        """Elements from a pixel of [N, C, H, W] to the next, where each has its channels together.

        C for channels_last, more for a slice of its channels, None for any other order.
        """
        if self.has("channels_last"):
            return self.shape[1]
        if self.strides is None or len(self.shape) != 4:
            return None
        pitch = self.strides[3]
        height, width = self.shape[2:]
        in_order = (height * width * pitch, 1, width * pitch, pitch)
        return pitch if self.strides == in_order else None

    def matches(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is what this says, its strides included."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != getattr(torch, self.dtype):
            return False
        if self.strides is not None:
            pairs = zip(self.shape, tensor.stride(), self.strides, strict=True)
            return all(size == 1 or seen == told for size, seen, told in pairs)
        return self.format == "strided" or tensor.is_contiguous(
            memory_format=memory_format(self.format, tensor.dim())
        )


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """What a tensor is; a format only if its strides say so."""
    format: Format = "strided"
    if tensor.is_contiguous():
        format = "contiguous"
    elif tensor.dim() in (4, 5) and tensor.is_contiguous(
        memory_format=memory_format("channels_last", tensor.dim())
    ):
        format = "channels_last"
    return TensorMeta(
        shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), format=format
    )


MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "strided": torch.contiguous_format,
}


def memory_format(format: Format, axes: int) -> torch.memory_format:
    """torch's name for a format of a tensor with so many axes."""
    if format == "channels_last" and axes == 5:
        return torch.channels_last_3d
    return MEMORY_FORMATS[format]


# What an attribute is where a problem leaves it out.
DEFAULTS: dict[str, Any] = {
    "activation": None,
    "alpha": 1.0,
    "beta": 1.0,
    "gamma": 1.0,
    "transpose_a": False,
    "transpose_b": False,
    "fast_accumulation": False,
    "sparsity": None,
    "non_negative": False,
}
# Attributes that say something about the constants, or that no input is below zero, and change no
# result: nobody has to heed them.
HINTS = ("sparsity", "non_negative")


def is_gamma(number: Any) -> bool:
    """Whether it can be ``gamma``: above zero, and a normal number in float32, as kernels take it.

    Plans come from strangers: this is asked of whatever JSON holds.
    """
    if not isinstance(number, int | float) or isinstance(number, bool):
        return False
    limits = torch.finfo(torch.float32)
    return bool(limits.tiny <= number <= limits.max)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One operation on concrete shapes.

    Attributes:
        op: the operation's name, for example ``conv2d``.
        inputs: in the operation's order; None where an optional one is left out.
        outputs: what comes out.
        attrs: the operation's attributes, JSON values.
        constant: positions of the inputs that are known when the plan is built (weights).
        in_place: positions of the inputs that lie in the output already: parts of a ``cat`` that
            were written where it wants them.
        dying: positions of inputs that nothing needs afterwards, so that a kernel may take their
            memory for its result.
        math: ``ieee`` or ``tf32``: how float32 products may be rounded.
    """

    op: str
    inputs: tuple[TensorMeta | None, ...]
    outputs: tuple[TensorMeta, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    constant: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()
    dying: tuple[int, ...] = ()
    math: Math = "ieee"

    def __post_init__(self) -> None:
        if self.math not in get_args(Math):
            raise UsageError(
                "float32 products are rounded in one of two ways",
                seen=self.math,
                fix=f"use math={' or '.join(get_args(Math))}",
            )

    def meta(self, position: int) -> TensorMeta | None:
        """The input at ``position``; None where it is left out."""
        return self.inputs[position] if position < len(self.inputs) else None

    def attr(self, name: str) -> Any:
        """An attribute, or what it is where the problem does not say (``DEFAULTS``)."""
        return self.attrs.get(name, DEFAULTS.get(name))

    @property
    def gamma(self) -> float | None:
        """The factor behind the activation as device code takes it: None where it is 1."""
        gamma = float(self.attr("gamma"))
        return None if gamma == 1 else gamma

    @property
    def plain(self) -> str | None:
        """None if the product is only added to (bias, residual) and activated; else what more."""
        factors = (self.attr("alpha"), self.attr("beta"), self.attr("gamma"))
        if self.meta(4) is not None or factors != (1, 1, 1):
            return "no scale, alpha, beta or gamma"
        if self.inputs[0].dtype != self.output.dtype:
            return f"makes {self.inputs[0].dtype}, not {self.output.dtype}"
        return None

    def require_constants(self, constants: Mapping[int, torch.Tensor]) -> None:
        """Refuse constants that are not what the problem says: machine code reads by addresses.

        Raises:
            KernelError: one is missing, or of another shape or element type.
        """
        for position in self.constant:
            meta, given = self.meta(position), constants.get(position)
            if given is None or meta is None or not meta.matches(given):
                seen = "none" if given is None else f"{given.dtype} {tuple(given.shape)}"
                raise KernelError(
                    f"constant {position} of {self.op} is not what the step says",
                    seen=f"{seen}, not {meta}",
                    fix="build the plan again",
                )

    def operands(
        self, constants: Mapping[int, torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """All operands by position: the constants, and the other inputs in order."""
        rest = iter(inputs)
        return [
            constants[i] if i in constants else None if meta is None else next(rest)
            for i, meta in enumerate(self.inputs)
        ]

    @property
    def output(self) -> TensorMeta:
        """The only output."""
        (meta,) = self.outputs
        return meta

    @property
    def output_is_empty(self) -> bool:
        """Nothing to compute."""
        return 0 in self.output.shape

    @functools.cached_property
    def key(self) -> str:
        """Equal keys, equal problems: what the timing cache looks up."""
        return digest(self)
