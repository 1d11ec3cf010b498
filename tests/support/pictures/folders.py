"""Small folders of pictures for the tests of this room."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from tessella.core.preprocess import encode


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


def write_stripes(folder: Path, *, images: int = 24) -> None:
    """Two classes that a small network tells apart at once: stripes lying and standing."""
    noise = np.random.default_rng(0)
    for name, axis in (("lying", 0), ("standing", 1)):
        for index in range(images):
            wave = 127 + 100 * np.sin(np.arange(16) * noise.uniform(1.2, 1.8) + noise.uniform(0, 6))
            image = np.expand_dims(wave, 1 - axis) + noise.normal(0, 8, (16, 16))
            path = folder / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(np.clip(image, 0, 255).astype(np.uint8)[:, :, None]))
