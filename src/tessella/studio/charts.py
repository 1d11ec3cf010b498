"""Options for ECharts, with colours and axes that read well on light and dark pages.

A series that grows is never sent twice: ``append`` sends the new points only (see
``static/studio.js``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from nicegui import ui

from tessella.studio.feed import Point

COLORS = ("#1b9a8a", "#d9822b", "#6478cf", "#c3513f", "#9a62a8", "#8a9a3b")
_MUTED = "#87928c"
_LINES = "rgba(128,140,134,0.18)"
_LETTER_PX = 6.6  # of a label's font
_FONT = 'system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif'

Options = dict[str, Any]


def _frame() -> Options:
    return {
        "animation": False,
        "backgroundColor": "transparent",
        "textStyle": {"fontFamily": _FONT, "color": _MUTED},
        "color": list(COLORS),
        "grid": {"left": 8, "right": 18, "top": 34, "bottom": 8, "containLabel": True},
        "tooltip": {
            "trigger": "axis",
            "renderMode": "richText",  # drawn, not HTML: names stay text
            "confine": True,
            "backgroundColor": "rgba(28,34,31,0.94)",
            "borderWidth": 0,
            "textStyle": {"color": "#eef2f0", "fontSize": 12.5, "fontFamily": _FONT},
            "axisPointer": {"lineStyle": {"color": _MUTED}},
        },
    }


def _axis(kind: str, **more: Any) -> Options:
    short = {":formatter": "v => String(+v.toPrecision(4))"} if kind == "value" else {}
    return {
        "type": kind,
        "axisLine": {"show": False},
        "axisTick": {"show": False},
        "axisLabel": {"color": _MUTED, "fontSize": 11.5, "hideOverlap": True} | short,
        "splitLine": {"show": kind != "category", "lineStyle": {"color": _LINES}},
        **more,
    }


def lines(
    series: Sequence[tuple[str, list[Point]]],
    *,
    log: bool = False,
    dots: Sequence[str] = (),
    y_max: float | None = None,
) -> Options:
    """Lines over a number. ``dots`` names the series that also mark their points (few of them)."""
    return _frame() | {
        "legend": {
            "show": len(series) > 1,
            "top": 0,
            "right": 0,
            "icon": "roundRect",
            "itemWidth": 12,
            "itemHeight": 4,
            "textStyle": {"color": _MUTED},
        },
        "xAxis": _axis("value", min=0, max="dataMax", splitLine={"show": False}),
        "yAxis": _axis("log" if log else "value", scale=True)
        | ({"max": y_max} if y_max is not None else {}),
        "series": [
            {
                "type": "line",
                "name": name,
                "data": points,
                "showSymbol": name in dots,
                "symbolSize": 6,
                "sampling": "lttb",
                "lineStyle": {"width": 2},
                "emphasis": {"disabled": True},
            }
            for name, points in series
        ],
    }  # fmt: skip


def precision_recall(points: Sequence[Point], here: Point | None) -> Options:
    """Precision over recall, both 0 to 1; ``here`` is the point of the present threshold."""
    options = lines([("precision", list(points))])
    options["grid"] |= {"bottom": 26, "left": 30}
    titled = {"nameLocation": "middle", "nameTextStyle": {"color": _MUTED}}
    options["xAxis"] |= {"max": 1, "name": "recall", "nameGap": 26, **titled}
    options["yAxis"] |= {"min": 0, "max": 1, "name": "precision", "nameGap": 34, **titled}
    options["series"].append(
        {"type": "scatter", "name": "here", "symbolSize": 12, "itemStyle": {"color": COLORS[1]},
         "data": [] if here is None else [list(here)]}
    )  # fmt: skip
    return options


def reliability(bins: Sequence[tuple[float, float, int]]) -> Options:
    """Of images with a confidence, the share that is right, beside the diagonal.

    Args:
        bins: mean confidence, share that is right, and number of images.
    """
    most = max((count for _, _, count in bins), default=1)
    options = precision_recall([], None)
    options["legend"]["show"] = False
    options["xAxis"] |= {"name": "confidence", "min": 0}
    options["yAxis"]["name"] = "right"
    options["tooltip"] |= {"trigger": "item", ":formatter": "p => p.data.name ?? ''"}
    options["series"] = [
        {"type": "line", "name": "calibrated", "data": [[0, 0], [1, 1]], "showSymbol": False,
         "silent": True, "lineStyle": {"color": _MUTED, "type": "dashed", "width": 1}},
        {"type": "line", "name": "measured", "color": COLORS[0], "symbol": "circle",
         "data": [
             {"name": f"{count:,} images with {confidence:.3f} on average: {right:.3f} are right",
              "value": [round(confidence, 4), round(right, 4)],
              "symbolSize": 6 + 14 * math.sqrt(count / most)}
             for confidence, right, count in bins
         ]},
    ]  # fmt: skip
    return options


TURNED = 40  # degrees, where names have no room side by side
_BARS_PX = 700.0  # of an axis of names, at 1280 px


def bars(names: Sequence[str], series: Sequence[tuple[str, Sequence[float]]]) -> Options:
    """Stacked bars over names, a colour for each series, such as images of each class by split."""
    zoom = len(names) > 60
    shown = [shorten(n) for n in names]
    wide = _LETTER_PX * max(map(len, shown), default=1)
    turned = len(names) * (wide + 8) > _BARS_PX
    grid = _frame()["grid"]
    if turned:  # the first name ends below its bar and begins left of the axis
        grid["left"] += max(0, round(math.cos(math.radians(TURNED)) * wide) - 30)
    options = _frame() | {
        "grid": grid,
        "legend": {"show": len(series) > 1, "top": 0, "right": 0, "icon": "roundRect",
                   "itemWidth": 12, "itemHeight": 8, "textStyle": {"color": _MUTED}},
        "xAxis": _axis("category", data=shown)
        | {"axisLabel": {"color": _MUTED, "fontSize": 11.5, "hideOverlap": True,
                         "rotate": TURNED if turned else 0}},
        "yAxis": _axis("value"),
        "series": [
            {"type": "bar", "name": name, "stack": "all", "data": list(values), "barMaxWidth": 46,
             "emphasis": {"disabled": True}}
            for name, values in series
        ],
    }  # fmt: skip
    options["tooltip"]["trigger"] = "axis"
    options["tooltip"]["axisPointer"] = {"type": "shadow"}
    if zoom:
        options["dataZoom"] = [{"type": "inside", "start": 0, "end": 100 * 60 / len(names)}]
    return options


def histogram(counts: Sequence[float], edges: Sequence[float], color: str = COLORS[0]) -> Options:
    """A small histogram: ``counts`` between ``edges`` (one more than counts).

    Of its axis the ends and the middle are labelled, the ends inwards: there is no room beside it.
    """
    middles = [f"{(a + b) / 2:.3g}" for a, b in pairwise(edges)]
    last = len(middles) - 1
    options = _frame() | {
        "grid": {"left": 4, "right": 4, "top": 6, "bottom": 22},
        "xAxis": _axis("category", data=middles)
        | {"axisLabel": {"color": _MUTED, "fontSize": 11.5, "alignMinLabel": "left",
                         "alignMaxLabel": "right",
                         ":interval": f"i => i === 0 || i === {last // 2} || i === {last}"}},
        "yAxis": _axis("value", show=False),
        "series": [{"type": "bar", "data": list(counts), "barCategoryGap": "12%",
                    "itemStyle": {"color": color}, "emphasis": {"disabled": True}}],
    }  # fmt: skip
    options["tooltip"]["axisPointer"] = {"type": "shadow"}
    return options


NUMBERED = 30  # classes: the cells of more have no room for their numbers
LIGHT = 0.75  # of a row: a cell with less is light, and its number dark
_MOST_LABELS = 34  # of an axis of 600 px


def confusion(labels: Sequence[str], matrix: Sequence[Sequence[int]]) -> Options:
    """A heat map: rows are the true classes, columns the network's answers.

    Cells without images are left out: 20 classes have 400 cells, 200 have 40,000, nearly all of
    them 0.
    """
    names = [shorten(n) for n in labels]
    share = [sum(row) or 1 for row in matrix]
    data = [
        {
            "name": f"{labels[r]} taken for {labels[c]}: {n:,}",
            "value": [c, r, round(100 * n / share[r], 2), _brief(n)],
            "label": {"color": "#ffffff" if n > LIGHT * share[r] else "#1d2622"},
        }
        for r, row in enumerate(matrix)
        for c, n in enumerate(row)
        if n
    ]
    numbered = len(labels) <= NUMBERED
    room = round(_LETTER_PX * max(map(len, names), default=1)) + 14
    step = 1 if numbered else -(-len(labels) // _MOST_LABELS)  # "auto" lets them overlap
    label = {"color": _MUTED, "fontSize": 11.5, "interval": step - 1}
    lines = {"show": numbered, "lineStyle": {"color": _LINES}}
    upright = len(labels) > 6
    return _frame() | {
        "grid": {"left": room, "right": 16, "top": room if upright else 30, "bottom": 8},
        "tooltip": {**_frame()["tooltip"], "trigger": "item", ":formatter": "p => p.data.name"},
        "xAxis": _axis("category", data=names, position="top")
        | {"axisLabel": label | {"rotate": 90 if upright else 0}, "splitLine": lines},
        "yAxis": _axis("category", data=names, inverse=True)
        | {"axisLabel": label, "splitLine": lines},
        "visualMap": {
            "show": False,
            "min": 0,
            "max": 100,
            "dimension": 2,
            "inRange": {"color": ["#dff0ee", "#7cc1b8", "#12796c"]},  # also on a dark page
        },
        "series": [
            {
                "type": "heatmap",
                "data": data,
                "label": {
                    "show": numbered,
                    ":formatter": "p => p.data.value[3]",
                    "fontSize": 11 if len(labels) > 12 else 12.5,
                },
            }
        ],
    }


def confusion_size(labels: Sequence[str]) -> str:
    """A size, as CSS, at which each cell of a small matrix has room for its number."""
    room = _LETTER_PX * min(18, max(map(len, labels), default=1))
    height = round(room if len(labels) > 6 else 16) + 22 + max(150, min(600, 27 * len(labels)))
    return f"height:{height}px;max-width:{round(room) + 30 + max(400, 56 * len(labels))}px"


def _brief(count: int) -> str:
    """A count in at most four characters."""
    for size, unit in ((1_000_000, "M"), (1000, "k")):
        if count >= size:
            return f"{count / size:.2g}{unit}" if count < 10 * size else f"{count // size}{unit}"
    return str(count)


Kind = Literal["chosen", "exact", "other"]
_KINDS: dict[Kind, tuple[str, str]] = {
    "chosen": ("chosen", COLORS[0]),
    "exact": ("float32", COLORS[2]),
    "other": ("another plan", "#8b9691"),
}
LARGEST, SMALLEST = 34.0, 8.0  # diameter of the point with the most bytes, and the least diameter


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """A plan in a Pareto front; its metric lies between ``low`` and ``high`` (95 %)."""

    name: str
    line: str
    time_us: float
    percent: float
    low: float
    high: float
    nbytes: int
    kind: Kind


def pareto_front(points: Sequence[FrontPoint], *, limit: float, metric: str) -> Options:
    """The metric (percent) over time, memory as area; ``limit``: the least metric allowed."""
    values = [limit, *(p.percent for p in points)]
    room = max(0.2, 0.25 * (max(values) - min(values)))
    least, most = min(values) - room, max(values) + room
    largest = max(p.nbytes for p in points) or 1
    series: list[Options] = [
        {
            "type": "scatter",
            "name": title,
            "itemStyle": {"color": color, "opacity": 0.85},
            "data": [
                {
                    "name": p.line,
                    "plan": p.name,
                    "value": [round(p.time_us, 2), round(p.percent, 3)],
                    "symbolSize": max(SMALLEST, LARGEST * math.sqrt(p.nbytes / largest)),
                    "label": {"show": True, "formatter": p.name, "position": "right",
                              "color": _MUTED, "fontSize": 11.5},
                }
                for p in points if p.kind == kind
            ],
        }
        for kind, (title, color) in _KINDS.items() if any(p.kind == kind for p in points)
    ]  # fmt: skip
    series += [
        {
            "type": "line", "name": "95 %", "silent": True, "showSymbol": False,
            "lineStyle": {"color": _KINDS[p.kind][1], "width": 1.5, "opacity": 0.45},
            "data": [[p.time_us, max(p.low, least)], [p.time_us, min(p.high, most)]],
            "tooltip": {"show": False},
        }
        for p in points
    ]  # fmt: skip
    series[0]["markLine"] = {
        "silent": True, "symbol": "none", "data": [{"yAxis": round(limit, 3)}],
        "lineStyle": {"color": COLORS[3], "type": "dashed"},
        "label": {"formatter": "budget", "position": "insideStartTop", "color": COLORS[3]},
    }  # fmt: skip
    titled = {"nameTextStyle": {"color": _MUTED}, "nameLocation": "middle"}
    ends = {"color": _MUTED, "fontSize": 11.5, "showMinLabel": False, "showMaxLabel": False}
    return _frame() | {
        "grid": {"left": 34, "right": 24, "top": 34, "bottom": 26, "containLabel": True},
        "legend": {"top": 0, "right": 0, "textStyle": {"color": _MUTED}, "itemWidth": 10,
                   "data": [s["name"] for s in series if s["type"] == "scatter"]},
        "tooltip": {**_frame()["tooltip"], "trigger": "item", ":formatter": "p => p.data.name"},
        "xAxis": _axis("value", min=0, name="µs a batch", nameGap=26, **titled),
        "yAxis": _axis("value", min=round(least, 2), max=round(min(most, max(100.0, *values)), 2),
                       name=f"{shorten(metric)} (%)", nameGap=48, axisLabel=ends, **titled),
        "series": series,
    }  # fmt: skip


def shorten(name: str, most: int = 18) -> str:
    """The name, or its beginning and its end: classes may differ in either."""
    if len(name) <= most:
        return name
    end = most // 3
    return f"{name[: most - 1 - end]}…{name[-end:]}"


def append(chart: ui.echart, additions: Sequence[tuple[int, list[Point]]]) -> str:
    """Send new points to a chart: (series index, points). Returns what was sent."""
    code = f"studio.append({chart.id},{json.dumps(additions, separators=(',', ':'))})"
    ui.run_javascript(code)
    return code


def replace(chart: ui.echart, series: Sequence[list[Point]]) -> None:
    """Replace all points of a chart's series."""
    ui.run_javascript(f"studio.replace({chart.id},{json.dumps(series, separators=(',', ':'))})")


def log_scale(chart: ui.echart, on: bool) -> None:
    """Switch the vertical axis between linear and logarithmic."""
    ui.run_javascript(f"studio.logScale({chart.id},{json.dumps(on)})")
