"""Small folders of pictures for the tests of this room."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def write_picture(path: Path, seed: int, *, size: tuple[int, int] = (8, 8)) -> None:
    """A picture of noise that only its seed decides."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    Image.fromarray(pixels).save(path)


def write_folder_of(root: Path, counts: dict[str, int], *, first_seed: int = 0) -> Path:
    """``counts`` pictures of each class, in subfolders of ``root``, all different."""
    seed = first_seed
    for name, count in counts.items():
        for number in range(count):
            write_picture(root / name / f"{number:03d}.png", seed)
            seed += 1
    return root
