"""Masks as run lengths, with the same bytes as the COCO API's ``mask`` module.

A mask is walked column by column; counts alternate between zeros and ones, zeros first. The
compressed form writes each count as the difference from the one before the last, five bits a
character, low bits first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.uint8]
LONGEST = 7  # characters of a count: 2³⁵ pixels
MAX_TEXT = 1 << 24  # characters of a mask; reading it takes forty bytes for each
SCALE = 5  # outlines are walked on a grid that is five times as fine


def counts_of(mask: npt.NDArray[np.generic]) -> Counts:
    """The run lengths of a mask [height, width]; what is not 0 is 1."""
    flat = np.asarray(mask != 0).ravel(order="F")
    edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    places = np.concatenate([[0], edges, [flat.size]])
    counts = np.diff(places)
    return np.concatenate([[0], counts]) if flat.size and flat[0] else counts


def of_part(part: npt.NDArray[np.generic], top: int, left: int, height: int, width: int) -> Counts:
    """The run lengths of a mask [height, width] that is 0 but for a part of it."""
    columns = np.pad(np.asarray(part != 0).T, ((0, 0), (1, 1)))
    column, row = np.nonzero(columns[:, 1:] != columns[:, :-1])
    places = (left + column) * height + top + row
    return of_runs(places[0::2], places[1::2], height * width)


def of_runs(begins: Counts, ends: Counts, pixels: int) -> Counts:
    """The run lengths of a mask of so many pixels, of where its runs begin and end, in order.

    A run may touch the one before it, and may be empty.
    """
    begins, ends = joined(begins, ends)
    edges = np.stack([begins, ends], axis=1).ravel()
    counts = np.diff(np.concatenate([[0], edges, [pixels]]))
    return counts if counts[-1] or len(counts) == 1 else counts[:-1]


def joined(begins: Counts, ends: Counts) -> tuple[Counts, Counts]:
    """Where runs begin and end, in order, without empty ones, and those that touch as one."""
    begins, ends = begins[begins < ends], ends[begins < ends]
    apart = np.ones(len(begins) + 1, bool)
    apart[1:-1] = begins[1:] > ends[:-1]
    return begins[apart[:-1]], ends[apart[1:]]


def seen_in(counts: Counts, height: int, window: tuple[int, int, int, int]) -> Counts:
    """The run lengths of what a window shows of a mask of so many rows, without its pixels.

    Args:
        window: top, left, height and width; where it reaches over the mask's edge it is 0.
    """
    top, left, rows, columns = window
    ends = np.cumsum(counts)
    begins, stops = ends[:-1:2], ends[1::2]
    begins, stops = begins[stops > begins], stops[stops > begins]
    first, last = begins // height, (stops - 1) // height
    many = last - first + 1  # columns of each run, which becomes a run in each of them
    place = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
    column = np.repeat(first, many) + place
    low = np.maximum(np.repeat(begins, many), column * height) - column * height
    high = np.minimum(np.repeat(stops, many), (column + 1) * height) - column * height
    shown = (column >= left) & (column < left + columns)
    at = (column[shown] - left) * rows
    low, high = ((v[shown] - top).clip(0, rows) for v in (low, high))
    return of_runs(at + low, at + high, rows * columns)


def mask_of(counts: Counts, height: int, width: int) -> Mask:
    """The mask uint8 [height, width] of run lengths whose sum is height · width."""
    values = (np.arange(len(counts)) % 2).astype(np.uint8)
    return np.repeat(values, counts).reshape(width, height).T


def compressed(counts: Counts) -> bytes:
    """Counts as text."""
    deltas = counts.astype(np.int64)
    deltas[3:] -= counts[1:-2]
    size = np.where(deltas < 0, ~deltas, deltas)  # one bit more, and it has its sign
    lengths = 1 + np.searchsorted(1 << (5 * np.arange(1, 13) - 1), size, side="right")
    place = np.arange(lengths.max(initial=0))
    codes = (deltas[:, None] >> (5 * place)) & 31
    codes |= np.where(place < lengths[:, None] - 1, 32, 0)
    return bytes((codes[place < lengths[:, None]] + 48).astype(np.uint8))


def expanded(text: bytes) -> Counts:
    """The counts in a text.

    Raises:
        ValueError: no such text, or a count that is negative or too large.
    """
    return expanded_each([text])[0]


def expanded_each(texts: Sequence[bytes]) -> list[Counts]:
    """The counts in each of some texts; raises as ``expanded`` does."""
    if not texts:
        return []
    codes = np.frombuffer(b"".join(texts), np.uint8).astype(np.int64) - 48
    behind = np.cumsum([len(text) for text in texts])
    whole = all(texts) and codes.min() >= 0 and codes.max() < 64
    if not whole or (codes[behind - 1] & 32).any():
        raise ValueError("not run lengths")
    ends = np.flatnonzero((codes & 32) == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > LONGEST:
        raise ValueError("a run that no picture has")
    place = np.arange(len(codes)) - np.repeat(starts, lengths)
    deltas = np.add.reduceat((codes & 31) << (5 * place), starts)
    deltas -= np.where(codes[ends] & 16, np.int64(1) << (5 * lengths), 0)
    cuts = np.searchsorted(ends, behind)
    firsts = np.concatenate([[0], cuts[:-1]])
    counts = deltas.copy()
    number = np.arange(len(deltas)) - np.repeat(firsts, cuts - firsts)  # of a count in its text
    for these in (number % 2 == 1, (number % 2 == 0) & (number > 0)):
        sums = np.cumsum(np.where(these, deltas, 0))
        before = np.repeat(np.concatenate([[0], sums])[firsts], cuts - firsts)
        counts[these] = (sums - before)[these]
    if counts.min() < 0 or counts.max() > 1 << 34:
        raise ValueError("a run of less than no pixels")
    return np.split(counts, cuts[:-1])


def fits(text: bytes, height: int, width: int) -> bool:
    """Whether a text holds the run lengths of a mask of this size."""
    try:
        return len(text) <= MAX_TEXT and int(expanded(text).sum()) == height * width
    except ValueError:
        return False


def box_of(counts: Counts, height: int) -> tuple[float, float, float, float]:
    """The smallest box x, y, width, height around a mask; all 0 where the mask is empty."""
    ends = np.cumsum(counts)
    first, last = ends[:-1:2], ends[1::2] - 1  # of each run of ones
    first, last = first[last >= first], last[last >= first]
    if not len(first):
        return 0.0, 0.0, 0.0, 0.0
    one_column = first // height == last // height
    top = int(np.where(one_column, first % height, 0).min())
    bottom = int(np.where(one_column, last % height, height - 1).max())
    left, right = int(first[0] // height), int(last[-1] // height)
    return float(left), float(top), float(right + 1 - left), float(bottom + 1 - top)


def of_polygons(polygons: Sequence[Sequence[float]], height: int, width: int) -> Counts:
    """The run lengths of the union of polygons x0 y0 x1 y1 …, as the COCO API draws them."""
    drawn = [_of_polygon(np.asarray(p, np.float64), height, width) for p in polygons]
    if len(drawn) == 1:
        return drawn[0]
    union = np.zeros((height, width), np.uint8)
    for counts in drawn:
        union |= mask_of(counts, height, width)
    return counts_of(union)


def _of_polygon(points: npt.NDArray[np.float64], height: int, width: int) -> Counts:
    """Where the outline crosses the middle of a column, pixels switch between inside and out."""
    u, v = _walk(np.trunc(SCALE * points[0::2] + 0.5), np.trunc(SCALE * points[1::2] + 0.5))
    turn = np.flatnonzero(u[1:] != u[:-1]) + 1
    here, before = u[turn], u[turn - 1]
    x = (np.where(here < before, here, here - 1) + 0.5) / SCALE - 0.5
    y = (np.minimum(v[turn], v[turn - 1]) + 0.5) / SCALE - 0.5
    kept = (np.floor(x) == x) & (x >= 0) & (x <= width - 1)
    rows = np.ceil(np.clip(y[kept], 0, height)).astype(np.int64)
    places = np.sort(np.concatenate([x[kept].astype(np.int64) * height + rows, [height * width]]))
    return _merged(np.diff(places, prepend=0))


def _walk(
    xs: npt.NDArray[np.float64], ys: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """All points of the fine grid along a closed outline, in order."""
    us, vs = [], []
    corners = list(zip(xs.tolist(), ys.tolist(), strict=True))
    for (x0, y0), (x1, y1) in pairwise([*corners, corners[0]]):
        dx, dy = abs(x1 - x0), abs(y1 - y0)
        steep = dx < dy
        back = y0 > y1 if steep else x0 > x1
        if back:
            x0, x1, y0, y1 = x1, x0, y1, y0
        steps = np.arange(max(dx, dy) + 1)
        steps = steps[::-1] if back else steps
        if steep:
            us.append(np.trunc(x0 + (x1 - x0) / dy * steps + 0.5))
            vs.append(y0 + steps)
        else:
            us.append(x0 + steps)
            slope = (y1 - y0) / dx if dx else math.nan
            vs.append(np.trunc(y0 + slope * steps + 0.5) if dx else np.array([y0]))
    return np.concatenate(us), np.concatenate(vs)


def _merged(runs: Counts) -> Counts:
    """Runs without those of length 0 in their midst: their neighbours are one run."""
    counts = [int(runs[0])]
    place, values = 1, runs.tolist()
    while place < len(values):
        if values[place] > 0:
            counts.append(values[place])
            place += 1
        else:
            place += 1
            if place < len(values):
                counts[-1] += values[place]
                place += 1
    return np.array(counts, np.int64)
