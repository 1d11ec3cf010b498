"""The Data page: import a folder or an upload as a dataset, and look into a dataset."""

from __future__ import annotations

import asyncio
import shlex
from functools import partial

import numpy as np
from nicegui import ui
from nicegui.events import ValueChangeEventArguments

from tessella.artifacts.dataset import Dataset
from tessella.core.count import counted
from tessella.core.errors import TessellaError
from tessella.jobs import commands
from tessella.studio import charts, parts, pictures
from tessella.studio.context import Context
from tessella.studio.import_form import ImportForm, Settings
from tessella.studio.keeping import shown_label, tools
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.studio.workspace import Found
from tessella.tasks import counted_names, named, of, targets_of

PAGE_SIZE = 60
MISSING = "Choose a dataset at the left, or import the images again."


def register(context: Context) -> None:
    @ui.page("/data", response_timeout=RESPONSE_S)
    async def data(
        dataset: str = "",
        split: str = "",
        label: int = -1,
        page: int = 1,
        job: str = "",
        like: str = "",
    ) -> None:
        found = await asyncio.to_thread(context.workspace.datasets)
        with frame("Data", "What the network will learn from.", context.workspace.root):
            with parts.box("split"):
                if dataset:
                    with parts.box("stack"):
                        _list(context, found, dataset)
                    with parts.box("stack"):
                        try:
                            opened = context.workspace.dataset(dataset)
                            _Dataset(context, opened, dataset, split, label, page)
                        except TessellaError as error:
                            parts.refused(error, MISSING)
                    return
                try:
                    settings = Settings.of(context.workspace.dataset(like)) if like else None
                except TessellaError as error:
                    parts.refused(error, MISSING)
                    return
                below = partial(_list, context, found, "")
                ImportForm(context, job, settings or Settings(), below)


def _list(context: Context, found: list[Found[Dataset]], here: str) -> None:
    with parts.card("Datasets", str(len(found)), tight=True):
        with parts.box("list"):
            for entry in found:
                with parts.link("/data", f"item {'here' * (entry.ref == here)}", dataset=entry.ref):
                    name = entry.item.info.name if entry.item else entry.ref
                    text("span", context.labels.title(entry.ref, name)).classes("name cut")
                    if entry.item is None:
                        text("span", "cannot be read").classes("detail")
                        text("span", entry.problem or "").classes("detail cut")
                        continue
                    count = sum(s.count for s in entry.item.info.splits.values())
                    text("span", f"{count:,}").classes("detail num")
                    text("span", entry.ref).classes("detail cut")
        if here:
            parts.plain_button("New dataset", lambda: ui.navigate.to("/data"), "add")
        elif not found:
            text("p", "None yet.").classes("muted small")


# --- a dataset -------------------------------------------------------------------------


