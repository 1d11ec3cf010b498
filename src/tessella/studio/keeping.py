"""The tools that every artifact and job has: a title, tags and notes; clone; delete, with undo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nicegui import ui

from tessella.jobs.job import Job
from tessella.studio import parts
from tessella.studio.context import Context
from tessella.studio.labels import Label
from tessella.studio.theme import text
from tessella.studio.trash import size_of
from tessella.studio.workspace import Kind

CLONES: dict[Kind, tuple[str, str]] = {
    "dataset": ("/data", "like"), "run": ("/train", "run"), "sweep": ("/search", "like"),
    "plan": ("/plan", "like"),
}  # fmt: skip
MOST_PRIORITY = 100


def tools(context: Context, kind: Kind, ref: str) -> None:
    """Buttons that edit an artifact's label, clone it, and delete it."""
    page, name = CLONES[kind]
    clone = parts.address(page, **{name: ref})
    _icon("edit", "Title, tags and notes", lambda: _edit(context, kind, ref))
    _icon("content_copy", f"A new {kind} with the same settings", lambda: ui.navigate.to(clone))
    _icon("delete", f"Delete this {kind}", lambda: _ask_delete(context, kind, ref))


def shown_label(context: Context, ref: str) -> None:
    """The tags and the notes of an artifact, if it has any."""
    label = context.labels.of(ref)
    if label.tags:
        with parts.box("row-line wrap").style("gap:6px"):
            for tag in label.tags:
                with parts.link("/", "tag", tag=tag):
                    text("span", tag)
    if label.notes:
        text("p", label.notes).classes("notes")


def _edit(context: Context, kind: Kind, ref: str) -> None:
    label = context.labels.of(ref)
    with dialog(f"This {kind}"):
        title = parts.field(ui.input("Title", value=label.title))
        text("p", f"It is shown; {ref} keeps its name, so that commands go on finding it."
             ).classes("muted small")  # fmt: skip
        tags = parts.field(ui.input("Tags, between commas", value=", ".join(label.tags)))
        notes = parts.field(ui.textarea("Notes", value=label.notes))

        def save() -> None:
            with parts.errors_shown():
                words = tuple((tags.value or "").split(","))
                put = Label(title=title.value or "", notes=notes.value or "", tags=words)
                context.labels.put(ref, put)
                ui.navigate.reload()

        parts.button("Save", save)


async def _ask_delete(context: Context, kind: Kind, ref: str) -> None:
    path = context.workspace.path(ref)
    nbytes = await asyncio.to_thread(size_of, path)
    with dialog(f"Delete {ref}?"):
        text("p", f"It goes into the trash, from where it can come back. Emptying the trash frees "
             f"its {parts.nbytes(nbytes)}.")  # fmt: skip

        def go() -> None:
            with parts.errors_shown():
                context.trash.delete(kind, ref)
                ui.navigate.to("/trash")

        parts.button("Move to the trash", go, icon="delete")


def job_tools(context: Context, job: Job) -> None:
    """Buttons that edit a job, submit it again, and delete it once it has ended."""
    out = context.output_of(job)
    _icon("edit", "Name, priority and notes", lambda: _edit_job(context, job))
    if out is None or (job.ended and not out.exists()):  # else the same command would be refused
        _icon("content_copy", "Submit the same job again", lambda: _clone_job(context, job))
    if job.ended:
        _icon("delete", "Delete this job", lambda: _delete_job(context, job))


def _edit_job(context: Context, job: Job) -> None:
    with dialog("This job"):
        name = parts.field(ui.input("Name", value=job.name))
        priority = parts.field(
            ui.number("Priority: higher first", value=job.priority, precision=0,
                      min=-MOST_PRIORITY, max=MOST_PRIORITY)
        )  # fmt: skip
        priority.set_visibility(job.status == "waiting")
        notes = parts.field(ui.textarea("Notes", value=job.notes))

        def save() -> None:
            with parts.errors_shown():
                context.store.edit(
                    job.id,
                    name=name.value or "",
                    notes=notes.value or "",
                    priority=int(priority.value or 0),
                )
                ui.navigate.reload()

        parts.button("Save", save)


def _clone_job(context: Context, job: Job) -> None:
    with parts.errors_shown():
        ui.navigate.to(parts.address("/monitor", job=context.store.clone(job.id).id))


def _delete_job(context: Context, job: Job) -> None:
    with parts.errors_shown():
        context.store.delete(job.id)
        ui.navigate.to("/trash")


@contextmanager
def dialog(title: str) -> Iterator[ui.dialog]:
    """A dialog with a card in it, which the content goes into; it opens when that is there."""
    with ui.dialog() as dialog, parts.card(title).classes("dialog"):
        yield dialog
    dialog.open()


def _icon(icon: str, title: str, on_click: Callable[[], object]) -> None:
    button = ui.button(icon=icon, on_click=on_click, color=None).props("flat round dense")
    button.props["aria-label"] = title
    button.props["title"] = title
    button.classes("tool")
