"""The front as a picture: the metric against time, with memory as the size of the points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from tessella.compiler.budget.front import Front, Point

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 520, 80, 300, 80, 60  # right: the labels
LARGEST, SMALLEST = 22.0, 4.0  # radius of the point with the most bytes, and the least radius
GAP = 18.0  # between labels
CHOSEN, OTHER, EXACT, LIMIT = "#0b6e99", "#77868d", "#333333", "#b3402a"


def svg(front: Front) -> str:
    """An SVG document: a point a plan, its 95 % interval as a line, the budget as a dashed one."""
    points = [*front.points, *([] if front.exact in front.points else [front.exact])]
    before = 100 * front.exact.receipt.after
    limit = before - front.budget
    values = [limit, *(100 * p.receipt.after for p in points)]
    room = max(0.2, 0.25 * (max(values) - min(values)))
    low, high = min(values) - room, max(values) + room
    top = 100.0 if max(values) <= 100 else high
    slowest = 1.12 * max(max(p.time_us for p in points), 1e-9)
    x = _scale(0.0, slowest, LEFT, WIDTH - RIGHT)
    y = _scale(low, high, HEIGHT - BOTTOM, TOP)
    metric = front.exact.receipt.metric
    title = f"{metric} and time of {len(points)} plans of {front.plan.manifest.built_from}"
    device = front.plan.manifest.fingerprint
    head = (
        f"{device.target} ({device.name}); {front.exact.receipt.samples:,} samples, which resolve "
        f"{front.resolution:.2f} points; area: bytes"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="28" font-size="14">{escape(title)}</text>',
        f'<text x="{LEFT}" y="48" fill="#555">{escape(head)}</text>',
        *_grid(x, y, slowest, low, min(high, top), metric),
        f'<line x1="{LEFT}" y1="{y(limit):.1f}" x2="{WIDTH - RIGHT}" y2="{y(limit):.1f}"'
        f' stroke="{LIMIT}" stroke-dasharray="6 4"/>',
        f'<text x="{LEFT + 4}" y="{y(limit) + 14:.1f}" fill="{LIMIT}">'
        f"budget: {front.budget:g} points below float32</text>",
    ]
    most = max(p.nbytes for p in points)
    heights = _spread([y(100 * p.receipt.after) for p in points])
    for index, (point, height) in enumerate(zip(points, heights, strict=True)):
        colour = _colour(front, index, point)
        name = f"{index}" if index < len(front) else "fp32"
        parts += _drawn(point, name, colour, x, y, (low, high), most, before, height)
    return "\n".join([*parts, "</svg>", ""])


def _colour(front: Front, index: int, point: Point) -> str:
    if index == front.chosen:
        return CHOSEN
    return EXACT if point is front.exact else OTHER


def _drawn(
    point: Point,
    name: str,
    colour: str,
    x: Callable[[float], float],
    y: Callable[[float], float],
    span: tuple[float, float],
    most: int,
    before: float,
    label: float,
) -> list[str]:
    """A circle, its interval cut to the picture, and a label at the right."""
    at_x, at_y = x(point.time_us), y(100 * point.receipt.after)
    radius = max(SMALLEST, LARGEST * math.sqrt(point.nbytes / most))
    ends = [min(max(before - e, span[0]), span[1]) for e in (point.receipt.low, point.receipt.high)]
    text = f"{name}: {point.time_us:,.0f} µs, {_bytes(point.nbytes)}, {point.mixed}"
    edge = WIDTH - RIGHT
    return [
        f'<line x1="{at_x:.1f}" y1="{y(ends[0]):.1f}" x2="{at_x:.1f}" y2="{y(ends[1]):.1f}"'
        f' stroke="{colour}" stroke-width="1.5" stroke-opacity="0.45"/>',
        f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="{radius:.1f}" fill="{colour}"'
        ' fill-opacity="0.75" stroke="white"/>',
        f'<line x1="{at_x + radius:.1f}" y1="{at_y:.1f}" x2="{edge + 5}" y2="{label:.1f}"'
        f' stroke="{colour}" stroke-width="0.6"/>',
        f'<text x="{edge + 10}" y="{label + 4:.1f}" fill="{colour}">{escape(text)}</text>',
    ]


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """A linear axis: from a value to a coordinate."""
    return lambda value: start + (end - start) * (value - low) / (high - low)


def _grid(
    x: Callable[[float], float],
    y: Callable[[float], float],
    slowest: float,
    low: float,
    high: float,
    metric: str,
) -> list[str]:
    parts = []
    for value in _ticks(0.0, slowest):
        parts += [
            f'<line x1="{x(value):.1f}" y1="{TOP}" x2="{x(value):.1f}" y2="{HEIGHT - BOTTOM}"'
            ' stroke="#e5e5e5"/>',
            f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{value:,g}</text>",
        ]
    for value in _ticks(low, high):
        parts += [
            f'<line x1="{LEFT}" y1="{y(value):.1f}" x2="{WIDTH - RIGHT}" y2="{y(value):.1f}"'
            ' stroke="#e5e5e5"/>',
            f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>',
        ]
    middle, centre = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    return [
        *parts,
        f'<text x="{middle}" y="{HEIGHT - 16}" text-anchor="middle">µs a batch</text>',
        f'<text x="22" y="{centre}" transform="rotate(-90 22 {centre})" text-anchor="middle">'
        f"{escape(metric)} (%)</text>",
    ]


def _ticks(low: float, high: float) -> list[float]:
    """Between four and ten round numbers."""
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(s * power for s in (5, 2, 1) if (high - low) / (s * power) >= 4)
    first = math.ceil(low / step)
    return [round(i * step, 10) for i in range(first, math.floor(high / step) + 1)]


def _spread(heights: Sequence[float]) -> list[float]:
    """The heights moved apart so that labels do not overlap, in the same order."""
    placed, last = list(heights), -math.inf
    for index in sorted(range(len(heights)), key=heights.__getitem__):
        last = placed[index] = max(heights[index], last + GAP)
    over = max(0.0, last - (HEIGHT - BOTTOM))
    return [height - over for height in placed]