class _Dataset:
    """A dataset's counts, notes, classes and images."""

    def __init__(
        self, context: Context, dataset: Dataset, ref: str, split: str, label: int, page: int
    ) -> None:
        self._dataset, self._ref = dataset, ref
        info, self._noun = dataset.info, parts.noun_of(dataset.info.task.name)
        self._split = split if split in info.splits else next(iter(info.splits))
        self._label = label if 0 <= label < len(info.classes) else -1
        self._page = max(1, page)
        self._task = of(info.task)
        with parts.card():
            with parts.box("row-line"):
                title = context.labels.title(ref, info.name)
                text("h2", title).style("font-size:19px").classes("cut")
                text("span", self._task.title).classes("hint cut grow")
                train = parts.address("/train", dataset=ref)
                parts.button("Train on it", lambda: ui.navigate.to(train), icon="arrow_forward")
                tools(context, "dataset", ref)
            shown_label(context, ref)
            parts.stats(_numbers(dataset))
            for line in info.notes:
                parts.note(line, "warn")
        names = self._task.examples.NAMES
        with parts.card(names.capitalize(), self._task.charts.CLASS_COUNTS):
            counts = [(name, s.class_counts) for name, s in info.splits.items()]
            ui.echart(charts.bars(info.classes, counts)).classes("chart")
        with parts.card() as self._browser:
            self._controls()
            self._images = ui.element("div").classes("thumbs")
            self._pages = ui.element("div").classes("row-line")
        self._show()
        self._problems()
        with parts.card("How to do the same"):
            self._again(context)

    def _again(self, context: Context) -> None:
        """The command that imports the same source again, into a dataset beside this one."""
        space = context.workspace
        job = context.job_for(self._dataset.path)
        out = space.ref(space.free_path(self._dataset.path))
        if not (space.root / self._dataset.info.source).exists():
            text("p", f"It was imported from {self._dataset.info.source}, which is not there any "
                 "more.").classes("muted small")  # fmt: skip
        elif job is not None and job.kind == "import":
            argv = list(job.argv)
            argv[argv.index("--out") + 1] = out
            parts.Command(shlex.join(("tessella", *argv)))
        else:
            again = Settings.of(self._dataset)
            again.name = self._dataset.info.name
            if not self._dataset.info.settings:
                text("p", "As far as its description tells; the seed of its split is not in it."
                     ).classes("muted small")  # fmt: skip
            parts.Command(commands.shown(again.spec(again.source, out)))

    def _controls(self) -> None:
        info = self._dataset.info
        with parts.box("row-line wrap"):
            text("h2", f"{self._noun.capitalize()}s").classes("grow")
            splits = {n: f"{n} ({s.count:,})" for n, s in info.splits.items()}
            ui.toggle(splits, value=self._split, on_change=self._choose_split).props(
                "unelevated dense no-caps padding='4px 12px' toggle-color=teal-9"
            )
            whole = f"All {self._task.examples.NAMES}"
            names = {-1: whole} | dict(enumerate(info.classes))
            chooser = ui.select(names, value=self._label, with_input=len(names) > 12)
            parts.field(chooser).style("width:230px")
            chooser.on_value_change(self._choose_label)

    def _choose_split(self, event: ValueChangeEventArguments[str]) -> None:
        self._split, self._page = event.value, 1
        self._show()

    def _choose_label(self, event: ValueChangeEventArguments[int | None]) -> None:
        self._label, self._page = event.value if event.value is not None else -1, 1
        self._show()

    def _choose_page(self, event: ValueChangeEventArguments[int | None]) -> None:
        self._page = event.value or 1
        self._show()

    def _show(self) -> None:
        """The current page of thumbnails; each is fetched by URL when it comes into view."""
        split = self._dataset.split(self._split)
        if self._label < 0:  # mixed, always alike: shards may hold one class after another
            rows = np.random.default_rng(0).permutation(len(split)).tolist()
        else:
            rows = targets_of(split).having(self._label).tolist()
        last = max(1, -(-len(rows) // PAGE_SIZE))
        self._page = min(self._page, last)
        shown = rows[(self._page - 1) * PAGE_SIZE : self._page * PAGE_SIZE]
        self._images.clear()
        with self._images:
            for index in shown:
                name = self._task.answers.truth(split[index].label, self._dataset.classes)
                with pictures.thumb(self._dataset, self._ref, self._split, index, name):
                    text("div", name).props["title"] = name
            if not len(shown):
                text("p", f"No {self._noun} of this class in this split.").classes("muted small")
        self._pages.clear()
        with self._pages:
            if last > 1:
                ui.pagination(1, last, value=self._page, on_change=self._choose_page).props(
                    "max-pages=7 boundary-numbers direction-links flat color=grey-7 "
                    "active-color=teal-8"
                )
            text("span", counted(len(rows), self._noun)).classes("muted small num")

    def _problems(self) -> None:
        info = self._dataset.info
        if not info.skipped_count and not info.duplicate_count:
            return
        with parts.box("duo"):
            if info.skipped_count:
                with parts.card("Skipped files", f"{info.skipped_count:,}"):
                    rows = [(s.path, s.reason) for s in info.skipped[:200]]
                    heads = [parts.Column(title="file", classes="m"), parts.Column(title="reason")]
                    parts.table(heads, rows)
            if info.duplicate_count:
                with parts.card("Equal images in different splits", f"{info.duplicate_count:,}"):
                    text("p", "They make validation look better than it is.").classes("muted small")
                    heads = [
                        parts.Column(title="one", classes="m"),
                        parts.Column(title="other", classes="m"),
                    ]
                    parts.table(heads, info.duplicates[:200])


def _numbers(dataset: Dataset) -> list[tuple[str, str]]:
    info, record = dataset.info, dataset.preprocess
    shape = " × ".join(map(str, record.pixel_shape))
    task = named(info.task.name)
    noun = f"{parts.noun_of(task.name)}s"
    counts = [(f"{name} {noun}", f"{s.count:,}") for name, s in info.splits.items()]
    pixels = f"pixels, {record.depth} bits, {record.resize}"
    if task.volumes:
        pixels = f"voxels seen, {record.depth} bits"
    disk = sum(m.nbytes for s in info.splits.values() for m in s.shards.values())
    count, names = counted_names(task.name, len(info.classes)).split(" ", 1)
    return [
        *counts,
        (names, count),
        (pixels, shape),
        ("mean", " · ".join(f"{m:.3f}" for m in record.mean[:4])),
        ("std", " · ".join(f"{s:.3f}" for s in record.std[:4])),
        ("on disk", parts.nbytes(disk)),
    ]
