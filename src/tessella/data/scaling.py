"""The last stage of a preprocessing record, on the device where the network runs."""

from __future__ import annotations

import torch
from torch import Tensor

from tessella.core.preprocess import Preprocess, gain_and_offset


class Scaling:
    """``core.preprocess.normalize`` on a device, to the bit.

    Calling it makes float32 [N, C, H, W], whose channels are last in memory, of uint8 or uint16
    [N, H, W, C].
    """

    def __init__(self, record: Preprocess, device: torch.device) -> None:
        gain, offset = gain_and_offset(record)
        # here and not at each call: a copy from ordinary memory waits for the GPU
        self._gain = torch.from_numpy(gain).to(device)
        self._offset = torch.from_numpy(offset).to(device)

    def __call__(self, pixels: Tensor) -> Tensor:
        # two operations: one that multiplies and adds would round once
        return pixels.float().mul_(self._gain).add_(self._offset).permute(0, 3, 1, 2)
