"""What a job does at this moment, in words: in the queue, starting, or at work."""

from __future__ import annotations

import time

from tessella.jobs.job import Job
from tessella.jobs.store import Store
from tessella.studio import parts
from tessella.studio.feed import Feed


def standing(store: Store, job: Job, feed: Feed) -> str:
    """The line under a job's progress bar, from the queue and from what the command has told."""
    if job.status == "waiting":
        return _waiting(store, job)
    if job.status == "running" and not _told(job, feed):
        return f"Starting: the command loads its libraries · {_since(job)}"
    if job.kind == "serve" and feed.phase:
        return _serving(job, feed)
    return progress_line(feed, job.status)


def progress_line(feed: Feed, status: str) -> str:
    """Stage, progress and time of a work that has told something."""
    took = ""
    if feed.started is not None and feed.last_time is not None:
        took = parts.duration(feed.last_time - feed.started)
    if status == "done":
        return f"finished in {took}" if took else "finished"
    line = [feed.phase] if feed.phase else []
    if feed.total and status == "running":
        line.append(f"{feed.done:,} of {feed.total:,}")
    if status == "running" and (left := feed.remaining_s) is not None:
        line.append(f"about {parts.duration(left)} left")
    if took:
        line.append(f"{took} so far" if status == "running" else f"{status} after {took}")
    return " · ".join(line) or ("It has told nothing yet." if status == "running" else status)


def _serving(job: Job, feed: Feed) -> str:
    """The address of a server, which tells nothing more while it serves, and since when."""
    took = parts.duration((job.finished or time.time()) - (job.started or time.time()))
    return f"{feed.phase} · {f'{job.state} after {took}' if job.ended else f'for {took}'}"


def training_line(store: Store, job: Job | None, feed: Feed, status: str) -> str:
    """The line of a run that has a folder: its command has read the recipe, and goes on from there
    to the data, the network and the first step.
    """
    if job is None:
        return progress_line(feed, status)
    if job.status == "running" and not _told(job, feed):
        if feed.points:
            return f"Starting again from its last checkpoint · {_since(job)}"
        return f"Loading the data and building the network · {_since(job)}"
    if job.status == "running" and not feed.points:
        return f"{feed.phase} · the first step is on its way · {_since(job)}"
    return standing(store, job, feed)


def log_line(job: Job | None) -> str:
    """What stands in place of a log that is empty."""
    if job is None:
        return "This run was not started as a job here; its log is in its terminal."
    return {
        "waiting": "It has not started: nothing is printed yet.",
        "running": "Nothing is printed yet.",
    }.get(job.status, "It printed nothing.")


def _told(job: Job, feed: Feed) -> bool:
    """Whether the command has told anything since it was started: an earlier attempt may have."""
    return feed.last_time is not None and feed.last_time >= (job.started or 0.0)


def _since(job: Job) -> str:
    return f"{parts.duration(time.time() - (job.started or time.time()))} so far"


def _waiting(store: Store, job: Job) -> str:
    needed = [store.job(needed) for needed in job.depends_on]
    if unfinished := [n.name for n in needed if n.status != "done"]:
        return f"Waiting for {', '.join(unfinished)}."
    ready = [j.id for j in store.ready()]
    if before := ready.index(job.id) if job.id in ready else 0:
        return f"Waiting for its turn: {before} job{'s' * (before > 1)} before it."
    running = len(store.jobs(status="running"))
    if running:
        return f"Next in the queue: {running} job{'s' * (running > 1)} at work."
    return "Next in the queue: it starts in a moment."
