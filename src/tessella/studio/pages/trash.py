"""The Trash page: what was deleted, how to have it back, and how much emptying it frees."""

from __future__ import annotations

import asyncio
from functools import partial

from nicegui import ui

from tessella.core.count import counted
from tessella.jobs.job import Job
from tessella.studio import parts
from tessella.studio.context import Context
from tessella.studio.keeping import dialog
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.studio.trash import Deleted


def register(context: Context) -> None:
    @ui.page("/trash", response_timeout=RESPONSE_S)
    async def trash() -> None:
        found = await asyncio.to_thread(context.trash.content)
        jobs = context.store.jobs(trashed=True)
        with frame("Trash", "Deleted, and not gone yet.", context.workspace.root):
            if not found and not jobs:
                parts.empty("The trash is empty", "What you delete comes here first.")
                return
            with parts.card("Deleted", "last first"):
                with parts.box("list"):
                    for deleted in found:
                        _artifact(context, deleted)
                    for job in jobs:
                        _job(context, job)
                nbytes = sum(d.nbytes for d in found)
                with parts.box("row-line"):
                    parts.plain_button(
                        f"Empty the trash: frees {parts.nbytes(nbytes)}",
                        partial(_ask_empty, context, len(found) + len(jobs), nbytes),
                        "delete_forever",
                    )


def _artifact(context: Context, deleted: Deleted) -> None:
    ref = deleted.refs[0]
    with parts.box("item"):
        text("span", context.labels.title(ref, ref)).classes("name cut")
        parts.plain_button("Restore", partial(_restore, context, deleted.key), "undo")
        line = f"{deleted.what} · {parts.nbytes(deleted.nbytes)} · {parts.ago(deleted.time)}"
        text("span", line).classes("detail cut")


def _job(context: Context, job: Job) -> None:
    with parts.box("item"):
        text("span", job.name).classes("name cut")
        parts.plain_button("Restore", partial(_restore_job, context, job.id), "undo")
        line = f"job, {job.state} · {parts.ago(job.trashed or 0.0)}"
        text("span", line).classes("detail cut")


def _restore(context: Context, key: str) -> None:
    with parts.errors_shown():
        deleted = context.trash.restore(key)
        pages = {"dataset": "/data", "run": "/monitor", "sweep": "/search", "plan": "/plan"}
        ui.navigate.to(parts.address(pages[deleted.what], **{deleted.what: deleted.refs[0]}))


def _restore_job(context: Context, job: str) -> None:
    with parts.errors_shown():
        context.store.restore(job)
        ui.navigate.to(parts.address("/monitor", job=job))


def _ask_empty(context: Context, count: int, nbytes: int) -> None:
    with dialog("Empty the trash?"):
        text("p", f"{counted(count, 'thing')} of {parts.nbytes(nbytes)} cannot come back then.")
        parts.button("Delete for good", partial(_empty, context), icon="delete_forever")


async def _empty(context: Context) -> None:
    with parts.errors_shown():
        freed = await asyncio.to_thread(context.trash.empty)
        ui.notify(f"{parts.nbytes(freed)} are free again", type="positive")
        ui.navigate.to("/trash")
