"""The choice of a format for stored pictures, where the user has named none."""

from __future__ import annotations

import importlib
import logging
import math
from pathlib import Path

from tessella.core.preprocess import Preprocess, Store, Storing

DECODE_ONCE_BYTES = 256 << 20  # pixels of a split that a training keeps decoded
DRIVER = Path("/dev/nvidiactl")  # without it torch, which takes 1.1 s, is not asked

log = logging.getLogger(__name__)


def storing_of(store: Store, record: Preprocess, images: int) -> Storing:
    """How so many pictures are stored: as asked, or for ``auto`` by the GPU that is here.

    With 16 cores an H200 loads 6,596 PNG files a second, and trains on 8,926 JPEG files of 500×375.
    Pictures that a training keeps decoded are read once.
    """
    nbytes = images * math.prod((record.height, record.width, record.channels))
    if store != "auto" or record.volume is not None or nbytes <= DECODE_ONCE_BYTES:
        return store
    try:
        return "decoders" if _gpu_decodes(record) else "auto"
    except RuntimeError as error:  # other programs have the GPU's memory, or all of it
        log.info("whether the GPU decodes JPEG files is not known: %s", error)
        return "auto"


def _gpu_decodes(record: Preprocess) -> bool:
    """Whether a GPU is here that decodes JPEG files to the bits of the host."""
    if not DRIVER.exists():
        return False
    torch = importlib.import_module("torch")
    nvjpeg = importlib.import_module("tessella.device.nvjpeg")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return bool(nvjpeg.decodes_as_host(record, device))
