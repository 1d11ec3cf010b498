"""What a tensor must look like at the edge of a network: name, element type, shape with ranges."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessella.core.dtype import dtype
from tessella.core.errors import InputError, UsageError


@dataclass(frozen=True, kw_only=True)
class DimRange:
    """A dimension that may vary: the smallest, the usual (tuned for) and the largest size."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.opt <= self.max:
            raise UsageError(
                "a shape range must satisfy 1 ≤ min ≤ opt ≤ max",
                seen=f"min={self.min}, opt={self.opt}, max={self.max}",
                fix="give three increasing sizes, for example batch=(1, 8, 32)",
            )

    def __contains__(self, size: int) -> bool:
        return self.min <= size <= self.max

    def __str__(self) -> str:
        return str(self.min) if self.min == self.max else f"{self.min}..{self.opt}..{self.max}"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, element type and shape of one input or output. Dimension 0 is the batch."""

    name: str
    dtype: str
    shape: tuple[int | DimRange, ...]

    def __post_init__(self) -> None:
        dtype(self.dtype)
        if any(isinstance(d, int) and d < 0 for d in self.shape):
            raise UsageError("a dimension cannot be negative", seen=self.shape)

    @property
    def batch(self) -> DimRange:
        """The range of dimension 0 (a fixed size is a range of one)."""
        first = self.shape[0]
        return first if isinstance(first, DimRange) else DimRange(min=first, opt=first, max=first)

    def at(self, batch: int) -> tuple[int, ...]:
        """The concrete shape for one batch size."""
        return (batch, *(d if isinstance(d, int) else d.opt for d in self.shape[1:]))

    def nbytes(self, batch: int) -> int:
        return math.prod(self.at(batch)) * dtype(self.dtype).itemsize

    def check(self, *, shape: tuple[int, ...], dtype: str) -> None:
        """Raise ``InputError`` unless a tensor of this shape and element type fits.

        Any batch fits, as engines pad and split it; every other size must be right.
        """
        if dtype != self.dtype:
            raise InputError(
                f"input {self.name!r} has the wrong element type",
                seen=dtype,
                fix=f"send {self.dtype}",
            )
        fits = len(shape) == len(self.shape) and all(
            axis == 0 or (have == want if isinstance(want, int) else have in want)
            for axis, (have, want) in enumerate(zip(shape, self.shape, strict=True))
        )
        if not fits or 0 in shape:
            raise InputError(
                f"input {self.name!r} has the wrong shape",
                seen=list(shape),
                fix=f"send {self}",
            )

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(str(d) for d in self.shape)}]"
