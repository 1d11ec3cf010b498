"""Masks as cells of their boxes: made of pixels, and drawn into pixels again.

A cell is a share of the box's height and width, so that a mask has as many numbers however large
its thing is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tessella.annotations import rle

Floats = npt.NDArray[np.floating[Any]]
SIDE = 28  # cells along the side of a box that is told, as Mask R-CNN has it
CELLS = SIDE * SIDE
PART = 0.5  # from which a pixel is part of the thing
TIE = 1e-6  # pixels: what rounding may move a pixel that is just PART


def cells_of(mask: npt.NDArray[np.uint8], box: Sequence[float], side: int) -> Floats:
    """Which share of each cell of a box is the thing, [side, side]: exact, in parts of a pixel.

    Args:
        mask: [height, width], not 0 where the thing is.
        box: x0 y0 x1 y1 in its pixels, inside of it.
    """
    x0, y0, x1, y1 = box
    rows, columns = ((math.floor(a), math.ceil(b)) for a, b in ((y0, y1), (x0, x1)))
    part = mask[slice(*rows), slice(*columns)] != 0
    up, across = _shares(y0, y1, rows, side), _shares(x0, x1, columns, side)
    return np.asarray((up @ part.astype(np.float32) @ across.T).clip(0, 1), np.float32)


def _shares(low: float, high: float, pixels: tuple[int, int], side: int) -> Floats:
    """Which share of each cell lies in each pixel, [side, pixels]."""
    edges = low + (high - low) * np.arange(side + 1) / side
    begins = np.arange(*pixels)
    common = np.minimum(edges[1:, None], begins + 1) - np.maximum(edges[:-1, None], begins)
    return (common.clip(0) * (side / (high - low))).astype(np.float32)


def counts_of(cells: Floats, box: Sequence[float], size: tuple[int, int]) -> rle.Counts:
    """The run lengths of a mask of a height and width, of its cells [side, side] in a box.

    Between the middles of cells numbers change bilinearly; a pixel whose middle lies in the box is
    part of the thing where its number is ``PART`` or more.

    Args:
        box: x0 y0 x1 y1 in the mask's pixels; it may reach over the edge.
    """
    (height, width), (x0, y0, x1, y1) = size, box
    rows, columns = _pixels(y0, y1, height), _pixels(x0, x1, width)
    if not rows or not columns:
        return np.array([height * width], np.int64)
    # down a column of pixels numbers are straight between the middles of cells: of each stretch it
    # is known where it comes to PART, so that the work is columns × cells, however high the box
    at_XS = _between(x0, x1, columns, len(cells)) @ cells.astype(np.float64).T
    inside = np.pad(at_XS >= PART, ((0, 0), (1, 1)))
    first, last = at_XS[:, :-1], at_XS[:, 1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        crossed = np.arange(len(cells) - 1) + (PART - first) / (last - first)
    middles = y0 + (crossed + 0.5) * ((y1 - y0) / len(cells)) - 0.5
    over = np.pad(middles, ((0, 0), (1, 1)), constant_values=(rows.start, rows.stop - 1))
    begins, ends = ~inside[:, :-1] & inside[:, 1:], inside[:, :-1] & ~inside[:, 1:]
    tops = (np.array(columns) * height)[:, None]

    def places(chosen: npt.NDArray[np.bool_], edges: Floats) -> rle.Counts:
        within = edges.clip(rows.start, rows.stop)
        return (tops + np.where(chosen, within, 0).astype(np.int64))[chosen]

    runs = places(begins, np.ceil(over - TIE)), places(ends, np.floor(over + TIE) + 1)
    return rle.of_runs(*runs, height * width)


def _pixels(low: float, high: float, most: int) -> range:
    """Pixels of a row whose middles lie between two places."""
    if not high > low:
        return range(0)
    begin, end = (math.ceil(min(max(v, 0.0), float(most)) - 0.5) for v in (low, high))
    return range(begin, end)


def _between(low: float, high: float, pixels: range, side: int) -> Floats:
    """How much each cell counts at the middle of each pixel, [pixels, side]."""
    at = (np.array(pixels) + 0.5 - low) / (high - low) * side - 0.5
    at = at.clip(0, side - 1)
    return np.asarray((1 - abs(at[:, None] - np.arange(side))).clip(0))


def outlines(mask: npt.NDArray[np.uint8]) -> tuple[tuple[float, ...], ...]:
    """Outlines x0 y0 x1 y1 … through the middles of a mask's outermost pixels, and of holes."""
    import cv2

    found, _ = cv2.findContours(np.ascontiguousarray(mask), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    return tuple(tuple((c.reshape(-1) + 0.5).tolist()) for c in found if len(c) > 2)
