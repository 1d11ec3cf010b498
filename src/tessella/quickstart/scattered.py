"""Pictures to detect things in, without a download: handwritten digits scattered on textures.

The digits are real (scikit-learn's 1,797 of 8 × 8 pixels), the textures are drawn. Pictures for
validation have digits that no picture for training has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from tessella.annotations import rle
from tessella.core.preprocess import encode

HELD_OUT = 397  # digits that validation draws from
INK = 5  # of 16: a pixel with more belongs to the digit, for its box and its mask
TRIES = 20  # for a place that no other digit covers
MOST_COVERED = 0.1  # of a digit's box

Colors = npt.NDArray[np.float64]
Placed = tuple[int, list[int], npt.NDArray[np.bool_]]  # digit; x, y, width, height; its pixels


def write_scattered(
    folder: Path,
    *,
    count: int,
    val: int,
    size: int = 96,
    most: int = 4,
    sides: tuple[int, int] = (16, 32),
    digits: Sequence[int] = range(10),
    seed: int = 0,
) -> tuple[Path, Path]:
    """Write pictures as PNGs, and two COCO files: of ``count`` to train on, of ``val`` to validate.

    Each digit has its box and, in run lengths, its mask.

    Args:
        size: height and width of a picture.
        most: digits in a picture, at most; at least one.
        sides: the least and the largest side that a digit is drawn with, all its 8 pixels.
        digits: which of the ten occur.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(seed).permutation(len(found.images))
    wanted = np.isin(found.target[order], list(digits))
    parts = {"train": slice(HELD_OUT, None), "val": slice(HELD_OUT)}
    pools = {split: order[part][wanted[part]] for split, part in parts.items()}
    (folder / "images").mkdir(parents=True)
    paths = []
    for number, (split, pool) in enumerate(pools.items()):
        rng = np.random.default_rng((seed, number))
        images: list[dict[str, Any]] = []
        things: list[dict[str, Any]] = []
        for i in range(count if split == "train" else val):
            pixels, placed = _picture(rng, found.images, pool, size, most, sides)
            name = f"images/{split}-{i:04d}.png"
            (folder / name).write_bytes(encode(pixels))
            images.append({"id": i, "file_name": name, "height": size, "width": size})
            for digit, box, mask in placed:
                counts = rle.compressed(rle.counts_of(mask)).decode()
                things.append({"id": len(things) + 1, "image_id": i,
                               "category_id": int(found.target[digit]), "iscrowd": 0,
                               "bbox": box, "area": int(mask.sum()),
                               "segmentation": {"size": [size, size], "counts": counts},
                               })  # fmt: skip
        categories = [{"id": k, "name": str(k)} for k in digits]
        plain = {"images": images, "annotations": things, "categories": categories}
        paths.append(folder / f"{split}.json")
        paths[-1].write_text(json.dumps(plain))
    return paths[0], paths[1]


def _picture(
    rng: np.random.Generator,
    digits: npt.NDArray[np.float64],
    pool: npt.NDArray[np.int64],
    size: int,
    most: int,
    sides: tuple[int, int],
) -> tuple[npt.NDArray[np.uint8], list[Placed]]:
    """A picture, and the digits in it with their boxes and masks; later ones lie over earlier."""
    pixels = _texture(rng, size)
    placed: list[Placed] = []
    taken = np.zeros((size, size), bool)
    for digit in rng.choice(pool, rng.integers(1, most + 1), replace=False).tolist():
        side = int(rng.integers(sides[0], sides[1] + 1))
        ink = cv2.resize(digits[digit] / 16, (side, side), interpolation=cv2.INTER_LINEAR)
        rows, columns = (np.flatnonzero((ink > INK / 16).any(axis)) for axis in (1, 0))
        for _ in range(TRIES):
            top, left = rng.integers(0, size - side + 1, 2).tolist()
            y, x = top + int(rows[0]), left + int(columns[0])
            h, w = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
            if taken[y : y + h, x : x + w].mean() <= MOST_COVERED:
                taken[y : y + h, x : x + w] = True
                part = pixels[top : top + side, left : left + side]
                part += ink[:, :, None] * (_color(rng, part.mean(axis=(0, 1))) - part)
                mask = np.zeros((size, size), bool)
                mask[top : top + side, left : left + side] = ink > INK / 16
                placed.append((digit, [x, y, w, h], mask))
                break
    return np.rint(pixels.clip(0, 255)).astype(np.uint8), placed


def _texture(rng: np.random.Generator, size: int) -> Colors:
    """Waves, blots or grain in two colors, [size, size, 3]."""
    y, x = np.mgrid[:size, :size] / size
    kind = rng.integers(3)
    if kind == 0:
        angle, waves = rng.uniform(0, np.pi), rng.uniform(2, 12)
        turned = x * np.cos(angle) + y * np.sin(angle)
        level = np.sin(2 * np.pi * waves * turned + rng.uniform(0, 6))
    else:
        coarse = rng.normal(size=(int(rng.integers(3, 24)),) * 2)
        level = cv2.resize(coarse, (size, size), interpolation=cv2.INTER_CUBIC)
        if kind == 2:
            level = level + rng.normal(size=(size, size)) * 0.7
    share = (level - level.min()) / (np.ptp(level) + 1e-9)
    one, other = rng.uniform(20, 235, (2, 3))
    other = one + (other - one) * 0.45  # a digit has to stand out of both
    return np.asarray(one + share[:, :, None] * (other - one))


def _color(rng: np.random.Generator, ground: Colors) -> Colors:
    """A color far from what it is drawn on."""
    colors = rng.uniform(0, 255, (12, 3))
    return np.asarray(colors[np.abs(colors - ground).sum(axis=1).argmax()])
