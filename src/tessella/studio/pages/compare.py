"""The Compare page: several runs on one chart and in one table, the best first."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from nicegui import ui
from nicegui.events import ValueChangeEventArguments

from tessella.artifacts.run import Recipe, Run
from tessella.core.errors import TessellaError, UsageError
from tessella.core.task import CLASSIFICATION, TaskRecord
from tessella.jobs.job import Job
from tessella.studio import charts, parts
from tessella.studio.context import Context
from tessella.studio.feed import Feed, Point, thin
from tessella.studio.recipe_form import VISIBLE, flat
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.studio.workspace import readable

POLL_INTERVAL_S = 2.0
LINES = 12  # on the chart: the best ones
POINTS = 400  # of each
METRICS = {
    "val/loss": "Validation loss",
    "loss": "Loss",
    "lr": "Learning rate",
}
MISSING = "Choose runs at the left, or start a sweep on the Train page."


def register(context: Context) -> None:
    @ui.page("/compare", response_timeout=RESPONSE_S)
    async def compare(group: str = "") -> None:
        refs = ui.context.client.request.query_params.getlist("run")
        found = await asyncio.to_thread(context.workspace.runs)
        known = list(readable(found))
        groups = sorted({j.group for j in context.store.jobs() if j.group})
        subtitle = "Which settings are best, run beside run."
        with frame("Compare", subtitle, context.workspace.root, step="Monitor"):
            with parts.box("split"):
                try:
                    members = _members(context, group, refs)
                except TessellaError as error:
                    with parts.box("stack"):
                        _chooser(known, [], groups, group)
                    with parts.box("stack"):
                        parts.refused(error, MISSING)
                    return
                with parts.box("stack"):
                    _chooser(known, [m.ref for m in members], groups, group)
                with parts.box("stack"):
                    if not members:
                        with parts.empty("Nothing to compare yet", MISSING):
                            parts.button("Train a network", lambda: ui.navigate.to("/train"))
                        return
                    page = _Compare(context, members, group)
                    await page.refresh()
                    ui.timer(POLL_INTERVAL_S, page.refresh, immediate=False)


@dataclass(kw_only=True)
class _Member:
    """One of the compared runs; ``recipe`` is None until the run has begun."""

    ref: str
    path: Path
    feed: Feed
    job: Job | None = None
    recipe: Recipe | None = None
    task: TaskRecord = CLASSIFICATION
    status: str = "waiting"

    @property
    def name(self) -> str:
        return self.path.name

    def best(self) -> Point | None:
        """Epoch and value of the best score on the validation split so far."""
        points = self.feed.points.get(self.task.metric, [])
        return max(points, key=lambda p: (p[1], -p[0])) if points else None

    def rank(self) -> tuple[float, float, str]:
        """Sorts the best run first; without validation, the one with the lowest loss."""
        best, loss = self.best(), self.feed.latest("loss")
        return (-best[1] if best else 1.0, float("inf") if loss is None else loss, self.name)


def _members(context: Context, group: str, refs: list[str]) -> list[_Member]:
    """The runs of a sweep, and those named.

    Raises:
        UsageError: no such sweep. ArtifactError: no such run, or a damaged one.
    """
    jobs = [j for j in context.store.jobs() if j.group == group] if group else []
    if group and not jobs:
        raise UsageError("there is no sweep of this name", seen=group)
    outs = [context.workspace.ref(out) for j in jobs if (out := context.output_of(j)) is not None]
    members = []
    for ref in dict.fromkeys((*sorted(outs), *refs)):
        path = context.workspace.path(ref)
        member = _Member(ref=ref, path=path, feed=Feed(path / "events.jsonl"))
        if (path / "run.json").exists() or ref not in outs:
            info = Run(path).info
            member.recipe, member.task = info.recipe, info.task
            member.feed.read()
        members.append(member)
    return members


def _chooser(known: list[str], chosen: list[str], groups: list[str], group: str) -> None:
    def go() -> None:
        pairs = "&".join(parts.address("", run=ref).removeprefix("?") for ref in runs.value or ())
        ui.navigate.to(f"/compare?{pairs}")

    with parts.card("Runs to compare"):
        runs = parts.field(
            ui.select(list(dict.fromkeys((*known, *chosen))), multiple=True, value=chosen,
                      label="Runs").props("use-chips")
        )  # fmt: skip
        parts.plain_button("Compare", go, "compare_arrows")
    if groups:
        with parts.card("Sweeps", tight=True), parts.box("list"):
            for name in groups:
                with parts.link("/compare", f"item {'here' * (name == group)}", group=name):
                    text("span", name).classes("name cut")


class _Compare:
    """Chart and table, drawn again when a run has new points or another state."""

    def __init__(self, context: Context, members: list[_Member], group: str) -> None:
        self._context, self._members = context, members
        self._metric = members[0].task.metric
        curves = {m.task.metric: f"Validation {m.task.score}" for m in members} | METRICS
        self._shown: object = None
        with parts.card():
            with parts.box("row-line wrap"):
                title = group or (f"{len(members)} runs" if len(members) > 1 else members[0].name)
                text("h2", title).style("font-size:19px").classes("cut grow")
                self._abort = parts.plain_button("Abort all", self._abort_all, "stop")
            self._numbers = ui.element("div").classes("stack")
        with parts.card():
            with parts.box("row-line wrap"):
                text("h2", "Curves").classes("grow")
                ui.toggle(curves, value=self._metric, on_change=self._choose).props(
                    "unelevated dense no-caps padding='4px 12px' toggle-color=teal-9"
                )
            self._chart = ui.element("div").classes("chart tall")
            self._more = text("p", "").classes("muted small")
        with parts.card("Best first"):
            self._table = ui.element("div").classes("stack")

    async def refresh(self) -> None:
        """Read what every run has appended to its log; draw if anything changed."""
        jobs = {self._context.output_of(j): j for j in reversed(self._context.store.jobs())}
        for member in self._members:
            await asyncio.to_thread(self._read, member, jobs.get(member.path))
        ranked = sorted(self._members, key=_Member.rank)
        state = [(m.ref, m.status, {n: len(p) for n, p in m.feed.points.items()}) for m in ranked]
        if state != self._shown:
            self._shown = state
            self._draw(ranked)

    def _read(self, member: _Member, job: Job | None) -> None:
        if member.recipe is None and (member.path / "run.json").exists():
            member.recipe = Run(member.path).recipe
        member.job = job
        member.feed.read()
        if job is not None:
            member.status = job.status
        elif member.recipe is not None:
            member.status = member.feed.status

    def _draw(self, ranked: list[_Member]) -> None:
        active = [m for m in ranked if m.job is not None and not m.job.ended]
        self._abort.set_visibility(bool(active))
        self._numbers.clear()
        with self._numbers:
            numbers = [("runs", str(len(ranked)))]
            if active:
                numbers.append(("not finished", str(len(active))))
            if ranked and (best := ranked[0].best()) is not None:
                task = ranked[0].task
                score = parts.score(task.metric, best[1])
                numbers += [(f"best val {task.score}", score), ("by", ranked[0].name)]
            parts.stats(numbers)
        self._curves(ranked)
        self._table.clear()
        with self._table:
            _table(ranked)

    def _curves(self, ranked: list[_Member]) -> None:
        having = [m for m in ranked if m.feed.points.get(self._metric)]
        shown = [(m.name, thin(m.feed.points[self._metric], POINTS)) for m in having[:LINES]]
        self._chart.clear()
        with self._chart:
            if shown:
                few = [n for n, p in shown if len(p) <= POINTS // 4]
                ui.echart(charts.lines(shown, dots=few)).style("height:100%")
            else:
                text("p", "No points yet.").classes("muted small")
        left = len(having) - len(shown)
        self._more.text = (
            f"The best {LINES} are drawn; {left} more are in the table." if left else ""
        )
        self._more.set_visibility(left > 0)

    def _choose(self, event: ValueChangeEventArguments[str]) -> None:
        self._metric = event.value
        self._curves(sorted(self._members, key=_Member.rank))

    def _abort_all(self) -> None:
        with parts.errors_shown():
            for member in self._members:
                if member.job is not None and not member.job.ended:
                    self._context.store.abort(member.job.id)
            ui.notify("Stopping. The last checkpoints stay.")


def _table(ranked: list[_Member]) -> None:
    """A row for each run: what it reached, and the settings in which the runs differ."""
    known = {m.ref: flat(m.recipe) for m in ranked if m.recipe is not None}
    names = list(dict.fromkeys(name for plain in known.values() for name in plain))
    differ = [n for n in names if len({repr(plain.get(n)) for plain in known.values()}) > 1]
    columns = [parts.Column(title="run", classes="nowrap"), parts.Column(title="state")]
    scores = dict.fromkeys(m.task.score for m in ranked)
    columns += [parts.Column(title=f"best val {' or '.join(scores)}")]
    titles = ("at epoch", "val loss", "time", *(VISIBLE.get(n, n).lower() for n in differ))
    columns += [parts.Column(title=t.replace("_", " "), classes="r") for t in titles]
    rows: list[tuple[parts.Cell, ...]] = []
    for member in ranked:
        best, loss = member.best(), member.feed.latest("val/loss")
        plain, feed = known.get(member.ref, {}), member.feed
        took = (feed.last_time or 0.0) - (feed.started or 0.0)
        rows.append((
            parts.Link(to=parts.address("/monitor", run=member.ref), text=member.name),
            member.status,
            "" if best is None else _bar(member.task, best[1]),
            "" if best is None else f"{best[0]:.4g}",
            "" if loss is None else f"{loss:.4g}",
            parts.duration(took) if took > 0 else "",
            *(_shown(plain.get(n)) for n in differ),
        ))  # fmt: skip
    marked = [index == 0 and m.best() is not None for index, m in enumerate(ranked)]
    parts.table(columns, rows, marked)


def _bar(task: TaskRecord, score: float) -> parts.Bar:
    return parts.Bar(fraction=min(max(score, 0.0), 1.0), text=parts.score(task.metric, score))


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)
