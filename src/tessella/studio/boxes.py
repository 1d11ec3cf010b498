"""Boxes and masks over pictures: an SVG as large as the picture, laid over it by the style sheet.

As an image it runs no scripts, whatever a class is called, and it scales as its picture does.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from html import escape

from nicegui.element import Element

from tessella.studio import parts
from tessella.tasks.thing import Thing

# what XML allows in no form: one of them, and no picture has its boxes
UNWRITABLE = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def boxed(
    source: str, alt: str, things: Sequence[Thing], size: tuple[int, int], *, names: bool = False
) -> Element:
    """A picture by URL with its things.

    Args:
        size: height and width of the picture in pixels, in which the things' boxes are.
        names: whether each thing's name is written beside it; small pictures have no room.
    """
    with parts.box("boxed") as area:
        parts.picture(source, alt)
        if things:
            drawing = b64encode(svg(things, size, names=names).encode()).decode()
            parts.picture(f"data:image/svg+xml;base64,{drawing}").classes("boxes")
    return area


def svg(things: Sequence[Thing], size: tuple[int, int], *, names: bool) -> str:
    """The things of a picture of this height and width, as SVG."""
    height, width = size
    letter = max(height, width) / 26
    shapes = [part for thing in reversed(things) for part in _shapes(thing, letter, width, names)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}">{"".join(shapes)}</svg>'
    )


def _shapes(thing: Thing, letter: float, width: int, names: bool) -> list[str]:
    """The mask, a frame, and the name on a ground of its color, above the frame or at its top."""
    x0, y0, x1, y1 = thing.box
    color = "rgb({}, {}, {})".format(*thing.color)
    dashes = ' stroke-dasharray="6 4"' if thing.dashed else ""
    frame = (
        f'<rect x="{x0:.2f}" y="{y0:.2f}" width="{x1 - x0:.2f}" height="{y1 - y0:.2f}"'
        f' fill="none" stroke="{color}" stroke-width="2"{dashes}'
        ' vector-effect="non-scaling-stroke"/>'
    )
    shapes = [_mask(thing, color), frame] if thing.outlines else [frame]
    if not names:
        return shapes
    name = UNWRITABLE.sub("", thing.name)
    wide = 0.58 * letter * len(name) + 0.4 * letter
    x = max(0.0, min(x0, width - wide))
    y = y0 - 1.2 * letter if y0 >= 1.2 * letter else y0
    ground = (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{1.2 * letter:.2f}"'
        f' fill="{color}"/>'
    )
    written = (
        f'<text x="{x + 0.2 * letter:.2f}" y="{y + 0.92 * letter:.2f}" fill="white"'
        f' font-size="{letter:.2f}" font-family="sans-serif">{escape(name)}</text>'
    )
    return [*shapes, ground, written]


def _mask(thing: Thing, color: str) -> str:
    """What lies inside of an odd number of outlines, in the thing's color."""
    lines = []
    for outline in thing.outlines:
        points = " ".join(f"{v:.1f}" for v in outline)
        lines.append(f"M{points}Z")
    return (
        f'<path d="{"".join(lines)}" fill="{color}" fill-opacity="0.4" fill-rule="evenodd"'
        f' stroke="{color}" stroke-width="1" vector-effect="non-scaling-stroke"/>'
    )
