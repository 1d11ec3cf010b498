"""A job's progress within a page, until it has ended."""

from __future__ import annotations

from collections.abc import Callable

from nicegui.element import Element

from tessella.jobs.job import Job
from tessella.studio import parts
from tessella.studio.context import Context
from tessella.studio.feed import Feed
from tessella.studio.standing import standing


def watch(context: Context, job: Job, area: Element, done: Callable[[], None]) -> None:
    """Show in ``area``, which is cleared, how far a job is; ``done`` is called when it has ended.

    What went wrong is written into the area behind what ``done`` puts there.
    """
    feed = Feed(job.events_path)
    area.clear()
    with area:
        track = parts.Track()

    def refresh(now: Job) -> None:
        feed.read()
        track.show(feed.fraction, standing(context.store, now, feed))
        if now.ended:
            done()
            if now.status != "done":
                with area:
                    parts.note(now.error or "It was stopped.", "bad")

    refresh(job)
    if not job.ended:
        with area:
            context.follow(job, refresh)
