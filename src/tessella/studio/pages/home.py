"""The overview page: the workspace's datasets, runs, plans and jobs, and what to do first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nicegui import ui

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.outline import Outline
from tessella.artifacts.run import Run
from tessella.core.count import counted
from tessella.studio import parts
from tessella.studio.context import Context
from tessella.studio.entries import best_score, job_entry, run_entry, unreadable
from tessella.studio.plan_front import precision_named
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.studio.workspace import Found, T
from tessella.tasks import counted_names

SHOWN = 8  # of each kind; the pages list all


def register(context: Context) -> None:
    @ui.page("/", response_timeout=RESPONSE_S)
    async def home(tag: str = "") -> None:
        space = context.workspace
        datasets = _tagged(context, await asyncio.to_thread(space.datasets), tag)
        runs = _tagged(context, await asyncio.to_thread(space.runs), tag)
        plans = _tagged(context, await asyncio.to_thread(space.plans), tag)
        with frame("Overview", "From a folder of examples to a served network.", space.root):
            _tags(context, tag)
            if not (tag or datasets or runs or plans or context.store.jobs()):
                _first_steps()
                return
            with parts.box("trio"):
                _datasets(context, datasets)
                _runs(context, runs)
                _plans(context, plans)
            if not tag:
                _jobs(context)
            with parts.link("/trash", "small muted"):
                text("span", "Trash")


def _tagged(context: Context, found: list[Found[T]], tag: str) -> list[Found[T]]:
    """The artifacts that have a tag; with an empty tag, all."""
    return [f for f in found if not tag or tag in context.labels.of(f.ref).tags]


def _tags(context: Context, here: str) -> None:
    """Every tag, to show only what has it."""
    tags = context.labels.tags()
    if not tags and not here:
        return
    with parts.box("row-line wrap").style("gap:6px"):
        for tag in dict.fromkeys((*tags, *([here] if here else []))):
            query = {} if tag == here else {"tag": tag}
            with parts.link("/", f"tag {'here' * (tag == here)}", **query):
                text("span", tag)


def _first_steps() -> None:
    with parts.empty(
        "This workspace is empty",
        "Begin with a folder of images, or a file of boxes or masks.",
    ):
        with parts.box("row-line").style("margin-top:10px"):
            parts.button(
                "Import images", lambda: ui.navigate.to("/data"), icon="add_photo_alternate"
            )
    with parts.box("trio"):
        for title, line in (
            ("1 · Data", "Import a folder: every file is checked, resized and split, and you see "
             "the classes, the skipped files and the duplicates before anything is trained."),
            ("2 · Train, 3 · Monitor", "Choose a network, draw the learning rate, start. Watch "
             "loss, accuracy and the machine live; stop and resume at any time."),
            ("4 · Explore, 5 · Plan, 6 · Serve", "See what every layer does with a picture, where "
             "the network errs, compile it into one file, serve it, and watch who asks."),
        ):  # fmt: skip
            with parts.card(title):
                text("p", line).classes("muted")


def _datasets(context: Context, found: list[Found[Dataset]]) -> None:
    with parts.card("Datasets", str(len(found))):
        if not found:
            text("p", "None yet. Import a folder of images on the Data page.").classes("muted")
        with parts.box("list"):
            for entry in found[:SHOWN]:
                with parts.link("/data", "item", dataset=entry.ref):
                    if entry.item is None:
                        unreadable(entry)
                        continue
                    info = entry.item.info
                    count = sum(s.count for s in info.splits.values())
                    text("span", context.labels.title(entry.ref, info.name)).classes("name cut")
                    task = info.task.name
                    text("span", counted(count, parts.noun_of(task))).classes("detail num")
                    names = counted_names(task, len(info.classes))
                    text("span", f"{task}, {names} · {entry.ref}").classes("detail cut")
        _rest(found, "/data")


def _runs(context: Context, found: list[Found[Run]]) -> None:
    with parts.card("Runs", str(len(found))):
        if not found:
            text("p", "None yet. Train a network on the Train page.").classes("muted")
        with parts.box("list"):
            for entry in found[:SHOWN]:
                title = context.labels.title(entry.ref, entry.path.name)
                run_entry(entry, title, best_score(entry.item))
        _rest(found, "/monitor")


def _plans(context: Context, found: list[Found[Outline]]) -> None:
    with parts.card("Plans", str(len(found))):
        if not found:
            text("p", "None yet. Compile a checkpoint on the Plan page.").classes("muted")
        with parts.box("list"):
            for entry in found[:SHOWN]:
                with parts.link("/plan", "item", plan=entry.ref):
                    if entry.item is None:
                        unreadable(entry)
                        continue
                    title = context.labels.title(entry.ref, entry.path.stem)
                    text("span", title).classes("name cut")
                    text("span", parts.nbytes(entry.path.stat().st_size)).classes("detail num")
                    line = f"{', '.join(entry.item.targets)}, {precision_named(entry.item)}"
                    text("span", line).classes("detail cut")
        _rest(found, "/plan")


def _rest(found: Sequence[object], page: str) -> None:
    """A link to the page that lists all, where there are more than are shown here."""
    if len(found) > SHOWN:
        with parts.link(page, "small"):
            text("span", f"All {len(found):,}")


def _jobs(context: Context) -> None:
    with parts.card("Jobs", "newest first") as section:
        rows = ui.column().classes("list").style("gap:0;align-items:stretch")
    shown: list[object] = []

    def refresh() -> None:
        jobs = context.store.jobs()[:20]
        section.set_visibility(bool(jobs))
        state = [(j.id, j.name, j.state, j.priority, j.notes) for j in jobs]
        if state == shown:
            return
        shown[:] = state
        rows.clear()
        with rows:
            for job in jobs:
                job_entry(job)

    refresh()
    ui.timer(2.0, refresh)
