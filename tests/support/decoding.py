"""The host in the place of a GPU's decoder, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tessella.core.errors import KernelError
from tessella.core.preprocess import Preprocess
from tessella.server.decoding_process import DecodingProcess, run


class HostPlays(DecodingProcess):
    """As ``DecodingProcess``; who looks for a GPU is not asked."""

    module = __name__


def host_plays(
    record: Preprocess, device: torch.device, *, pixels: bool
) -> Callable[[Sequence[memoryview], Any, np.ndarray], None]:
    """As ``jpegs.gpu_decoder``; a file says by a word in it that it is damaged, or ends all."""

    def decode(files: Sequence[memoryview], frames: Any, into: np.ndarray) -> None:
        contents = [bytes(content) for content in files]
        if any(b"the end" in content for content in contents):
            os._exit(7)
        if any(b"damaged" in content for content in contents):
            raise KernelError("nvJPEG cannot decode a picture of this batch", seen="status 5")
        into[...] = np.stack([record(content) for content in contents])

    return decode


def main() -> None:
    run(json.loads(sys.argv[1]), host_plays)
