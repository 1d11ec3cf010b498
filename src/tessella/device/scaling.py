"""The last stages of a preprocessing record, on the device where the network runs."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from tessella.core.preprocess import Preprocess, gain_and_offset


def has_one_pass() -> bool:
    """Whether a GPU scales in one pass, by a kernel, which can change pictures before."""
    return importlib.util.find_spec("triton") is not None


class Scaling:
    """``core.preprocess.normalize`` on a device, to the bit.

    Calling it makes float32 [N, C, H, W], whose channels are last in memory, of uint8 or uint16
    [N, H, W, C], or of volumes [N, C, D, H, W] of [N, D, H, W, C]; and where pictures are still to
    be cut, of int64 [N, 4]: top, left, mirror and flip.
    """

    def __init__(self, record: Preprocess, device: torch.device) -> None:
        gain, offset = gain_and_offset(record)
        self._sides = record.crop or (record.height, record.width)
        # here and not at each call: a copy from ordinary memory waits for the GPU
        self._gain = torch.from_numpy(gain).to(device)
        self._offset = torch.from_numpy(offset).to(device)

    def __call__(self, pixels: Tensor, cuts: Tensor | None = None) -> Tensor:
        if cuts is not None:
            pixels = self._cut(pixels, cuts)
        # two operations: one that multiplies and adds would round once
        return pixels.float().mul_(self._gain).add_(self._offset).movedim(-1, 1)

    def _cut(self, pixels: Tensor, cuts: Tensor) -> Tensor:
        """The part of each image that its cut names, mirrored and flipped, [N, h, w, C]."""
        top, left, mirror, flip = cuts.unbind(1)
        rows = _places(top, self._sides[0], flip)
        columns = _places(left, self._sides[1], mirror)
        images = torch.arange(len(pixels), device=pixels.device)
        places = images[:, None, None], rows[:, :, None], columns[:, None, :]
        if pixels.dtype == torch.uint16:  # which torch does not index on a GPU
            return pixels.view(torch.int16)[places].view(torch.uint16)
        return pixels[places]


def _places(first: Tensor, count: int, reversed_: Tensor) -> Tensor:
    """Row or column numbers [N, count] from ``first`` on, or backwards to it."""
    steps = torch.arange(count, device=first.device)
    return first[:, None] + torch.where(reversed_[:, None].bool(), count - 1 - steps, steps)
