"""The arena: one piece of memory; a program's buffers lie where the compiler placed them."""

from __future__ import annotations

import math

import torch

from tessella.artifacts.plan import Buffer


class Arena:
    """``nbytes`` of memory on a device; all buckets of an engine share it, one runs at a time."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def view(self, buffer: Buffer) -> torch.Tensor:
        """The buffer as a tensor of its shape and format; its offset must not be None."""
        nbytes = math.prod(buffer.shape) * getattr(torch, buffer.dtype).itemsize
        flat = self._bytes[buffer.offset : buffer.offset + nbytes].view(
            getattr(torch, buffer.dtype)
        )
        if buffer.format == "channels_last":
            n, c, h, w = buffer.shape
            return flat.view(n, h, w, c).permute(0, 3, 1, 2)
        return flat.view(buffer.shape)
