"""The Search page: many trainings that look for the best settings, started and watched."""

from __future__ import annotations

import asyncio
import json
import time

from nicegui import ui

from tessella.artifacts.sweep import Sweep, SweepInfo, Trial, folder_of
from tessella.core.errors import TessellaError
from tessella.core.version import VERSION
from tessella.jobs.job import Job, JobSpec
from tessella.studio import parts
from tessella.studio.context import Context
from tessella.studio.entries import unreadable
from tessella.studio.feed import SILENT_S, Feed
from tessella.studio.keeping import shown_label, tools
from tessella.studio.search_form import SearchForm
from tessella.studio.standing import standing
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.studio.workspace import Found, readable

POLL_INTERVAL_S = 2.0
LONGER = 3  # times the epochs of a trial
MISSING = "Choose a search at the left, or start one."


def register(context: Context) -> None:
    @ui.page("/search", response_timeout=RESPONSE_S)
    async def search(sweep: str = "", dataset: str = "", like: str = "") -> None:
        space = context.workspace
        datasets = readable(await asyncio.to_thread(space.datasets))
        sweeps = await asyncio.to_thread(space.sweeps)
        ui.add_head_html(f'<script src="/static/trials.js?v={VERSION}"></script>')
        with frame("Search", "The best settings, found by many trials.", space.root, step="Train"):
            if not datasets:
                with parts.empty("There is no dataset yet", "A search compares trainings on one."):
                    parts.button("Import images", lambda: ui.navigate.to("/data"))
                return
            if not sweep and not like and not dataset and sweeps:
                sweep = next((f.ref for f in sweeps if f.item is not None), "")
            with parts.box("split"):
                with parts.box("stack"):
                    try:
                        base = (await asyncio.to_thread(space.sweep, like))[0] if like else None
                        chosen = dataset or next(iter(datasets))
                        space.dataset(chosen)
                        with parts.card("New search"):
                            SearchForm(context, datasets, chosen, base,
                                       lambda ref, spec: _begin(context, ref, spec))  # fmt: skip
                    except TessellaError as error:
                        parts.refused(error, MISSING)
                    _listed(context, sweeps, sweep)
                with parts.box("stack first-if-narrow" if sweep else "stack"):
                    try:
                        if sweep:
                            await _watch(context, sweep)
                            return
                    except TessellaError as error:
                        parts.refused(error, MISSING)
                        return
                    parts.empty(
                        "No search is open",
                        "Choose which settings may vary and how many trials that may cost. Trials "
                        "that fall behind end early.",
                    )


def _begin(context: Context, ref: str, spec: JobSpec) -> None:
    context.store.submit(spec)
    ui.navigate.to(parts.address("/search", sweep=ref))


def _listed(context: Context, sweeps: list[Found[tuple[SweepInfo, Sweep]]], here: str) -> None:
    if not sweeps:
        return
    with parts.card("Searches", tight=True), parts.box("list"):
        for entry in sweeps:
            with parts.link("/search", f"item {'here' * (entry.ref == here)}", sweep=entry.ref):
                if entry.item is None:
                    unreadable(entry)
                    continue
                info, sweep = entry.item
                text("span", context.labels.title(entry.ref, entry.path.name)).classes("name cut")
                best = _best(sweep)
                score = "" if best is None else parts.score(info.score, best.score or 0.0)
                text("span", score).classes("detail num")
                axes = ", ".join(axis.path for axis in info.axes)
                line = f"{len(sweep.trials)} trials · {axes} · {parts.ago(entry.modified)}"
                text("span", line).classes("detail cut")


def _best(sweep: Sweep) -> Trial | None:
    first = next(iter(sweep.trials), None)
    return first if first is not None and first.state == "complete" else None


async def _watch(context: Context, ref: str) -> None:
    """State, best trial, plot and table of a sweep; what changes is drawn as it comes."""
    path = context.workspace.path(ref)
    job = context.job_for(path)
    if job is not None and not job.ended and not (path / "sweep.json").exists():
        _await_begin(context, ref, job)
        return
    await asyncio.to_thread(context.workspace.sweep, ref)
    head = _Head(context, ref)
    with parts.card("Settings and score", "a line for each trial, the best ones dark"):
        text("p", "Drag along an axis to keep only the trials in that range; click it to let go."
             ).classes("muted small")  # fmt: skip
        plot = parts.box("parallel")
    with parts.card("Trials"):
        table = parts.box("stack").style("gap:8px")
    given = json.dumps({"plot": plot.id, "table": table.id, "ref": ref}).replace("<", "\\u003c")
    ui.add_head_html(f"<script>trials.open({given})</script>")
    await head.refresh()
    ui.timer(POLL_INTERVAL_S, head.refresh, immediate=False)


def _await_begin(context: Context, ref: str, job: Job) -> None:
    """A search whose command has not written its first file."""
    with parts.card():
        with parts.box("row-line"):
            text("h2", job.name).style("font-size:19px").classes("cut grow")
            badge = parts.badge(job.state)
        track = parts.Track()
    feed = Feed(job.events_path)

    def refresh(now: Job) -> None:
        feed.read()
        parts.show_status(badge, now.state)
        track.show(0.0, standing(context.store, now, feed))
        if now.ended or (context.workspace.path(ref) / "sweep.json").exists():
            ui.navigate.to(parts.address("/search", sweep=ref))

    refresh(job)
    context.follow(job, refresh)


