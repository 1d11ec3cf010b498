"""The description of a tensor: shape, element type and memory format, without its numbers."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch

from tessella.core.dtype import dtype_name

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
        axes = len(self.shape)
        one = axes in (4, 5) and (self.shape[1] == 1 or self.shape[2:] == (1,) * (axes - 2))
        return self.format == format or (one and self.format != "strided")

    @functools.cached_property
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

    @functools.cached_property
    def extent(self) -> int:
        """Bytes from the first number to the end of the last, through gaps of a larger tensor."""
        steps = zip(self.shape, self.strides or self.dense_strides, strict=True)
        return (sum((size - 1) * step for size, step in steps) + 1) * self.itemsize

    @property
    def pixel_pitch(self) -> int | None:
        """Elements from a pixel of [N, C, (D,) H, W] to the next, where each has its channels
        together.

        C for channels_last, more for a slice of its channels, None for any other order.
        """
        if self.has("channels_last"):
            return self.shape[1]
        if self.strides is None or len(self.shape) not in (4, 5):
            return None
        pitch = self.strides[-1]
        shape = (self.shape[0], pitch, *self.shape[2:])
        whole = TensorMeta(shape=shape, dtype=self.dtype, format="channels_last")
        return pitch if self.strides == whole.dense_strides else None

    def matches(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this shape, element type and memory format."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != getattr(torch, self.dtype):
            return False
        if self.strides is not None:
            pairs = zip(self.shape, tensor.stride(), self.strides, strict=True)
            return all(size == 1 or seen == told for size, seen, told in pairs)
        return self.format == "strided" or tensor.is_contiguous(
            memory_format=memory_format(self.format, tensor.dim())
        )


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """The description of a tensor; its memory format is named only if its strides have one."""
    format: Format = "strided"
    if tensor.is_contiguous():
        format = "contiguous"
    elif tensor.dim() in (4, 5) and tensor.is_contiguous(
        memory_format=memory_format("channels_last", tensor.dim())
    ):
        format = "channels_last"
    return TensorMeta(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype), format=format)


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
