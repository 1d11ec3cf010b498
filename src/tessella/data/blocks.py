"""Where a training looks into a volume, and how it changes what it sees there.

The draws depend on seed, epoch and the volume's index alone, as those of pictures do.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tessella.artifacts.run import Augment
from tessella.core.errors import DataError
from tessella.core.pictures import Pixels
from tessella.core.preprocess import Preprocess, full_scale
from tessella.core.volumes import array_in
from tessella.data.augment import IMAGE_STREAM, generator
from tessella.tasks import Block

FOREGROUND = 1 / 3  # of the blocks are laid around a voxel of a class but the first, as nnU-Net's


class Located(Protocol):
    """The targets of a task of volumes."""

    def shape(self, index: int) -> tuple[int, ...]: ...

    def places(self, index: int) -> list[list[int]]:
        """Some voxels of each class of a volume that is not the first, by their number in it."""
        ...


def seen_block(
    content: memoryview, targets: Located, index: int, record: Preprocess,
    changes: Augment | None, drawn_from: tuple[int, int],
) -> tuple[Pixels, Block]:  # fmt: skip
    """What an epoch sees of a volume, [D, H, W, C] of the record's size, and where that lies.

    Args:
        content: the stored volume, of which only the block is read.
        changes: None: where it looks is drawn, but nothing is changed.
    """
    rng = generator(*drawn_from, IMAGE_STREAM, index)
    block = drawn_block(targets, index, record.sides, changes, rng)
    seen = block.of(stored_volume(content, targets, index), outside=0)
    return (seen if changes is None else recolored(seen, changes, rng)), block


def stored_volume(content: memoryview, targets: Located, index: int) -> Pixels:
    """A stored volume, mapped, whose labels have its size.

    Raises:
        DataError: they have not.
    """
    volume: Pixels = array_in(content, "uint16")
    if volume.shape != (*targets.shape(index), 1):
        raise DataError(
            f"volume {index} and its labels differ in size",
            seen=f"{volume.shape[:3]} and {targets.shape(index)}",
            fix="import the dataset again",
        )
    return volume


def drawn_block(
    targets: Located,
    index: int,
    sides: tuple[int, ...],
    changes: Augment | None,
    rng: np.random.Generator,
) -> Block:
    """The block of a volume that an epoch shows: a third lie around a thing, each class alike."""
    shape = targets.shape(index)
    spare = [n - side for n, side in zip(shape, sides, strict=True)]
    first = [int(rng.integers(max(0, s) + 1)) for s in spare]
    places = targets.places(index) if rng.random() < FOREGROUND else []
    if places:
        of_class = places[int(rng.integers(len(places)))]
        voxel = np.unravel_index(of_class[int(rng.integers(len(of_class)))], shape)
        first = [
            min(max(0, int(v) - side // 2), max(0, s))
            for v, side, s in zip(voxel, sides, spare, strict=True)
        ]
    # a volume that is smaller lies in the middle
    first = [f if s >= 0 else s // 2 for f, s in zip(first, spare, strict=True)]
    turned = rng.random(3) < 0.5
    wanted = (False,) * 3
    if changes is not None:
        wanted = (changes.flip_vertical, changes.flip_vertical, changes.flip)
    mirrored = tuple(axis for axis in range(3) if wanted[axis] and turned[axis])
    return Block(first=tuple(first), sides=sides, mirrored=mirrored)


def recolored(pixels: Pixels, changes: Augment, rng: np.random.Generator) -> Pixels:
    """A block with other intensities: brightness and contrast times 1 − color to 1 + color, and
    noise."""
    if not (changes.color or changes.noise):
        return pixels
    most = full_scale(16)
    changed = pixels.astype(np.float32)
    if changes.color:
        brightness, contrast = rng.uniform(1 - changes.color, 1 + changes.color, 2)
        changed *= np.float32(brightness)
        middle = np.float32(changed.mean(dtype=np.float64))
        changed = middle + (changed - middle) * np.float32(contrast)
    if changes.noise:
        changed += np.float32(changes.noise * most) * rng.standard_normal(changed.shape, np.float32)
    made: Pixels = np.rint(changed.clip(0, most)).astype(np.uint16)
    return made
