"""The boxes of a large picture, of what a network tells of its tiles.

A thing in the overlap of tiles is told by each of them. Two boxes of one class from two tiles are
one thing where their overlap is a half of both together. Where a tile's edge cuts either, a half of
the smaller one is enough, or of what both are in the part that both tiles see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tessella.core.tiles import Tiles
from tessella.tasks.detection.answers import answer
from tessella.tasks.task import Query, TileOutputs
from tessella.tasks.view import View

SHARED = 0.5
NEAR = 2.0  # pixels from a tile's edge: what reaches so far is cut there
LEAST = 1e-9  # pixels: nothing is divided by none
Box = tuple[float, float, float, float]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a tile tells of a thing, in the picture's pixels.

    Attributes:
        tile: its number; ``seen``: where it lies; ``cut``: whether an edge of it cuts the thing.
    """

    told: dict[str, Any]
    box: Box
    tile: int
    seen: Box
    cut: bool


@dataclass(kw_only=True, eq=False)
class Joined:
    """A thing, with the piece that shows it whole or the pieces that show parts of it.

    Attributes:
        of: the thing of which this turned out to be a part.
    """

    pieces: list[Piece]
    score: float
    of: Joined | None = None

    @property
    def is_cut(self) -> bool:
        return self.pieces[0].cut

    def box(self) -> list[float]:
        """The box around the pieces."""
        boxes = np.array([piece.box for piece in self.pieces])
        low, high = boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)
        return [*low.tolist(), *high.tolist()]


def joined(
    outputs: TileOutputs, tiles: Tiles, size: tuple[int, int], view: View,
    about: tuple[Any, ...], query: Query,
) -> Any:  # fmt: skip
    """The answer to a picture of this height and width, as ``answers.answer`` gives it."""
    kept = merged(pieces_of(outputs, tiles, size, view, about, query, answer))
    return [told_of(thing) | {"box": thing.box()} for thing in kept[: query.top]]


def told_of(thing: Joined) -> dict[str, Any]:
    """What is said of a thing, but for its place."""
    return thing.pieces[0].told | {"score": thing.score}


def pieces_of(
    outputs: TileOutputs, tiles: Tiles, size: tuple[int, int], view: View,
    about: tuple[Any, ...], query: Query, answer: Callable[..., list[Any]],
) -> Iterator[Piece]:  # fmt: skip
    """What each tile tells, by a task's ``answers.answer``."""
    height, width = size
    asked = Query(threshold=query.threshold, views=(view,))
    for number, (top, left, output) in enumerate(outputs):
        # an edge that is the picture's cuts nothing
        low = (left if left > 0 else -np.inf, top if top > 0 else -np.inf)
        right, bottom = left + tiles.width, top + tiles.height
        high = (right if right < width else np.inf, bottom if bottom < height else np.inf)
        for one in answer(output, *about, asked)[0]:
            x0, y0, x1, y1 = one["box"]
            box = (left + x0, top + y0, min(left + x1, width), min(top + y1, height))
            if box[0] >= box[2] or box[1] >= box[3]:
                continue  # in what fills a tile up
            cut = (
                min(box[0] - low[0], box[1] - low[1]) < NEAR
                or min(high[0] - box[2], high[1] - box[3]) < NEAR
            )
            seen = (left, top, right, bottom)
            yield Piece(told=one, box=box, tile=number, seen=seen, cut=cut)


def merged(found: Iterable[Piece]) -> list[Joined]:
    """Each thing once, the surest first."""
    order = sorted(found, key=lambda piece: -piece.told["score"])
    counts = Counter((piece.told["index"], piece.tile) for piece in order)
    near = _neighbours({piece.tile: piece.seen for piece in order})
    known: dict[tuple[int, int], _Known] = {}
    kept: list[Joined] = []
    for piece in order:
        index = piece.told["index"]
        others = [known[index, t] for t in near[piece.tile] if (index, t) in known]
        things = _same(piece, others)
        new = Joined(pieces=[piece], score=piece.told["score"])
        if not things:
            kept.append(new)
        else:
            new = _united(things, new)
        mine = (index, piece.tile)
        if mine not in known:
            known[mine] = _Known(piece.seen, counts[mine])
        known[mine].add(piece, new)
    return [thing for thing in kept if thing.of is None]


