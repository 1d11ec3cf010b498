"""The boxes of a large picture, of what a network tells of its tiles.

A thing in the overlap of tiles is told by each of them. Two boxes of one class from two tiles are
one thing where their overlap is a half of both together. Where a tile's edge cuts either, a half of
the smaller one is enough, or of what both are in the part that both tiles see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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


@dataclass(kw_only=True)
class Told:
    """What a tile tells, in the picture's pixels.

    Attributes:
        tile: its number; ``seen``: where it lies; ``cut``: whether an edge of it cuts the thing.
        parts: what is one thing with it, and adds to it where both are cut.
    """

    told: dict[str, Any]
    box: Box
    tile: int
    seen: Box
    cut: bool
    parts: list[Told] = field(default_factory=list)


def joined(
    outputs: TileOutputs, tiles: Tiles, size: tuple[int, int], view: View,
    about: tuple[Any, ...], query: Query,
) -> Any:  # fmt: skip
    """The answer to a picture of this height and width, as ``answers.answer`` gives it."""
    kept = merged(told_of(outputs, tiles, size, view, about, query, answer))
    return [one.told | {"box": list(box_around(one))} for one in kept[: query.top]]


def told_of(
    outputs: TileOutputs, tiles: Tiles, size: tuple[int, int], view: View,
    about: tuple[Any, ...], query: Query, answer: Callable[..., list[Any]],
) -> Iterator[Told]:  # fmt: skip
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
            yield Told(told=one, box=box, tile=number, seen=(left, top, right, bottom), cut=cut)


def merged(found: Iterable[Told]) -> list[Told]:
    """Each thing once, the surest first."""
    kept: list[Told] = []
    pieces: dict[int, list[tuple[Told, Told]]] = {}  # by class: what was told, and its thing
    for one in sorted(found, key=lambda one: -one.told["score"]):
        known = pieces.setdefault(one.told["index"], [])
        things = _same(one, [(piece, of) for piece, of in known if piece.tile != one.tile])
        if not things:
            kept.append(one)
            known.append((one, one))
            continue
        first, *others = things
        whole = next((thing for thing in (*things, one) if not thing.cut), None)
        if whole is None:
            first.parts += [one, *(part for other in others for part in (other, *other.parts))]
        elif whole is not first:  # of what was told in part; its score is the surest one's
            first.told = whole.told | {"score": first.told["score"]}
            first.box, first.tile, first.cut, first.parts = whole.box, whole.tile, False, []
        kept = [thing for thing in kept if not any(thing is other for other in others)]
        known[:] = [(p, first if any(of is o for o in others) else of) for p, of in known]
        known.append((one, first))
    return kept


def _same(one: Told, known: Sequence[tuple[Told, Told]]) -> list[Told]:
    """The things of which this is a piece, among those that are known, the surest first."""
    if not known:
        return []
    boxes, seen = (np.array([getattr(p, n) for p, _ in known]) for n in ("box", "seen"))
    cut = np.array([piece.cut or one.cut for piece, _ in known])
    box = np.array([one.box])
    common, areas, own = _areas(_both(boxes, box)), _areas(boxes), _areas(box)
    of = np.where(cut, np.minimum(areas, own), areas + own - common)
    # in what both tiles see
    seen = _both(seen, np.array([one.seen]))
    theirs, mine = _both(boxes, seen), _both(box, seen)
    shared = _areas(_both(theirs, mine))
    either = _areas(theirs) + _areas(mine) - shared
    share = np.maximum(common / np.maximum(of, LEAST), cut * shared / np.maximum(either, LEAST))
    things = {id(known[n][1]): known[n][1] for n in np.flatnonzero(share >= SHARED).tolist()}
    return sorted(things.values(), key=lambda thing: -thing.told["score"])


def _both(one_N4: Floats, other_N4: Floats) -> Floats:
    """What boxes have in common."""
    low = np.maximum(one_N4[:, :2], other_N4[:, :2])
    return np.concatenate([low, np.minimum(one_N4[:, 2:], other_N4[:, 2:])], axis=1)


def _areas(boxes_N4: Floats) -> Floats:
    return np.asarray((boxes_N4[:, 2:] - boxes_N4[:, :2]).clip(0).prod(axis=1))


def box_around(one: Told) -> Box:
    """The box around a thing and its parts."""
    x0, y0, x1, y1 = zip(one.box, *(part.box for part in one.parts), strict=True)
    return min(x0), min(y0), max(x1), max(y1)
