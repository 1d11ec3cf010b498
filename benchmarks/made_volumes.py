"""Volumes that a script makes: balls, ellipsoids and tubes in noise, with their labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]
Labels = npt.NDArray[np.uint8]

CLASSES = ("background", "ball", "ellipsoid", "tube")
BRIGHT = (0.0, 1.0, 1.6, 2.2)  # of each class, beside noise of deviation 0.35


def made_volume(side: int, rng: np.random.Generator) -> tuple[Floats, Labels]:
    """A volume float32 [side, side, side] with a thing of each kind, and its labels uint8.

    Each kind has a brightness of its own, which noise hides voxel by voxel.
    """
    labels = np.zeros((side,) * 3, np.uint8)
    grid = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).astype(np.float64)
    centres = _apart(side, rng)
    radius = side / rng.uniform(4.5, 5.5)
    labels[((grid - centres[0]) ** 2).sum(-1) < radius**2] = 1
    radii = side / rng.uniform([3, 6, 6], [3.5, 7, 7])
    labels[(((grid - centres[1]) / rng.permutation(radii)) ** 2).sum(-1) < 1] = 2
    axis = int(rng.integers(3))
    across = [a for a in range(3) if a != axis]
    away = ((grid - centres[2])[..., across] ** 2).sum(-1)
    labels[(away < (side / 9) ** 2) & (labels == 0)] = 3
    volume = np.array(BRIGHT)[labels] + rng.normal(0, 0.35, labels.shape)
    return volume.astype(np.float32), labels


def _apart(side: int, rng: np.random.Generator) -> Floats:
    """Three places that are not near each other."""
    while True:
        places = rng.uniform(side * 0.2, side * 0.8, (3, 3))
        gaps = [np.linalg.norm(places[a] - places[b]) for a, b in ((0, 1), (0, 2), (1, 2))]
        if min(gaps) > side * 0.4:
            return places


def write_volumes(folder: Path, *, count: int, side: int, seed: int = 0) -> Path:
    """A folder as MSD and nnU-Net have it, of .npy files."""
    rng = np.random.default_rng(seed)
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        volume, labels = made_volume(side, rng)
        np.save(folder / "imagesTr" / f"case{number:02d}_0000.npy", volume)
        np.save(folder / "labelsTr" / f"case{number:02d}.npy", labels)
    named = {name: number for number, name in enumerate(CLASSES)}
    (folder / "dataset.json").write_text(json.dumps({"labels": named}))
    return folder
