"""Boxes and outlines of strangers: what is broken is listed, what lies over the edge is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tessella.annotations import rle
from tessella.annotations.record import Problem, Thing

MAX_SIDE = 1 << 20  # pixels of a picture's side
MAX_PIXELS = 1 << 28
MAX_THINGS = 1 << 16  # of a picture
MAX_POINTS = 1 << 16  # of an outline
MAX_LENGTH = 1 << 24  # pixels along an outline, which is walked to draw it
SHOWN = 80
PLAIN = {int, float}
FAR = 1e7  # pixels: no picture is so large
SLACK = 1e-3  # pixels over the edge that rounding explains


class Checker:
    """Collects the things of one picture and what is wrong with them."""

    def __init__(self, path: str, height: int, width: int, problems: list[Problem]) -> None:
        self.path, self.height, self.width = path, height, width
        self._problems = problems
        self._seen: set[tuple[object, ...]] = set()
        self.things: list[Thing] = []

    def tell(self, what: str) -> None:
        self._problems.append(Problem(path=self.path, what=what))

    def add(
        self,
        label: int,
        box: Sequence[Any],
        *,
        crowd: bool = False,
        polygons: Sequence[Any] = (),
        counts: bytes | None = None,
    ) -> None:
        """Add a thing whose box is x, y, width, height, unless it is broken or there already.

        A thing whose mask alone is broken keeps its box.
        """
        if len(self.things) >= MAX_THINGS:
            if len(self.things) == MAX_THINGS:
                self.tell(f"more than {MAX_THINGS:,} things; the others are left out")
            return
        placed = self._placed(box)
        if placed is None:
            return
        x, y, width, height = placed
        outlines = self._outlines(polygons)
        if counts is not None and not rle.fits(counts, self.height, self.width):
            self.tell(f"a mask is not {self.height} × {self.width} pixels, as its picture is")
            counts = None
        key = (label, x, y, width, height, crowd, outlines, counts)
        if key in self._seen:
            self.tell(f"a thing of class {label} is there twice, at {_box(placed)}")
            return
        self._seen.add(key)
        thing = Thing(
            label=label,
            x=x,
            y=y,
            width=width,
            height=height,
            crowd=crowd,
            polygons=outlines,
            rle=counts or b"",
        )
        self.things.append(thing)

    def _placed(self, box: Sequence[Any]) -> tuple[float, float, float, float] | None:
        """The box inside the picture, or None after saying why there is none."""
        plain = len(box) == 4 and PLAIN.issuperset(map(type, box))
        if not plain or not all(abs(v) < FAR for v in box):
            self.tell(f"a box is not four finite numbers: {str(box)[:SHOWN]}")
            return None
        x, y, width, height = map(float, box)
        if width <= 0 or height <= 0:
            self.tell(f"a box has no area: {_box((x, y, width, height))}")
            return None
        right, bottom = min(x + width, self.width), min(y + height, self.height)
        left, top = max(x, 0.0), max(y, 0.0)
        if right <= left or bottom <= top:
            self.tell(f"a box lies outside of the picture: {_box((x, y, width, height))}")
            return None
        over = max(left - x, top - y, x + width - right, y + height - bottom)
        if over > SLACK:
            self.tell(f"a box was cut at the edge of the picture: {_box((x, y, width, height))}")
        if over > 0:
            return left, top, right - left, bottom - top
        return x, y, width, height

    def _outlines(self, polygons: Sequence[Any]) -> tuple[tuple[float, ...], ...]:
        """The outlines as numbers; none after saying what is wrong with one, as it may be a part
        of the thing or a hole in it."""
        outlines = []
        for polygon in polygons:
            if not isinstance(polygon, list | tuple) or not 6 <= len(polygon) <= 2 * MAX_POINTS:
                self.tell("an outline has fewer than three points, or too many")
                return ()
            points = tuple(polygon)
            # A sum of finite numbers is one, and of nothing else.
            if not PLAIN.issuperset(map(type, points)) or len(points) % 2 or not _adds_up(points):
                self.tell("an outline is not pairs of finite numbers")
                return ()
            if self._strays(points):
                self.tell("an outline leads far out of the picture, or is too long")
                return ()
            outlines.append(points)
        return tuple(outlines)

    def _strays(self, points: tuple[float, ...]) -> bool:
        """Whether an outline leaves the picture by more than a picture, or is absurdly long."""
        xs, ys = points[0::2], points[1::2]
        if min(xs) < -self.width or max(xs) > 2 * self.width:
            return True
        if min(ys) < -self.height or max(ys) > 2 * self.height:
            return True
        if len(points) * 3 * (self.width + self.height) < MAX_LENGTH:
            return False
        around = zip(points, points[2:] + points[:2], strict=True)
        return sum(abs(a - b) for a, b in around) > MAX_LENGTH


def _adds_up(points: Sequence[float]) -> bool:
    try:
        return abs(math.fsum(points)) < math.inf
    except (OverflowError, ValueError):  # infinities of both signs, or an integer of 400 digits
        return False


def sides_of(height: Any, width: Any) -> str | None:
    """Why two values are not the sides of a picture, or None where they are."""
    for side in (height, width):
        if type(side) is not int or not 1 <= side <= MAX_SIDE:
            return f"its size is no picture's: {str(height)[:20]} × {str(width)[:20]}"
    return None if height * width <= MAX_PIXELS else f"it has more than {MAX_PIXELS:,} pixels"


def _box(box: Sequence[float]) -> str:
    return " ".join(f"{v:.6g}" for v in box)
