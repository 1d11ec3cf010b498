"""A thing at its place in a picture: box, name, colour and outlines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Thing:
    """Something in a picture, as it is drawn.

    Attributes:
        box: x0 y0 x1 y1 in the picture's pixels.
        name: what is written beside it.
        color: red, green and blue, 0 to 255.
        dashed: whether its frame is: of what is only said.
        outlines: x0 y0 x1 y1 … around its mask and around holes in it; empty: it has no mask.
    """

    box: tuple[float, float, float, float]
    name: str
    color: tuple[int, int, int]
    dashed: bool = False
    outlines: tuple[tuple[float, ...], ...] = ()
