"""The rows in which a split's answers are kept: detection's six numbers, and a mask behind each.

Imports no torch: the studio reads them without.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tessella.tasks.detection.errors import FIELDS
from tessella.tasks.instances.cells import CELLS, PART, SIDE, runs_of
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
    cells = _steps(rows_DW) / np.float32(LEVELS)
    return runs_of(cells, boxes_of(rows_DW, size), size)


def boxes_of(rows_DW: Rows, size: tuple[int, int]) -> npt.NDArray[np.float64]:
    """The boxes of told things, in pixels of what the network sees."""
    height, width = size
    return rows_DW[:, :4].astype(np.float64) * [width, height, width, height]


def is_part(rows_DW: Rows) -> npt.NDArray[np.bool_]:
    """Which cells of told things are ``PART`` or more, [D, SIDE, SIDE]."""
    return _steps(rows_DW) >= math.ceil(PART * LEVELS)


def _steps(rows_DW: Rows) -> npt.NDArray[np.uint8]:
    """The cells of told things, [D, SIDE, SIDE], in steps of a 255th."""
    numbers = rows_DW[:, FIELDS:].astype("<i4")
    threes = numbers.view(np.uint8).reshape(-1, PACKED, 4)[:, :, :TOGETHER]
    return threes.reshape(-1, PACKED * TOGETHER)[:, :CELLS].reshape(-1, SIDE, SIDE)


def size_of(targets: MaskSets, image: int) -> tuple[int, int]:
    """Height and width of what the network sees of an image."""
    height, width = targets.views[image, 2:].tolist()
    return height, width
