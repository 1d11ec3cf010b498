"""The rows in which a split's answers are kept: detection's six numbers, and a mask behind each.

Imports no torch: the studio reads them without.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tessella.tasks.detection.errors import FIELDS
from tessella.tasks.instances.cells import CELLS, SIDE, runs_of
from tessella.tasks.instances.examples import MaskSets
from tessella.tasks.instances.runs import Runs
from tessella.tasks.task import Rows

LEVELS = 255  # of a cell in a row: as many as fit into eight bits
TOGETHER = 3  # cells in a float32, which has 24 bits of whole numbers
PACKED = -(-CELLS // TOGETHER)
WIDTH = FIELDS + PACKED  # numbers of a told thing


def things_of(rows_NR: Rows) -> Rows:
    """The rows by their told things, [N, D, WIDTH]."""
    return rows_NR.reshape(len(rows_NR), -1, WIDTH)


def drawn(rows_DW: Rows, size: tuple[int, int]) -> Runs:
    """The masks of told things, in what the network sees.

    Args:
        rows_DW: ``WIDTH`` numbers each.
        size: height and width of what the network sees.
    """
    height, width = size
    boxes = rows_DW[:, :4].astype(np.float64) * [width, height, width, height]
    return runs_of(_unpacked(rows_DW[:, FIELDS:]), boxes, size)


def _unpacked(numbers: Rows) -> npt.NDArray[np.float32]:
    """The cells [D, SIDE, SIDE] of rows' numbers."""
    whole = numbers.astype(np.int32)
    threes = np.stack([whole & 255, whole >> 8 & 255, whole >> 16 & 255], axis=-1)
    cells = threes.reshape(-1, TOGETHER * PACKED)[:, :CELLS].reshape(-1, SIDE, SIDE) / LEVELS
    return np.asarray(cells, np.float32)


def size_of(targets: MaskSets, image: int) -> tuple[int, int]:
    """Height and width of what the network sees of an image."""
    height, width = targets.views[image, 2:].tolist()
    return height, width
