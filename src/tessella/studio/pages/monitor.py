"""The Monitor page: a run's curves, progress, machine and log, while it runs and afterwards.

The page follows ``events.jsonl`` of any run folder or job, so it also shows runs that were started
in a terminal.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from nicegui import ui

from tessella.artifacts.run import Run
from tessella.core.errors import ArtifactError, TessellaError
from tessella.core.record import to_plain
from tessella.core.task import TaskRecord
from tessella.jobs import commands
from tessella.jobs.job import Job
from tessella.studio import charts, parts
from tessella.studio.context import Context
from tessella.studio.entries import best_score, job_entry, run_entry
from tessella.studio.feed import Feed, Point, tail, thin
from tessella.studio.keeping import job_tools, shown_label, tools
from tessella.studio.machine import Machine
from tessella.studio.standing import log_line, standing, training_line
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.tasks import of

POLL_INTERVAL_S = 1.0
SIDE_INTERVAL_S = 3.0
MISSING = "Choose a run at the left, or train one: a run is a folder with a run.json."

RATE = ("Learning rate", "lr")  # beside the curves that the run's task names


def register(context: Context) -> None:
    @ui.page("/monitor", response_timeout=RESPONSE_S)
    async def monitor(run: str = "", job: str = "") -> None:
        await _page(context, run, job)


async def _page(context: Context, ref: str, job_id: str) -> None:
    space = context.workspace
    runs = await asyncio.to_thread(space.runs)
    job, problem = None, None
    try:
        job = context.store.job(job_id) if job_id else None
    except TessellaError as error:
        problem = error
    if job is not None and job.kind == "train" and (out := context.output_of(job)) is not None:
        ref = space.ref(out)
    if not ref and not job_id and runs:
        ref = next((f.ref for f in runs if f.item is not None), "")
    with frame("Monitor", "What a run is doing, while it does it.", space.root):
        with parts.box("split"):
            side = parts.box("stack")
            with parts.box("stack"):
                try:
                    if problem is not None:
                        raise problem
                    await _main(context, ref, job)
                except TessellaError as error:
                    parts.refused(error, MISSING)
            with side:  # last, since NiceGUI sends the page when the first timer starts
                _side(context, ref)


async def _main(context: Context, ref: str, job: Job | None) -> None:
    if ref:
        await _watch_run(context, context.workspace.path(ref))
    elif job is not None:
        await _watch_job(context, job)
    else:
        with parts.empty("Nothing to watch yet", "Start a training; it appears here."):
            parts.button("Train a network", lambda: ui.navigate.to("/train"))


def _side(context: Context, ref: str) -> None:
    """The machine, and the other runs and jobs; refreshed while the page is open."""
    Machine(str(context.workspace.root))
    with parts.card("Runs", tight=True):
        with parts.link("/compare", "small"):
            text("span", "Compare runs")
        listed = parts.box("list").style("max-height:44vh;overflow:auto")
    with parts.card("Jobs", tight=True) as jobs_card:
        jobs_list = parts.box("list")
    shown: list[object] = [None, None]

    async def refresh() -> None:
        found = await asyncio.to_thread(
            lambda: [(f, best_score(f.item)) for f in context.workspace.runs()]
        )
        titles = {f.ref: context.labels.title(f.ref, f.path.name) for f, _ in found}
        lines = [(f.ref, titles[f.ref], s, f.problem, parts.ago(f.modified)) for f, s in found]
        if lines != shown[0]:
            shown[0] = lines
            listed.clear()
            with listed:
                for entry, score in found:
                    run_entry(entry, titles[entry.ref], score, here=entry.ref == ref)
                if not found:
                    text("p", "None in this workspace.").classes("muted small")
        # a training that is done is among the runs; one that was stopped may have no run
        others = [j for j in context.store.jobs() if j.kind != "train" or j.status != "done"][:12]
        states = [(j.id, j.name, j.state, j.priority, j.notes) for j in others]
        if states != shown[1]:
            shown[1] = states
            jobs_card.set_visibility(bool(others))
            jobs_list.clear()
            with jobs_list:
                for other in others:
                    job_entry(other)

    ui.timer(SIDE_INTERVAL_S, refresh)


async def _watch_run(context: Context, path: Path) -> None:
    """Curves and state of the run at ``path``, updated as its log grows."""
    if not (path / "run.json").exists():
        await _wait_for(context, path)
        return
    info = Run(path)
    task = info.info.task
    feed = Feed(path / "events.jsonl")
    await asyncio.to_thread(feed.read)
    ref = context.workspace.ref(path)
    head = _Head(context, context.labels.title(ref, path.name), path)
    curves = _Curves(feed, (*of(task).charts.CURVES, RATE))
    with parts.box("duo"):
        log = _Log()
        with parts.card("How to do the same"):
            again = context.workspace.ref(context.workspace.free_path(path))
            parts.Command(commands.shown(commands.train(info.recipe, again)))
            with ui.expansion("The whole recipe"):
                recipe = to_plain(info.recipe)
                parts.table(
                    [parts.Column(title="setting"), parts.Column(title="value", classes="m")],
                    [(k, str(v)) for k, v in _flat(recipe)],
                )

    async def refresh(first: bool = False) -> None:
        news = await asyncio.to_thread(feed.read)
        curves.add(news.points, restarted=news.restarted)
        job = context.job_for(path)
        head.show(feed, job)
        if news.points or first:
            head.numbers(_numbers(feed, task))
        log.show(job)

    await refresh(first=True)
    ui.timer(POLL_INTERVAL_S, refresh, immediate=False)


async def _wait_for(context: Context, path: Path) -> None:
    """Show the job of a run that has not begun yet; go to the run when it has."""
    job = context.job_for(path)
    if job is None:
        raise ArtifactError("there is no run here", seen=context.workspace.ref(path))
    await _watch_job(context, job)

    def begun() -> None:
        if (path / "run.json").exists():
            ui.navigate.to(parts.address("/monitor", run=context.workspace.ref(path)))

    ui.timer(POLL_INTERVAL_S, begun)


async def _watch_job(context: Context, job: Job) -> None:
    """State, progress and log of a job that is not a training."""
    feed = Feed(job.events_path)
    head = _Head(context, job.name, None)
    log = _Log()
    with parts.card("How to do the same"):
        parts.Command(job.command)

    async def refresh() -> None:
        await asyncio.to_thread(feed.read)
        now = context.store.job(job.id)
        head.show(feed, now)
        log.show(now)

    await refresh()
    ui.timer(POLL_INTERVAL_S, refresh, immediate=False)


class _Head:
    """Name, state, progress, and the buttons that this state allows."""

    def __init__(self, context: Context, name: str, path: Path | None) -> None:
        self._context, self._path = context, path
        self._job: Job | None = None
        with parts.card():
            with parts.box("row-line"):
                text("h2", name).style("font-size:19px").classes("cut")
                self._badge = parts.badge("waiting")
                ui.element("div").classes("grow")
                self._abort = parts.plain_button("Abort", self._on_abort, "stop")
                self._resume = parts.plain_button("Resume", self._on_resume, "play_arrow")
                if path is not None:
                    explore = parts.address("/explore", run=context.workspace.ref(path))
                    compiling = parts.address("/plan", source=context.workspace.ref(path))
                    parts.plain_button("Explore", lambda: ui.navigate.to(explore), "visibility")
                    parts.plain_button("Compile", lambda: ui.navigate.to(compiling), "bolt")
                    tools(context, "run", context.workspace.ref(path))
                else:
                    self._job_tools = ui.element("div").classes("row-line").style("gap:0")
            if path is not None:
                shown_label(context, context.workspace.ref(path))
            self._notes = text("p", "").classes("notes")
            self._track = parts.Track()
            self._numbers = ui.element("div").classes("stack")
            self._way = text("p", "").classes("muted small")
            self._note = text("div", "").classes("note")
            self._note.set_visibility(False)

    def show(self, feed: Feed, job: Job | None) -> None:
        if job is not None and self._path is None and (self._job is None or
                                                       self._job.state != job.state):  # fmt: skip
            self._job_tools.clear()
            with self._job_tools:
                job_tools(self._context, job)
        self._job = job
        status = job.status if job is not None else feed.status
        parts.show_status(self._badge, job.state if job is not None else status)
        self._notes.text = job.notes if job is not None else ""
        self._notes.set_visibility(bool(self._notes.text))
        running = status in ("running", "waiting")
        self._abort.set_visibility(job is not None and running and not job.aborting)
        stopped = status in ("failed", "aborted") or (status == "done" and job is None)
        self._resume.set_visibility(stopped and (self._path is not None) and not feed.result)
        fraction = 1.0 if status == "done" else feed.fraction
        store = self._context.store
        if job is not None and self._path is None:
            line = standing(store, job, feed)
        else:
            line = training_line(store, job, feed, status)
        self._track.show(fraction, line)
        self._way.text = feed.way
        self._way.set_visibility(bool(feed.way))
        problem = feed.error or (job.error if job is not None else "") or ""
        if status == "failed" and problem:
            self._say(problem, "bad")
        elif feed.warnings:
            self._say(feed.warnings[-1], "warn")
        else:
            self._note.set_visibility(False)

    def numbers(self, values: list[tuple[str, str]]) -> None:
        """The newest values of all metrics."""
        self._numbers.clear()
        with self._numbers:
            parts.stats(values)

    def _say(self, line: str, kind: str) -> None:
        self._note.text = line
        self._note.classes(remove="bad warn", add=kind)
        self._note.set_visibility(True)

    def _on_abort(self) -> None:
        if self._job is not None:
            with parts.errors_shown():
                self._context.store.abort(self._job.id)
                ui.notify("Stopping. The last checkpoint stays.")

    def _on_resume(self) -> None:
        if self._path is None:
            return
        with parts.errors_shown():
            run, job, space = Run(self._path), self._job, self._context.workspace
            dataset = space.dataset_of(run)
            if job is not None and dataset in job.argv:
                self._context.store.resume(job.id)
                return
            spec = commands.train(replace(run.recipe, dataset=dataset), space.ref(self._path))
            spec = replace(spec, argv=(*spec.argv, *spec.resume_argv))
            if job is not None:  # its command names a place that the dataset has left
                kept = {name: getattr(job, name) for name in ("name", "notes", "priority", "group")}
                spec = replace(spec, **kept)
            self._context.store.submit(spec)


class _Curves:
    """One chart for each kind of metric, drawn again only when a series appears.

    Args:
        curves: a title, and how the names of its metrics end; the first is drawn large.
    """

    def __init__(self, feed: Feed, curves: tuple[tuple[str, str], ...]) -> None:
        self._feed, self._endings = feed, dict(curves)
        self._charts: dict[str, ui.echart] = {}
        self._series: dict[str, list[str]] = {}
        self._boxes: dict[str, ui.element] = {}
        self._logs: dict[str, bool] = {}
        with parts.box("stack"):
            first, *others = self._endings
            self._card(first, "tall")
            with parts.box("duo"):
                for title in others:
                    self._card(title, "")
        for title in self._endings:
            self._draw(title)

    def add(self, points: dict[str, list[Point]], *, restarted: bool) -> None:
        """Send the new points, and nothing else."""
        for title in self._endings:
            names = self._names(title)
            if names != self._series[title]:
                self._draw(title)
                continue
            if restarted:
                charts.replace(self._charts[title], [thin(self._feed.points[n]) for n in names])
                continue
            additions = [(i, points[n]) for i, n in enumerate(names) if points.get(n)]
            if additions:
                charts.append(self._charts[title], additions)

    def _card(self, title: str, size: str) -> None:
        with parts.card():
            with parts.box("row-line"):
                text("h2", title)
                text("span", "over the epochs").classes("hint grow")
                switch = ui.switch("log scale", on_change=lambda e: self._log(title, e.value))
                switch.props("dense size=sm").classes("muted small")
            self._boxes[title] = ui.element("div").classes(f"chart {size}")
        self._logs[title] = False

    def _names(self, title: str) -> list[str]:
        ending = self._endings[title]
        return sorted(n for n in self._feed.points if n.rsplit("/", 1)[-1] == ending)

    def _draw(self, title: str) -> None:
        names = self._names(title)
        self._series[title] = names
        series = [(n, thin(self._feed.points[n])) for n in names]
        dots = [n for n in names if "/" in n]  # once an epoch: few enough to mark
        self._boxes[title].clear()
        with self._boxes[title]:
            if not names:
                text("p", "Nothing yet: points come with steps, or with validations.").classes(
                    "muted small"
                )
                return
            options = charts.lines(series, log=self._logs[title], dots=dots)
            self._charts[title] = ui.echart(options).style("height:100%")

    def _log(self, title: str, on: bool) -> None:
        self._logs[title] = on
        if title in self._charts:
            charts.log_scale(self._charts[title], on)


class _Log:
    """The end of the command's output."""

    def __init__(self) -> None:
        with parts.card("Log"):
            self._text = text("pre", "").classes("log")

    def show(self, job: Job | None) -> None:
        content = tail(job.log_path) if job is not None else ""
        shown = content or log_line(job)
        if self._text.text != shown:
            self._text.text = shown
            ui.run_javascript(
                f"{{const e=getHtmlElement({self._text.id});if(e)e.scrollTop=e.scrollHeight}}"
            )


_NAMES = {
    "lr": "learning rate",
    "images_per_s": "images a second",
    "data_wait": "waited for images, of the time",
    "loss": "loss of the step",
}


def _numbers(feed: Feed, task: TaskRecord) -> list[tuple[str, str]]:
    """The newest value of each metric, for people; the epoch and the best score first."""
    epoch = max((p[-1][0] for p in feed.points.values() if p), default=0.0)
    out = [("epoch", f"{epoch:.2f}")]
    if scores := [value for _, value in feed.points.get(task.metric, [])]:
        out.append((f"best val {task.score}", parts.score(task.metric, max(scores))))
    for name in sorted(feed.points, key=lambda n: ("/" not in n, n)):
        value = feed.latest(name)
        if value is not None:
            shown = f"{100 * value:.2g} %" if name == "data_wait" else parts.score(name, value)
            out.append((_NAMES.get(name, parts.metric_name(name)), shown))
    return out


def _flat(plain: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for key, value in plain.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((prefix + key, value))
    return rows
