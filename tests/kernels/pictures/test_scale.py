"""Pictures cut, mirrored, flipped and normalized in one pass: what the host makes, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tessella.core.preprocess import Preprocess, normalize
from tessella.device.scaling import Scaling
from tessella.kernels.pictures.scale import OnePassScaling

CPU = torch.device("cpu")


@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_each_picture_is_cut_and_scaled_as_on_the_host(depth, channels):
    mean, std = (0.485, 0.456, 0.406, 0.5)[:channels], (0.229, 0.224, 0.225, 0.3)[:channels]
    record = Preprocess(
        height=9, width=11, channels=channels, crop=(5, 7), mean=mean, std=std, depth=depth
    )
    rng = np.random.default_rng(depth + channels)
    dtype = np.uint8 if depth == 8 else np.uint16
    pixels = rng.integers(0, 1 << depth, (6, 9, 11, channels), dtype)
    cuts = np.array(
        [(0, 0, 0, 0), (4, 4, 0, 0), (1, 2, 1, 0), (2, 1, 0, 1), (3, 3, 1, 1), (4, 0, 1, 1)]
    )
    parts = []
    for picture, (top, left, mirror, flip) in zip(pixels, cuts, strict=True):
        part = picture[top : top + 5, left : left + 7]
        parts.append(part[:: -1 if flip else 1, :: -1 if mirror else 1])
    made = OnePassScaling(record, CPU)(torch.from_numpy(pixels), torch.from_numpy(cuts))
    assert np.array_equal(made.numpy(), normalize(np.stack(parts), record))
    assert made.is_contiguous(memory_format=torch.channels_last)
    whole = OnePassScaling(record, CPU)(torch.from_numpy(pixels))
    assert torch.equal(whole, Scaling(record, CPU)(torch.from_numpy(pixels)))


def test_rows_longer_than_a_block_and_volumes():
    record = Preprocess(height=3, width=700, channels=3, mean=(0.4,), std=(0.2,))
    pixels = torch.arange(2 * 3 * 700 * 3).remainder(251).to(torch.uint8).view(2, 3, 700, 3)
    assert np.array_equal(
        OnePassScaling(record, CPU)(pixels).numpy(), normalize(pixels.numpy(), record)
    )
    volume = pixels.view(2, 3, 700, 3, 1)[..., :1]
    grey = Preprocess(height=3, width=700, channels=1, mean=(0.4,), std=(0.2,))
    assert OnePassScaling(grey, CPU)(volume).shape == (2, 1, 3, 700, 3)
