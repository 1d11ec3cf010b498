"""The Pareto front of a budget's search: a chart and a table of plans that can be opened."""

from __future__ import annotations

import shlex
from pathlib import Path

from nicegui import ui

from tessella.artifacts import front as fronts
from tessella.artifacts.files import write_atomic
from tessella.artifacts.front import FrontInfo, FrontPoint, read_front
from tessella.artifacts.outline import Outline
from tessella.core.errors import TessellaError
from tessella.studio import charts, parts
from tessella.studio.context import Context
from tessella.studio.plan_accuracy import interval
from tessella.studio.theme import text
from tessella.studio.workspace import plain_name


def front_of(plan: Path) -> Path | None:
    """The folder of the Pareto front that a plan belongs to, or was chosen from."""
    for folder in (plan.parent, plan.with_suffix(".front")):
        if (folder / fronts.FILE).is_file():
            return folder
    return None


def precision_named(plan: Outline) -> str:
    """The precision of all layers, or "by layer" where each has its own."""
    return "by layer" if plan.manifest.precisions else plan.manifest.precision


def title_of(plan: Path) -> str:
    """A plan's title: its name, or the name of the Pareto front with the plan's place in it."""
    of_front = plan.parent.suffix == ".front"
    return f"{plan.parent.stem}-{plan.stem}" if of_front else plan.stem


def rebuilt(plan: Path, command: str, *, out: str) -> str:
    """The command that builds a plan again; a front's manifests have that of the chosen plan.

    Args:
        out: where it is to write.
    """
    of_front = plan.parent.suffix == ".front" and plan.stem.isdigit()
    if of_front and not command.startswith("tessella "):  # Python: a network in memory
        return f"{command}; of its table the plan {plan.stem}"
    if of_front:
        return f"{command} --point {plan.stem}"
    words = shlex.split(command) if command.startswith("tessella ") else []
    if "--out" not in words[:-1]:
        return command
    words[words.index("--out") + 1] = out
    return shlex.join(words)


def show_front(context: Context, path: Path) -> None:
    """The card of the Pareto front, if the plan at ``path`` comes from a budget's search."""
    folder = front_of(path)
    if folder is None:
        return
    with parts.card("What precision buys", "plans of which none is better than another in all"):
        try:
            _Front(context, folder, read_front(folder), path)
        except TessellaError as error:
            parts.note(str(error), "bad")


class _Front:
    def __init__(self, context: Context, folder: Path, info: FrontInfo, here: Path) -> None:
        self._context, self._folder, self._info = context, folder, info
        self._points = [(str(i), p) for i, p in enumerate(info.points)]
        if info.exact.plan not in [p.plan for _, p in self._points]:
            self._points.append(("fp32", info.exact))
        chosen = info.points[info.chosen].plan
        self._here = here.name if here.parent == folder else chosen
        text("p", self._words()).classes("muted small")
        for line in self._notes():
            parts.note(line, "warn")
        self._chart()
        self._table()
        if info.refused:
            with ui.expansion(f"Refused: {len(info.refused)}"):
                parts.table(
                    [parts.Column(title="what"), parts.Column(title="why")],
                    list(info.refused.items()),
                )
        if here.parent == folder:
            self._save(here)

    def _words(self) -> str:
        info, receipt = self._info, self._info.exact.receipt
        return (
            f"{receipt.metric} on {receipt.samples:,} samples, {info.evaluations} evaluations; "
            f"allowed to lose {info.budget:g} points of it. Times of whole plans at batch "
            f"{info.batch}. Click a point to open its plan."
        )

    def _notes(self) -> list[str]:
        info = self._info
        if info.resolution <= info.budget:
            return []
        return [
            f"{info.exact.receipt.samples:,} samples cannot resolve {info.budget:g} points of "
            f"{info.exact.receipt.metric}: a plan "
            f"that changes none of their answers may still lose {info.resolution:.2f} (95 %)."
        ]

    def _chart(self) -> None:
        before = 100 * self._info.exact.receipt.after
        chart = ui.echart(
            charts.pareto_front(
                [
                    charts.FrontPoint(
                        name=name,
                        line=f"{name}: {p.time_us:,.0f} µs, {100 * p.receipt.after:.2f} %, "
                        f"{parts.nbytes(p.nbytes)}, {_mixed(p)}",
                        time_us=p.time_us,
                        percent=100 * p.receipt.after,
                        low=before - p.receipt.high,
                        high=before - p.receipt.low,
                        nbytes=p.nbytes,
                        kind=self._kind(p),
                    )
                    for name, p in self._points
                ],
                limit=before - self._info.budget,
                metric=self._info.exact.receipt.metric,
            )
        ).classes("chart tall")
        chart.on_point_click(lambda e: self._open(str(e.data["plan"]) if e.data else ""))

    def _kind(self, point: FrontPoint) -> charts.Kind:
        if point.plan == self._info.points[self._info.chosen].plan:
            return "chosen"
        return "exact" if point.plan == self._info.exact.plan else "other"

    def _open(self, name: str) -> None:
        known = dict(self._points)
        if name in known:
            ui.navigate.to(self._address(known[name]))

    def _address(self, point: FrontPoint) -> str:
        ref = self._context.workspace.ref(self._folder / point.plan)
        return parts.address("/plan", plan=ref)

    def _table(self) -> None:
        exact_us = self._info.exact.time_us
        most = max(p.nbytes for _, p in self._points) or 1
        slowest = max(p.time_us for _, p in self._points) or 1.0
        columns = [parts.Column(title="plan", classes="nowrap")]
        metric = self._info.exact.receipt.metric
        titles = (f"{metric}, %", "points lost", "95 %", "answers changed")
        columns += [parts.Column(title=t, classes="r") for t in titles]
        columns += [parts.Column(title=t) for t in ("time", "bytes", "layers")]
        rows: list[tuple[parts.Cell, ...]] = []
        for name, point in self._points:
            receipt = point.receipt
            star = "  chosen" if self._kind(point) == "chosen" else ""
            speed = exact_us / point.time_us if point.time_us else 0.0
            rows.append((
                parts.Link(to=self._address(point), text=f"{name}{star}"),
                f"{100 * receipt.after:.2f} %",
                f"{receipt.loss:.2f}",
                interval(receipt),
                f"{receipt.flipped:,}",
                parts.Bar(fraction=point.time_us / slowest,
                          text=f"{point.time_us:,.0f} µs, {speed:.2f}×"),
                parts.Bar(fraction=point.nbytes / most, text=parts.nbytes(point.nbytes)),
                _mixed(point),
            ))  # fmt: skip
        parts.table(columns, rows, [p.plan == self._here for _, p in self._points])

    def _save(self, here: Path) -> None:
        """The field and button that save a point of the front as a plan of its own."""
        with parts.box("row-line wrap"):
            name = parts.field(ui.input("Keep this plan as", value=title_of(here))).style(
                "max-width:280px"
            )
            parts.plain_button("Save", lambda: self._keep(here, name.value or ""), "save")

    def _keep(self, here: Path, name: str) -> None:
        with parts.errors_shown():
            target = self._context.workspace.new_path("plan", plain_name(name))
            write_atomic(target, here.read_bytes())
            ui.navigate.to(parts.address("/plan", plan=self._context.workspace.ref(target)))


def _mixed(point: FrontPoint) -> str:
    return ", ".join(f"{count} {name}" for name, count in point.layers.items())
