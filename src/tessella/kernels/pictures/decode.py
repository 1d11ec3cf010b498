"""JPEG files to the pixels of a preprocessing record, on a GPU and to the bit as on the host."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tessella.core import preprocess
from tessella.core.errors import KernelError
from tessella.core.jpeg import Frame
from tessella.core.preprocess import Preprocess
from tessella.device.nvjpeg import JpegDecoder
from tessella.kernels.pictures.fit import fitted

# decoded at a time: planes and pixels take 5.5 bytes each, so 370 MB
MOST_PIXELS = 1 << 26


class PictureDecoder:
    """Decodes and fits batches of JPEG files, in the current stream; for one thread.

    Args:
        hardware: see ``JpegDecoder``.
        host: whether the host decodes a batch in which the GPU finds a damaged file; else that is a
            ``KernelError``.
    """

    def __init__(
        self,
        record: Preprocess,
        device: torch.device,
        *,
        hardware: bool = True,
        host: bool = True,
    ) -> None:
        self._record, self._device, self._host = record, device, host
        self._decoder = JpegDecoder(device, hardware=hardware)

    def __call__(self, files: Sequence[bytes | memoryview], frames: Sequence[Frame]) -> Tensor:
        """Pixels, uint8 [N, H, W, C] of the record's size.

        Raises:
            DataError: the host cannot decode a file, either.
        """
        parts = [self._some(files[few], frames[few]) for few in few(frames)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _some(self, files: Sequence[bytes | memoryview], frames: Sequence[Frame]) -> Tensor:
        try:
            return fitted(self._decoder(files, frames), frames, self._record)
        except KernelError as error:
            if not self._host:
                raise
            # libjpeg goes on where a file is damaged; which, is not told
            warnings.warn(f"the host decodes {len(files)} JPEG files: {error}", stacklevel=2)
            made = np.stack([preprocess.fitted(bytes(content), self._record) for content in files])
            return torch.from_numpy(made).to(self._device)


def few(frames: Sequence[Frame]) -> Iterator[slice]:
    """Cuts a batch where its pictures together have ``MOST_PIXELS``."""
    first, pixels = 0, 0
    for place, frame in enumerate(frames):
        pixels += frame.height * frame.width
        if pixels > MOST_PIXELS and place > first:
            yield slice(first, place)
            first, pixels = place, frame.height * frame.width
    yield slice(first, len(frames))
