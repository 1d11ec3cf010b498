"""A roofline as a picture: how far each kernel is from what the machine allows.

Williams, Waterman, Patterson 2009: attainable rate = min(arithmetic limit, intensity · bandwidth).
"""

from __future__ import annotations

import math
from html import escape

from tessella.search.report import Report, title

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 960, 540, 70, 310, 60, 70  # right: the labels
GAP = 16.0  # between labels
COLOURS = {"tessella": "#0b6e99", "user": "#7a3e9d"}  # libraries are grey


def svg(report: Report) -> str:
    """The roofline of the report's problem with a point a kernel, as an SVG document."""
    work, moved = report.problem.flops or 0, report.problem.nbytes
    intensity = work / moved if work and moved else 1.0  # nothing to compute has a place, too
    bandwidth = report.limits.copy_bytes_s
    ceiling = report.limits.flops_limit(report.problem) or bandwidth * intensity
    ridge = ceiling / bandwidth
    ran = [(f, f.tflops * 1e12) for f in report if f.tflops]
    rates = [rate for _, rate in ran] or [ceiling]
    x = _scale(min(intensity, ridge) / 8, max(intensity, ridge) * 8, LEFT, WIDTH - RIGHT)
    y = _scale(min(rates) / 3, max(ceiling, *rates) * 2, HEIGHT - BOTTOM, TOP)
    low, high = min(intensity, ridge) / 8, max(intensity, ridge) * 8
    floor = min(rates) / 3
    start = max(low, floor / bandwidth)
    roof = [(start, start * bandwidth), (ridge, ceiling), (high, ceiling)]
    problem, _, machine = title(report).partition(", on ")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="13">{escape(problem)}</text>',
        f'<text x="{LEFT}" y="42" fill="#555">{escape(machine)}</text>',
        *_grid(x, y, low, high, floor, max(ceiling, *rates) * 2),
        '<polyline fill="none" stroke="#444" stroke-width="2" points="'
        + " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in roof)
        + '"/>',
    ]
    labels = _spread([y(rate) for _, rate in ran])
    for (finding, rate), label in zip(ran, labels, strict=True):
        colour = COLOURS.get(finding.source, "#888888")
        at_x, at_y = x(intensity), y(rate)
        parts += [
            f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="5" fill="{colour}"/>',
            f'<line x1="{at_x + 6:.1f}" y1="{at_y:.1f}" x2="{WIDTH - RIGHT + 5}" y2="{label:.1f}"'
            f' stroke="{colour}" stroke-width="0.6"/>',
            f'<text x="{WIDTH - RIGHT + 10}" y="{label + 4:.1f}" fill="{colour}">'
            f"{escape(finding.algorithm)} ({finding.source}) {finding.time_us:.1f} µs</text>",
        ]
    return "\n".join([*parts, "</svg>", ""])


def _scale(low: float, high: float, start: float, end: float):  # type: ignore[no-untyped-def]
    """A logarithmic axis: from a value to a coordinate."""
    span = math.log(high / low)
    return lambda value: start + (end - start) * math.log(value / low) / span


def _grid(x, y, low: float, high: float, floor: float, top: float) -> list[str]:  # type: ignore[no-untyped-def]
    """Axes with lines at powers of ten; at 1, 2 and 5 times them for the rates."""
    parts = []
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        at = x(10.0**power)
        parts += [
            f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>',
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{10.0**power:g}</text>",
        ]
    powers = range(math.floor(math.log10(floor)), math.floor(math.log10(top)) + 1)
    for rate in (step * 10.0**power for power in powers for step in (1, 2, 5)):
        if not floor <= rate <= top:
            continue
        at, tflops = y(rate), rate * 1e-12
        parts += [
            f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#ddd"/>',
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tflops:g}</text>',
        ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [
        *parts,
        f'<text x="{middle}" y="{HEIGHT - 16}" text-anchor="middle">operations a byte</text>',
        f'<text x="16" y="{HEIGHT / 2}" transform="rotate(-90 16 {HEIGHT / 2})"'
        ' text-anchor="middle">TFLOP/s</text>',
    ]


def _spread(heights: list[float]) -> list[float]:
    """The heights moved apart so that labels do not overlap, in the same order."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = list(heights)
    last = -math.inf
    for index in order:
        last = placed[index] = max(heights[index], last + GAP)
    return placed