class _Head:
    """Name, state, numbers, and the best trial with what can be done with it."""

    def __init__(self, context: Context, ref: str) -> None:
        self._context, self._ref = context, ref
        self._path = context.workspace.path(ref)
        self._job: Job | None = None
        self._feed: Feed | None = None
        self._shown: object = None
        with parts.card():
            with parts.box("row-line wrap"):
                title = context.labels.title(ref, self._path.name)
                text("h2", title).style("font-size:19px").classes("cut")
                self._badge = parts.badge("waiting")
                ui.element("div").classes("grow")
                self._abort = parts.plain_button("Stop", self._on_abort, "stop")
                self._resume = parts.plain_button("Go on", self._on_resume, "play_arrow")
                tools(context, "sweep", ref)
            shown_label(context, ref)
            self._track = parts.Track()
            self._numbers = ui.element("div").classes("stack")
            self._problem = text("div", "").classes("note bad")
            self._best = ui.element("div").classes("stack")

    async def refresh(self) -> None:
        try:
            info, sweep = await asyncio.to_thread(self._context.workspace.sweep, self._ref)
        except TessellaError as error:  # it was deleted meanwhile
            self._problem.text = str(error)
            self._problem.set_visibility(True)
            return
        job = self._context.job_for(self._path)
        if job is not None and (self._job is None or job.id != self._job.id):
            self._feed = Feed(job.events_path)
        self._job = job
        ended = sum(trial.state != "running" for trial in sweep.trials)
        if job is not None:
            status: str = job.state
        elif ended >= info.trials:
            status = "done"
        else:
            alive = await asyncio.to_thread(self._alive, sweep)
            status = "running" if alive else "stopped"
        parts.show_status(self._badge, status)
        active = job is not None and not job.ended
        self._abort.set_visibility(active)
        self._resume.set_visibility(job is not None and job.status in ("failed", "aborted"))
        self._track.show(ended / info.trials, self._line(job, ended, info))
        self._problem.text = (job.error or "") if job is not None else ""
        self._problem.set_visibility(bool(self._problem.text))
        if sweep is not self._shown:
            self._shown = sweep
            self._draw(info, sweep, ended)

    def _alive(self, sweep: Sweep) -> bool:
        """Whether a trial of a sweep that no job of ours drives has written something lately."""
        running = (folder_of(self._path, t.number) for t in sweep.trials if t.state == "running")
        files = (file for folder in running for file in (folder, folder / "events.jsonl"))
        written = [file.stat().st_mtime for file in files if file.exists()]
        return time.time() - max(written, default=0.0) < SILENT_S

    def _line(self, job: Job | None, ended: int, info: SweepInfo) -> str:
        said = f"{ended:,} of {info.trials:,} trials ended"
        if job is None or self._feed is None:
            return f"{said} · started in a terminal"
        self._feed.read()
        return said if job.ended else f"{said} · {standing(self._context.store, job, self._feed)}"

    def _draw(self, info: SweepInfo, sweep: Sweep, ended: int) -> None:
        best = _best(sweep)
        counts = {s: sum(t.state == s for t in sweep.trials) for s in ("pruned", "failed")}
        numbers = [("trials", f"{ended:,}"), ("ended early", f"{counts['pruned']:,}")]
        numbers += [("failed", f"{counts['failed']:,}")] * bool(counts["failed"])
        if best is not None:
            score = parts.score(info.score, best.score or 0.0)
            numbers.insert(0, (f"best {info.score.replace('/', ' ')}", score))
        spent = sum(trial.seconds for trial in sweep.trials)
        numbers.append(("of training", parts.duration(spent)))
        self._numbers.clear()
        with self._numbers:
            parts.stats(numbers)
        self._best.clear()
        with self._best:
            if best is not None:
                self._about(info, best)
            elif not sweep.trials:
                text("p", "No trial has begun yet.").classes("muted small")

    def _about(self, info: SweepInfo, best: Trial) -> None:
        run = self._context.workspace.ref(folder_of(self._path, best.number))
        values = ", ".join(f"{name} {_brief(value)}" for name, value in best.values.items())
        text("p", f"Trial {best.number}: {values}").classes("notes")
        with parts.box("row-line wrap"):
            parts.plain_button(
                "Open its run", lambda: ui.navigate.to(parts.address("/monitor", run=run)),
                "show_chart",
            )  # fmt: skip
            parts.plain_button(
                "Explore it", lambda: ui.navigate.to(parts.address("/explore", run=run)),
                "visibility",
            )  # fmt: skip
            parts.plain_button("Train longer", lambda: self._longer(run), "trending_up")

    def _longer(self, run: str) -> None:
        """The form of a training with the trial's settings and more epochs."""
        with parts.errors_shown():
            epochs = LONGER * self._context.workspace.run(run).recipe.epochs
            ui.navigate.to(f"{parts.address('/train', run=run)}&epochs={epochs:g}")

    def _on_abort(self) -> None:
        if self._job is not None:
            with parts.errors_shown():
                self._context.store.abort(self._job.id)
                ui.notify("Stopping. The trials at hand are saved, and go on with the search.")

    def _on_resume(self) -> None:
        if self._job is not None:
            with parts.errors_shown():
                self._context.store.resume(self._job.id)


def _brief(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
