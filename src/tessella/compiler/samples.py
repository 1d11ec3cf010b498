"""What a calibration looks at: some images of a split, as the network gets them."""

from __future__ import annotations

from itertools import islice

import torch

from tessella.artifacts.dataset import Split
from tessella.compiler.calibration import Tensors
from tessella.core.preprocess import Preprocess
from tessella.data.loading import batches

COUNT = 512  # NVIDIA's reference for ImageNet takes 500
BATCH_SIZE = 32


def of_split(
    split: Split,
    record: Preprocess,
    name: str,
    *,
    device: torch.device,
    count: int = COUNT,
) -> list[Tensors]:
    """About ``count`` images, drawn evenly whatever their order, in batches, as input ``name``."""
    size = min(BATCH_SIZE, len(split))
    limit = max(1, min(count, len(split)) // size)
    drawn = batches(split, record, batch_size=size, augment=None, training=True)
    return [{name: batch.images.to(device)} for batch in islice(drawn, limit)]
