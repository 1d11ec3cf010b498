"""The arena: one piece of memory; a program's buffers lie where the compiler placed them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tessella.artifacts.program import Buffer
from tessella.core.memory import empty_bytes


class Arena:
    """``nbytes`` of memory on a device; all buckets of an engine share it, one runs at a time."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._bytes = empty_bytes(nbytes, device)

    def view(self, buffer: Buffer, buffers: Mapping[str, Buffer]) -> torch.Tensor | None:
        """The buffer as a tensor of its shape and format; None if it does not lie in the arena."""
        if buffer.slice is not None:
            whole = self.view(buffers[buffer.slice.of], buffers)
            axis, start = buffer.slice.axis, buffer.slice.start
            return None if whole is None else whole.narrow(axis, start, buffer.shape[axis])
        if buffer.offset is None:
            return None
        nbytes = math.prod(buffer.shape) * getattr(torch, buffer.dtype).itemsize
        flat = self._bytes[buffer.offset : buffer.offset + nbytes].view(
            getattr(torch, buffer.dtype)
        )
        if buffer.format == "channels_last":
            n, c, *sizes = buffer.shape
            return flat.view(n, *sizes, c).movedim(-1, 1)
        return flat.view(buffer.shape)
