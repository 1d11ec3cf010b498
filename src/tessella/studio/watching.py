"""A job's progress within a page, until it has ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext

from nicegui.element import Element

from tessella.jobs.job import Job
from tessella.studio import parts
from tessella.studio.context import Context
from tessella.studio.feed import Feed
from tessella.studio.standing import standing


async def watch(
    context: Context,
    job: Job,
    area: Element,
    done: Callable[[], Awaitable[None] | None],
    *,
    title: str = "",
) -> None:
    """Show in ``area``, which is cleared, how far a job is; ``done`` is called when it has ended.

    What went wrong is written into the area behind what ``done`` puts there: ``done`` may clear
    the area, but not what it lies in, nor wait for anything afterwards: it is called by a timer
    that goes with what was in the area.

    Args:
        title: of a card around the progress; none: no card.
    """
    feed = Feed(job.events_path)
    area.clear()
    with area, parts.card(title) if title else nullcontext():
        track = parts.Track()

    async def refresh(now: Job) -> None:
        feed.read()
        track.show(feed.fraction, standing(context.store, now, feed))
        if now.ended:
            drawn = done()
            if drawn is not None:
                await drawn
            if now.status != "done":
                with area:
                    parts.note(now.error or "It was stopped.", "bad")

    await refresh(job)
    if not job.ended:
        with area:
            context.follow(job, refresh)
