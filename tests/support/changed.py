"""Pictures changed by the kernel of a GPU, beside the host's own."""

from __future__ import annotations

import numpy as np
import torch

from tessella.artifacts.run import Augment
from tessella.core.preprocess import Preprocess, full_scale, normalize
from tessella.data.augment import applied
from tessella.data.changes import Drawn
from tessella.kernels.pictures.scale import OnePassScaling

ALL = Augment(
    flip=True, flip_vertical=True, rotation=180, scale=0.4, color=0.4, hue=0.3, noise=0.05
)
CASES = {
    "turned": (Augment(rotation=30, scale=0.3), 3, 8),
    "coloured": (Augment(color=0.5, flip=True), 3, 8),
    "hue": (Augment(hue=0.5), 3, 8),
    "noise": (Augment(noise=0.2), 3, 8),
    "all": (ALL, 3, 8),
    "all of grey": (ALL, 1, 8),
    "all of four channels and 16 bits": (ALL, 4, 16),
}


def off_the_host(name: str, device: torch.device, count: int = 4) -> float:
    """The share of numbers that differ from the host's: where a turned one lies near a half, by a
    step, which contrast and brightness may make two; of 16 bits by as many as a place is off."""
    settings, channels, depth = CASES[name]
    record = Preprocess(
        height=23, width=31, channels=channels, depth=depth, crop=(16, 21), mean=(0.4,), std=(0.3,)
    )
    dtype = np.uint8 if depth == 8 else np.uint16
    pixels = np.random.default_rng(0).integers(0, 1 << depth, (count, 23, 31, channels), dtype)
    drawn = Drawn(settings, record, (7, 3), np.arange(count))
    wanted = [applied(p, c, settings, record) for p, c in zip(pixels, drawn.each, strict=True)]
    words, *_ = drawn.numbers()
    there, cuts = (torch.from_numpy(t).to(device) for t in (pixels, drawn.array_N4))
    made = OnePassScaling(record, device).changed(there, cuts, words.to(device), settings)
    assert made.is_contiguous(memory_format=torch.channels_last)
    steps = (made.cpu().numpy() - normalize(np.stack(wanted), record)) * 0.3 * full_scale(depth)
    assert np.abs(steps).max() < (2.5 if depth == 8 else 8)
    return float((np.abs(steps) > 0.5).mean())


def most_off(name: str) -> float:
    """The share of numbers that may differ."""
    return 0.002 if CASES[name][2] == 8 else 0.02
