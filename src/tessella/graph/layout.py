"""A layered layout of a directed acyclic graph: boxes in rows, edges downwards.

Rows by longest path, order within a row by barycentres, positions by least squares in that order.
All edges that leave one box share their way down, so that a tensor read often is one line.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

GAP_X, GAP_Y = 22.0, 30.0
_ORDER_SWEEPS, _PLACE_SWEEPS = 8, 40
_CENTRE = 0.3  # how much every box wants to be in the middle, so that nothing drifts to a side


@dataclass(eq=False)
class _Cell:
    """A box, or a place where a long edge crosses a row (``box`` is None)."""

    row: int
    width: float
    height: float
    box: int | None
    x: float = 0.0
    above: list[_Cell] = field(default_factory=list)
    below: list[_Cell] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where everything lies, in pixels from the top left.

    Attributes:
        boxes: the centre (x) and the top (y) of each box.
        segments: pieces of edges ``(x0, y0, x1, y1)``, each from a row down to the next.
        passes: where an edge crosses a row: ``(x, y0, y1)``.
        arrows: the tips of the edges, ``(x, y)``.
    """

    width: float
    height: float
    boxes: tuple[tuple[float, float], ...]
    segments: tuple[tuple[float, float, float, float], ...]
    passes: tuple[tuple[float, float, float], ...]
    arrows: tuple[tuple[float, float], ...]


def layered(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> Layout:
    """Lay out boxes of ``sizes`` (width, height); edges go from a lower to a higher index."""
    rows = _order(_rows(sizes, edges))
    _place(rows)
    return _measure(rows, len(sizes))


def _rows(
    sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]
) -> list[list[_Cell]]:
    """Cells by row, joined row to row; a box's row is the longest way to it."""
    row = [0] * len(sizes)
    for a, b in sorted(edges, key=lambda e: e[1]):
        row[b] = max(row[b], row[a] + 1)
    cells = [_Cell(r, w, h, i) for i, (r, (w, h)) in enumerate(zip(row, sizes, strict=True))]
    rows: list[list[_Cell]] = [[] for _ in range(max(row, default=-1) + 1)]
    ways: dict[int, list[_Cell]] = {}
    for cell in cells:
        rows[cell.row].append(cell)
    for a, b in sorted(set(edges)):
        way = ways.setdefault(a, [cells[a]])
        while way[-1].row < row[b] - 1:
            crossing = _Cell(way[-1].row + 1, 2.0, 0.0, None)
            rows[crossing.row].append(crossing)
            _join(way[-1], crossing)
            way.append(crossing)
        _join(way[row[b] - 1 - row[a]], cells[b])
    return rows


def _join(above: _Cell, below: _Cell) -> None:
    above.below.append(below)
    below.above.append(above)


def _order(rows: list[list[_Cell]]) -> list[list[_Cell]]:
    """The order with the fewest crossings that sweeps down and up come by."""
    best, fewest = [list(r) for r in rows], _crossings(rows)
    for sweep in range(_ORDER_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            _sort_row(rows, row, down)
        if (crossings := _crossings(rows)) < fewest:
            best, fewest = [list(r) for r in rows], crossings
        if fewest == 0:
            break
    return best


def _sort_row(rows: list[list[_Cell]], row: list[_Cell], down: bool) -> None:
    """Sort one row by the mean position of its neighbours in the row before."""
    index = row[0].row
    other = index - 1 if down else index + 1
    if not 0 <= other < len(rows):
        return
    place = {cell: i for i, cell in enumerate(rows[other])}
    here = {cell: i for i, cell in enumerate(row)}

    def barycentre(cell: _Cell) -> float:
        near = cell.above if down else cell.below
        return sum(place[n] for n in near) / len(near) if near else float(here[cell])

    row.sort(key=barycentre)


def _crossings(rows: list[list[_Cell]]) -> int:
    """How often edges cross: inversions between the orders of their two ends."""
    count = 0
    for upper, lower in pairwise(rows):
        place = {cell: i for i, cell in enumerate(lower)}
        seen: list[int] = []
        for cell in upper:
            ends = sorted(place[b] for b in cell.below)
            count += sum(len(seen) - bisect_left(seen, end + 1) for end in ends)
            for end in ends:
                insort(seen, end)
    return count


def _place(rows: list[list[_Cell]]) -> None:
    """Move every cell towards its neighbours' mean, keeping the order and the gaps."""
    for row in rows:
        left = 0.0
        for cell in row:
            cell.x = left + cell.width / 2
            left += cell.width + GAP_X
        for cell in row:
            cell.x -= (left - GAP_X) / 2
    for sweep in range(_PLACE_SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            _spread(row)


def _spread(row: list[_Cell]) -> None:
    """Least squares under the order: neighbours that would overlap become one block and share."""
    blocks: list[tuple[float, float, list[_Cell]]] = []  # weighted sum, weight, cells
    offset, offsets = 0.0, {}
    for previous, cell in zip([None, *row], row, strict=False):
        if previous is not None:
            offset += (previous.width + cell.width) / 2 + GAP_X
        offsets[cell] = offset
        near = [(n.x, _pull(n, cell)) for n in cell.above] + [
            (n.x, _pull(cell, n)) for n in cell.below
        ]
        weight = sum(pull for _, pull in near) + _CENTRE
        wish = sum(x * pull for x, pull in near) / weight  # the middle of the drawing is 0
        block = ((wish - offset) * weight, weight, [cell])
        while blocks and blocks[-1][0] / blocks[-1][1] > block[0] / block[1]:
            total, heavy, cells = blocks.pop()
            block = (total + block[0], heavy + block[1], cells + block[2])
        blocks.append(block)
    for total, weight, cells in blocks:
        for cell in cells:
            cell.x = total / weight + offsets[cell]


def _pull(above: _Cell, below: _Cell) -> float:
    """How much an edge wants to be vertical: long ones most, then those between two of a chain."""
    if above.box is None and below.box is None:
        return 8.0
    return 3.0 if len(above.below) == len(below.above) == 1 else 1.0


def _measure(rows: list[list[_Cell]], count: int) -> Layout:
    """Pixels: rows below each other, everything right of a margin."""
    cells = [cell for row in rows for cell in row]
    left = min((c.x - c.width / 2 for c in cells), default=0.0) - GAP_X
    right = max((c.x + c.width / 2 for c in cells), default=0.0) + GAP_X
    tops, heights, y = [], [], GAP_Y / 2
    for row in rows:
        tops.append(y)
        heights.append(max(cell.height for cell in row))
        y += heights[-1] + GAP_Y
    boxes: list[tuple[float, float]] = [(0.0, 0.0)] * count
    segments, passes, arrows = [], [], []
    for cell in cells:
        x, top = cell.x - left, tops[cell.row]
        bottom = top + heights[cell.row]
        if cell.box is None:
            passes.append((x, top, bottom))
        else:
            slack = (heights[cell.row] - cell.height) / 2
            boxes[cell.box] = (x, top + slack)
            bottom -= slack
        for below in cell.below:
            end = tops[below.row]
            if below.box is not None:
                end += (heights[below.row] - below.height) / 2
                arrows.append((below.x - left, end))
            segments.append((x, bottom, below.x - left, end))
    return Layout(
        width=right - left,
        height=y - GAP_Y / 2,
        boxes=tuple(boxes),
        segments=tuple(segments),
        passes=tuple(passes),
        arrows=tuple(dict.fromkeys(arrows)),
    )
