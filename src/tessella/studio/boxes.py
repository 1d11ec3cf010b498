"""Boxes and masks over pictures: an SVG as large as the picture, laid over it by the style sheet,
or a PNG where each pixel has a class.

As an image an SVG runs no scripts, whatever a class is called, and it scales as its picture does.
"""

from __future__ import annotations

import io
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from nicegui.element import Element
from PIL import Image

from tessella.studio import parts
from tessella.studio.charts import shorten
from tessella.studio.theme import text
from tessella.tasks.task import Answers
from tessella.tasks.thing import Thing

# what XML allows in no form: one of them, and no picture has its boxes
MOST_PIXELS = 1024  # of the longer side of a drawn answer
MOST_LETTERS = 20  # of a name: a longer one would lie over half of the picture
UNWRITABLE = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def boxed(
    source: str, alt: str, things: Sequence[Thing], size: tuple[int, int], *, names: bool = False,
    over: str = "",
) -> Element:  # fmt: skip
    """A picture by URL with its things.

    Args:
        size: height and width of the picture in pixels, in which the things' boxes are.
        names: whether each thing's name is written beside it; small pictures have no room.
        over: the URL of a picture that lies over it, such as ``masks_of`` makes.
    """
    with parts.box("boxed") as area:
        parts.picture(source, alt)
        if over:
            parts.picture(over).classes("boxes masks")
        if things:
            drawing = b64encode(svg(things, size, names=names).encode()).decode()
            parts.picture(f"data:image/svg+xml;base64,{drawing}").classes("boxes")
    return area


def masks_of(answers: Answers, told: Any, size: tuple[int, int]) -> str:
    """What a network answers about each pixel of a picture of this height and width, as a PNG in
    the colors of its classes, half of which the picture beneath shines through; as a URL.

    Empty where an answer has no place in the picture.
    """
    share = min(1.0, MOST_PIXELS / max(size))
    height, width = (max(1, round(share * side)) for side in size)
    placed = [one | {"box": [share * v for v in one["box"]]} for one in told if "box" in one]
    half = answers.drawn(np.zeros((height, width, 3), np.uint8), placed) if placed else None
    if half is None:
        return ""
    shown = np.where(half.any(axis=2), 128, 0).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.dstack([half * 2, shown])).save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def legend(answers: Answers, names: Mapping[int, str]) -> None:
    """The colors of classes in masks, by their numbers; one that is not drawn has none."""
    with parts.box("row-line wrap legend"):
        for number, name in names.items():
            black = np.zeros((1, 1, 3), np.uint8)
            color = answers.taught(black, np.full((1, 1), number), ())[0, 0].astype(int) * 2
            with parts.box("key"):
                if color.any():
                    dot = "background:rgb({},{},{})".format(*color.tolist())
                    parts.box("dot").style(dot)
                text("span", name)


def svg(things: Sequence[Thing], size: tuple[int, int], *, names: bool) -> str:
    """The things of a picture of this height and width, as SVG."""
    height, width = size
    letter = max(height, width) / 26
    shapes = [part for thing in reversed(things) for part in _shapes(thing)]
    if names:  # over all frames: a name that is cut by one cannot be read
        shapes += [part for thing in reversed(things) for part in _named(thing, letter, width)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}">{"".join(shapes)}</svg>'
    )


def _shapes(thing: Thing) -> list[str]:
    """The mask and a frame."""
    x0, y0, x1, y1 = thing.box
    color = _color(thing)
    dashes = ' stroke-dasharray="6 4"' if thing.dashed else ""
    frame = (
        f'<rect x="{x0:.2f}" y="{y0:.2f}" width="{x1 - x0:.2f}" height="{y1 - y0:.2f}"'
        f' fill="none" stroke="{color}" stroke-width="2"{dashes}'
        ' vector-effect="non-scaling-stroke"/>'
    )
    return [_mask(thing, color), frame] if thing.outlines else [frame]


def _named(thing: Thing, letter: float, width: int) -> list[str]:
    """The name on a ground of its color, above the frame or at its top."""
    x0, y0, _, _ = thing.box
    color = _color(thing)
    name = shorten(UNWRITABLE.sub("", thing.name), MOST_LETTERS)
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
    return [ground, written]


def _color(thing: Thing) -> str:
    return "rgb({}, {}, {})".format(*thing.color)


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
