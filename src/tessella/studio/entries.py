"""Entries of lists that more than one page shows: a run, a job, an artifact that cannot be read."""

from __future__ import annotations

from tessella.artifacts.run import Run
from tessella.core.errors import TessellaError
from tessella.jobs.job import Job
from tessella.studio import parts
from tessella.studio.theme import text
from tessella.studio.workspace import Found, T


def run_entry(entry: Found[Run], title: str, score: str, *, here: bool = False) -> None:
    """A run: its title and score, its network and age; ``here`` marks the one that is open."""
    with parts.link("/monitor", f"item {'here' * here}", run=entry.ref):
        if entry.item is None:
            unreadable(entry)
            return
        text("span", title).classes("name cut")
        text("span", score).classes("detail num")
        line = f"{entry.item.recipe.network} · {parts.ago(entry.modified)}"
        text("span", line).classes("detail cut")


def job_entry(job: Job) -> None:
    """A job: its name, state, command and age."""
    with parts.link("/monitor", "item", job=job.id):
        text("span", job.name).classes("name cut")
        parts.badge(job.state)
        text("span", job.notes or job.command).classes("detail cut" + " mono" * (not job.notes))
        moment = job.finished or job.started or job.created
        first = f"priority {job.priority} · " if job.priority and not job.ended else ""
        text("span", first + parts.ago(moment)).classes("detail nowrap")


def unreadable(entry: Found[T]) -> None:
    """The texts of an artifact that cannot be read, and why."""
    text("span", entry.ref).classes("name cut")
    text("span", "cannot be read").classes("detail")
    text("span", entry.problem or "").classes("detail cut")


def best_score(run: Run | None) -> str:
    """The best score of a run on its validation split so far, for people."""
    if run is None:
        return ""
    metric = run.info.task.metric
    try:
        scores = [c.info.metrics.get(metric) for c in run.checkpoints()]
    except TessellaError:
        return "damaged"
    best = max((s for s in scores if s is not None), default=None)
    return "" if best is None else parts.score(metric, best)
