"""The rows in which a split's answers are kept: detection's six numbers, and a mask behind each.

Imports no torch: the studio reads them without.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tessella.annotations import rle
from tessella.tasks.detection.errors import FIELDS
from tessella.tasks.instances.cells import CELLS, SIDE, counts_of
from tessella.tasks.instances.examples import MaskSets
from tessella.tasks.task import Rows

LEVELS = 255  # of a cell in a row: as many as fit into eight bits
TOGETHER = 3  # cells in a float32, which has 24 bits of whole numbers
PACKED = -(-CELLS // TOGETHER)
WIDTH = FIELDS + PACKED  # numbers of a told thing


def things_of(rows_NR: Rows) -> Rows:
    """The rows by their told things, [N, D, WIDTH]."""
    return rows_NR.reshape(len(rows_NR), -1, WIDTH)


def drawn(row: Rows, size: tuple[int, int]) -> bytes:
    """The compressed run lengths of a told thing's mask, in what the network sees.

    Args:
        row: ``WIDTH`` numbers.
        size: height and width of what the network sees.
    """
    height, width = size
    box = row[:4].astype(np.float64) * [width, height, width, height]
    return rle.compressed(counts_of(_unpacked(row[FIELDS:]), box.tolist(), size))


def _unpacked(numbers: Rows) -> npt.NDArray[np.float32]:
    """The cells [SIDE, SIDE] of a row's numbers."""
    whole = numbers.astype(np.int64)
    threes = np.stack([whole & 255, whole >> 8 & 255, whole >> 16 & 255], axis=-1)
    cells = threes.reshape(-1)[:CELLS].reshape(SIDE, SIDE) / LEVELS
    return np.asarray(cells, np.float32)


def size_of(targets: MaskSets, image: int) -> tuple[int, int]:
    """Height and width of what the network sees of an image."""
    height, width = targets.views[image, 2:].tolist()
    return height, width


def run_lengths(counts: bytes, size: tuple[int, int]) -> dict[str, Any]:
    """A mask as COCO has it."""
    return {"size": list(size), "counts": counts}