def _united(things: list[Joined], new: Joined) -> Joined:
    """Join things that turn out to be one with a new thing; returns the surest."""
    first, *others = things
    whole = next((thing for thing in (*things, new) if not thing.is_cut), None)
    if whole is None:
        first.pieces = [piece for thing in (*things, new) for piece in thing.pieces]
    else:
        first.pieces = whole.pieces
    for other in others:
        other.of = first
    return first


@dataclass
class _Known:
    """The pieces of a class that a tile has told so far, and their things."""

    seen: Box
    room: int
    things: list[Joined] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._boxes_N4 = np.zeros((self.room, 4))
        self._cut_N = np.zeros(self.room, bool)

    def add(self, piece: Piece, thing: Joined) -> None:
        self._boxes_N4[len(self.things)] = piece.box
        self._cut_N[len(self.things)] = piece.cut
        self.things.append(thing)

    def like(self, piece: Piece) -> list[Joined]:
        """The things of pieces that are one thing with another tile's piece."""
        count = len(self.things)
        boxes, cut, box = self._boxes_N4[:count], self._cut_N[:count], np.array([piece.box])
        common, areas, own = _areas(_both(boxes, box)), _areas(boxes), _areas(box)
        cut = cut | piece.cut
        of = np.where(cut, np.minimum(areas, own), areas + own - common)
        seen = _both(np.array([self.seen]), np.array([piece.seen]))  # by both tiles
        theirs, mine = _both(boxes, seen), _both(box, seen)
        shared = _areas(_both(theirs, mine))
        either = _areas(theirs) + _areas(mine) - shared
        share = np.maximum(common / np.maximum(of, LEAST), cut * shared / np.maximum(either, LEAST))
        return [self.things[n] for n in np.flatnonzero(share >= SHARED).tolist()]


def _same(piece: Piece, known: Iterable[_Known]) -> list[Joined]:
    """The things of which this is a piece, the surest first."""
    things: dict[int, Joined] = {}
    x0, y0, x1, y1 = piece.box
    for other in known:
        left, top, right, bottom = other.seen
        if x0 >= right or x1 <= left or y0 >= bottom or y1 <= top:
            continue  # as most are, that tile does not see it
        for thing in other.like(piece):
            while thing.of is not None:
                thing = thing.of
            things[id(thing)] = thing
    return sorted(things.values(), key=lambda thing: -thing.score)


def _neighbours(seen: dict[int, Box]) -> dict[int, list[int]]:
    """By tile the others that have a part of the picture in common with it."""
    tiles = sorted(seen)
    corners_T2 = np.array([seen[t][:2] for t in tiles]).reshape(-1, 2)
    made = {}
    for tile in tiles:
        x0, y0, x1, y1 = seen[tile]
        apart_T2 = abs(corners_T2 - [x0, y0])
        meets = (apart_T2 < [x1 - x0, y1 - y0]).all(axis=1)
        made[tile] = [tiles[n] for n in np.flatnonzero(meets).tolist() if tiles[n] != tile]
    return made


def _both(one_N4: Floats, other_N4: Floats) -> Floats:
    """What boxes have in common."""
    low = np.maximum(one_N4[:, :2], other_N4[:, :2])
    return np.concatenate([low, np.minimum(one_N4[:, 2:], other_N4[:, 2:])], axis=1)


def _areas(boxes_N4: Floats) -> Floats:
    return np.asarray((boxes_N4[:, 2:] - boxes_N4[:, :2]).clip(0).prod(axis=1))
