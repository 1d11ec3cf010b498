"""Pictures to segment that are unlike the scattered digits: striped shapes on striped ground, with
masks as PNGs. Shapes lie beside and over each other."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from tessella.core.preprocess import encode

CLASSES = ("background", "disc", "bar", "triangle")
CORNERS = {2: np.array([-0.35, 0.35, 2.8, 3.5]), 3: np.array([0.0, 2.1, 4.2])}  # radians
MOST = 5  # shapes in a picture
GRAIN = 12.0  # of 255: what is drawn on top of all


def write_shapes(folder: Path, *, count: int, size: int = 96, seed: int = 0) -> Path:
    """``images``, ``masks`` and ``classes.txt``, as ``tasks.segmentation`` reads them."""
    rng = np.random.default_rng(seed)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    (folder / "classes.txt").write_text("\n".join(CLASSES))
    for number in range(count):
        pixels, mask = _picture(rng, size)
        (folder / "images" / f"{number:05d}.png").write_bytes(encode(pixels))
        (folder / "masks" / f"{number:05d}.png").write_bytes(encode(mask[:, :, None]))
    return folder


def _picture(
    rng: np.random.Generator, size: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    mask = np.zeros((size, size), np.uint8)
    pixels = _stripes(rng, size)
    for _ in range(int(rng.integers(1, MOST + 1))):
        label, own = int(rng.integers(1, len(CLASSES))), np.zeros((size, size), np.uint8)
        middle, side = rng.uniform(0.1, 0.9, 2) * size, rng.uniform(0.1, 0.25) * size
        if label == 1:
            cv2.circle(own, middle.astype(int).tolist(), int(side), 1, -1)
        else:
            angles = CORNERS[label] + rng.uniform(0, 2 * np.pi)
            around = middle + side * np.stack([np.cos(angles), np.sin(angles)], 1)
            cv2.fillPoly(own, [np.rint(around).astype(np.int32)], 1)
        mask[own > 0] = label
        pixels = np.where(own[:, :, None] > 0, _stripes(rng, size), pixels)
    pixels = pixels + rng.normal(0, GRAIN, pixels.shape)
    return np.rint(pixels.clip(0, 255)).astype(np.uint8), mask


def _stripes(rng: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
    """Waves between two greys, of a random direction and length, [size, size, 3]."""
    y, x = np.mgrid[:size, :size] / size
    angle, waves = rng.uniform(0, np.pi), rng.uniform(6, 20)
    level = np.sin(2 * np.pi * (waves * (x * np.cos(angle) + y * np.sin(angle)) + rng.random()))
    one, other = rng.uniform(40, 215, (2, 3))
    return np.asarray(one + (level[:, :, None] + 1) / 2 * (other - one))
