"""Masks as cells of their boxes: made of pixels, and drawn into pixels again.

A cell is a share of the box's height and width, so that a mask has as many numbers however large
its thing is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tessella.annotations import rle
from tessella.tasks.instances.runs import Runs

Floats = npt.NDArray[np.floating[Any]]
SIDE = 28  # cells along the side of a box that is told, as Mask R-CNN has it
CELLS = SIDE * SIDE
PART = 0.5  # from which a pixel is part of the thing
TIE = 1e-6  # pixels: what rounding may move a pixel that is just PART
UNSURE = 1e-5  # of a number in float32: so near to PART it is calculated again
FAR = 1e9  # pixels: no box reaches so far
BLOCK = 1 << 13  # columns of pixels at a time: a megabyte, which stays in the cache


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

    Args:
        box: x0 y0 x1 y1 in the mask's pixels; it may reach over the edge.
    """
    runs = runs_of(cells[None], np.array([box], np.float64), size)
    return rle.of_runs(runs.begins, runs.ends, size[0] * size[1])


def runs_of(cells_DSS: Floats, boxes_D4: npt.NDArray[np.float64], size: tuple[int, int]) -> Runs:
    """The masks of a height and width of so many things, of their cells and boxes.

    Between the middles of cells numbers change bilinearly; a pixel whose middle lies in the box is
    part of the thing where its number is ``PART`` or more.
    """
    (height, width), side = size, cells_DSS.shape[2]
    x0, y0, x1, y1 = _sides(boxes_D4)
    (left, right), (top, bottom) = _pixels(x0, x1, width), _pixels(y0, y1, height)
    counts = np.where(bottom > top, right - left, 0)
    thing_X = np.repeat(np.arange(len(boxes_D4)), counts)  # X: the columns of all boxes
    column_X = np.arange(len(thing_X)) + np.repeat(left - np.cumsum(counts) + counts, counts)
    at_X = (column_X + 0.5 - x0[thing_X]) / (x1 - x0)[thing_X] * side - 0.5
    at_X = at_X.clip(0, side - 1)
    cell_X = np.minimum(at_X.astype(np.int64), side - 2)
    values = np.asarray(cells_DSS.transpose(0, 2, 1), np.float32, order="C")
    reaches = values.max(axis=2).reshape(-1) >= PART - UNSURE  # of each column of cells
    place_X = thing_X * side + cell_X
    kept = np.flatnonzero(reaches[place_X] | reaches[place_X + 1])  # in others is nothing
    thing_X, column_X, part_X = thing_X[kept], column_X[kept], (at_X - cell_X)[kept]
    place_X = place_X[kept] * side

    def number(columns: rle.Counts, rows: rle.Counts) -> Floats:
        """What cells say of a column of pixels, at the middle of a row of cells."""
        at, share = place_X[columns] + rows, part_X[columns]
        flat = values.reshape(-1)
        return np.asarray(flat[at] * (1 - share) + flat[at + side] * share)

    # down a column of pixels numbers are straight between the middles of cells: of each stretch it
    # is known where it comes to PART, so that the work is columns × cells, however high the box
    edges = _edges(values.reshape(-1, side), place_X // side, part_X, number)
    columns, rows = np.divmod(edges, side + 1)
    within = rows.clip(1, side - 1)
    first, last = number(columns, within - 1), number(columns, within)
    things = thing_X[columns]
    low, high = top[things], bottom[things]
    with np.errstate(divide="ignore", invalid="ignore"):
        crossed = within - 1 + (PART - first) / (last - first)
    over = y0[things] + (crossed + 0.5) * ((y1 - y0) / side)[things] - 0.5
    over = np.where(rows == 0, low, np.where(rows == side, high - 1, over))
    over[0::2] = np.ceil(over[0::2] - TIE)
    over[1::2] = np.floor(over[1::2] + TIE) + 1
    stride = height * width + 1
    tops = things * stride + column_X[columns] * height
    places = tops + over.clip(low, high).astype(np.int64)
    begins, ends = rle.joined(places[0::2], places[1::2])
    return Runs(begins=begins, ends=ends, count=len(boxes_D4), height=height, stride=stride)


def _edges(
    values: npt.NDArray[np.float32], place_X: rle.Counts, part_X: Floats,
    number: Callable[[rle.Counts, rle.Counts], Floats],
) -> rle.Counts:  # fmt: skip
    """Where columns of pixels enter and leave what is ``PART`` or more, by turns: the column times
    the cells and one more, and the cell that is the first behind.

    Float32 decides where it is far from ``PART``, in half the time.
    """
    side, found = values.shape[1], [np.zeros(0, np.int64)]
    steps = np.diff(values, axis=0, append=values[-1:])
    for start in range(0, len(place_X), BLOCK):
        place, part = place_X[start : start + BLOCK], part_X[start : start + BLOCK]
        level = steps.take(place, axis=0)
        level *= part.astype(np.float32)[:, None]
        level += values.take(place, axis=0)
        level -= np.float32(PART)
        inside = np.zeros((len(place), side + 2), bool)
        np.greater_equal(level, 0, out=inside[:, 1:-1])
        unsure = np.flatnonzero(np.abs(level, out=level) < UNSURE)
        columns, rows = np.divmod(unsure, side)
        inside[columns, rows + 1] = number(start + columns, rows) >= PART
        edges = np.flatnonzero(inside[:, 1:] != inside[:, :-1])
        found.append(start * (side + 1) + edges)
    return np.concatenate(found)


def areas_between(
    inside_DSS: npt.NDArray[np.bool_], boxes_D4: npt.NDArray[np.float64], size: tuple[int, int]
) -> Floats:
    """The pixels that masks have at least and at most, [2, D], without drawing them.

    Between the middles of four cells that are all ``PART`` or more every pixel is part of the
    thing, and none between four that are less.

    Args:
        inside_DSS: which cells are ``PART`` or more.
    """
    x0, y0, x1, y1 = _sides(boxes_D4)
    side = inside_DSS.shape[2]
    across, up = _stretches(x0, x1, size[1], side), _stretches(y0, y1, size[0], side)

    def pixels(cells: npt.NDArray[np.bool_]) -> Floats:
        """The pixels between the middles of four cells that all belong to the thing."""
        pairs = cells[:, 1:] & cells[:, :-1]
        fours = (pairs[:, :, 1:] & pairs[:, :, :-1]).astype(np.float64)
        return np.asarray(((fours @ across[:, :, None])[:, :, 0] * up).sum(axis=1))

    every = up.sum(axis=1) * across.sum(axis=1)
    return np.stack([pixels(inside_DSS), every - pixels(~inside_DSS)])


def columns_of(boxes_D4: npt.NDArray[np.float64], width: int) -> tuple[rle.Counts, rle.Counts]:
    """The columns of pixels that boxes reach: the first, and that behind."""
    x0, _, x1, _ = _sides(boxes_D4)
    return _pixels(x0, x1, width)


def _sides(boxes_D4: npt.NDArray[np.float64]) -> Floats:
    """x0, y0, x1 and y1 of boxes; what has diverged tells anything."""
    known = ~np.isnan(boxes_D4).any(axis=1, keepdims=True)
    return np.asarray(np.where(known, boxes_D4.clip(-FAR, FAR), 0.0).T)


def _stretches(low_D: Floats, high_D: Floats, most: int, side: int) -> Floats:
    """How many pixels of a row lie between the middles of a cell and the next, [D, side - 1]; those
    in front of the first middle and behind the last count to their neighbours."""
    first, behind = (v[:, None] for v in _pixels(low_D, high_D, most))
    middles = low_D[:, None] + (np.arange(1, side - 1) + 0.5) * ((high_D - low_D) / side)[:, None]
    cuts = np.ceil(middles - 0.5).clip(first, behind)
    return np.diff(cuts, axis=1, prepend=first, append=behind)


def _pixels(low_D: Floats, high_D: Floats, most: int) -> tuple[rle.Counts, rle.Counts]:
    """The pixels of a row whose middles lie between two places: the first, and that behind."""
    first, behind = (np.ceil(v.clip(0, most) - 0.5).astype(np.int64) for v in (low_D, high_D))
    return first, np.where(high_D > low_D, behind, first)


def outlines(mask: npt.NDArray[np.uint8]) -> tuple[tuple[float, ...], ...]:
    """Outlines x0 y0 x1 y1 … through the middles of a mask's outermost pixels, and of holes."""
    import cv2  # not above: a plan is loaded without OpenCV, which holds 15 MB

    found, _ = cv2.findContours(np.ascontiguousarray(mask), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    return tuple(tuple((c.reshape(-1) + 0.5).tolist()) for c in found if len(c) > 2)
