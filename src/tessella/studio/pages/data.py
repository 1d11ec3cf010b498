"""The Data page: import a folder or an upload as a dataset, and look into a dataset."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from nicegui import ui
from nicegui.events import ValueChangeEventArguments

from tessella.artifacts.dataset import Dataset
from tessella.core.count import counted
from tessella.core.errors import TessellaError, UsageError
from tessella.core.preprocess import Preprocess, ResizeMode, Store, Volume
from tessella.jobs import commands
from tessella.jobs.job import Job, JobSpec
from tessella.studio import charts, parts, pictures
from tessella.studio.context import Context
from tessella.studio.feed import Feed
from tessella.studio.keeping import shown_label, tools
from tessella.studio.path_field import PathField
from tessella.studio.standing import standing
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.studio.workspace import Found, plain_name
from tessella.tasks import named, of, targets_of

PAGE_SIZE = 60
MISSING = "Choose a dataset at the left, or import the images again."
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".gif")
MOST_ENTRIES = 20_000  # directory entries, in search of an example image

MODES: tuple[tuple[ResizeMode, str, str], ...] = (
    ("squash", "Squash", "Fills the size; the shape changes."),
    ("crop", "Crop", "Keeps the shape; cuts what sticks out."),
    ("fill", "Fill", "Keeps all; pads with grey."),
    ("half_crop", "Half crop", "Half way between crop and fill."),
)


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
                    settings = _Settings.of(context.workspace.dataset(like)) if like else None
                except TessellaError as error:
                    parts.refused(error, MISSING)
                    return
                _New(context, found, job, settings or _Settings())


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


# --- a new dataset ---------------------------------------------------------------------


# of a dataset's description, which anybody may have written
_SPLIT: dict[str, tuple[type, ...]] = {
    "holdout": (int, float), "test": (int, float), "seed": (int,),
    "val_folder": (str,), "test_folder": (str,),
}  # fmt: skip


@dataclass
class _Settings:
    """The form's values, written here as the user types."""

    source: str = ""
    upload: str = ""
    name: str = ""
    size: str = "224"
    channels: int = 3
    depth: int = 8
    resize: ResizeMode = "squash"
    crop: str = ""
    holdout: float | None = 0.1
    test: float | None = 0.0
    seed: int | None = 0
    store: Store = "png"
    task: str = "classification"
    val_folder: str | None = None
    test_folder: str | None = None
    window: tuple[float, float] | None = None  # of volumes

    @classmethod
    def of(cls, dataset: Dataset) -> _Settings:
        """The settings that made a dataset; an old one's description has its shares alone."""
        info, record = dataset.info, dataset.preprocess
        total = sum(s.count for s in info.splits.values()) or 1
        share = {n: round(s.count / total, 3) for n, s in info.splits.items()}
        split: dict[str, Any] = {"holdout": share.get("val", 0.0), "test": share.get("test", 0.0)}
        if info.settings:
            known = ((name, info.settings.get(name)) for name in _SPLIT)
            split = {name: value for name, value in known if isinstance(value, _SPLIT[name])}
        return cls(
            source=info.source,
            name=f"{info.name}-2",
            window=record.volume.window if record.volume else None,
            size=_written(*(record.sides if record.volume else (record.height, record.width))),
            channels=record.channels,
            depth=record.depth,
            resize=record.resize,
            crop=_written(*record.crop) if record.crop else "",
            task=info.task.name,
            **split,
        )

    def check_size(self) -> None:
        """Refuse a size that the task's examples do not have."""
        (parts.sides_of if named(self.task).volumes else parts.size_of)(self.size)

    def _record(self) -> Preprocess:
        if named(self.task).volumes:
            slices, height, width = parts.sides_of(self.size)
            volume = Volume(slices=slices, window=self.window)
            return Preprocess(height=height, width=width, channels=1, depth=16, volume=volume)
        height, width = parts.size_of(self.size)
        return Preprocess(
            height=height,
            width=width,
            channels=int(self.channels),
            depth=int(self.depth),
            resize=self.resize,
            crop=parts.size_of(self.crop) if self.crop.strip() else None,
        )

    def spec(self, source: str, out: str) -> JobSpec:
        """The import with these settings."""
        return commands.import_images(
            source,
            out,
            self._record(),
            name=self.name.strip() or None,
            holdout=float(self.holdout or 0.0),
            test=float(self.test or 0.0),
            seed=int(self.seed or 0),
            val_folder=self.val_folder,
            test_folder=self.test_folder,
            store=self.store,
            task=self.task,
        )


def _written(*sides: int) -> str:
    return str(sides[0]) if len(set(sides)) == 1 else "x".join(map(str, sides))


class _New:
    """The import form, with the four resize modes beside it."""

    def __init__(
        self, context: Context, found: list[Found[Dataset]], job: str, start: _Settings
    ) -> None:
        self._context, self._values = context, start
        self._example = ""
        with parts.box("stack"):
            with parts.card("New dataset"):
                self._form()
            _list(context, found, "")
        with parts.box("stack"):
            self._progress = ui.element("div").classes("stack")
            self._preview()
            with parts.card("How to do the same"):
                self._command = parts.Command(instead="Give a folder: its command appears here.")
        self._changed()
        if job:
            try:
                self._watch(job)
            except TessellaError as error:
                with self._progress:
                    parts.refused(error, MISSING)

    def _form(self) -> None:
        start = self._values
        self._folder = PathField(
            "Folder on this machine",
            root=self._context.workspace.root,
            value=start.source,
            placeholder="/data/flowers",
            on_change=self._source_typed,
        )
        self._folder.input.on("blur", self._find_example)
        self._folder.input.on("keydown.enter", self._find_example)
        parts.drop_zone(
            "or drop a folder or a ZIP here",
            "one subfolder a class, up to 20 GB",
            ".zip",
            self._uploaded,
            folders=True,
        )
        with parts.box("fields"):
            self._name = parts.field(
                ui.input("Name", value=start.name, on_change=self._set("name")), "wide"
            )
            parts.field(
                ui.input("Size (height × width)", value=start.size, on_change=self._set("size"))
            ).tooltip("224, or 224x320")
            colors = {3: "Colour (3)", 1: "Grey (1)"}
            parts.field(
                ui.select(
                    colors, value=start.channels, label="Channels", on_change=self._set("channels")
                )
            )
            modes = {mode: title for mode, title, _ in MODES}
            self._resize = parts.field(
                ui.select(modes, value=start.resize, label="Resize", on_change=self._set("resize"))
            )
            parts.field(
                ui.number("Held out to validate", value=start.holdout, min=0, max=0.9, step=0.05,
                          on_change=self._set("holdout"))
            )  # fmt: skip
        with ui.expansion("More"), parts.box("fields"):
            parts.field(
                ui.input("Crop for the network", value=start.crop, on_change=self._set("crop"))
            ).tooltip("The network sees this part: random while training, the centre otherwise")
            parts.field(
                ui.number("Held out to test", value=start.test, min=0, max=0.9, step=0.05,
                          on_change=self._set("test"))
            )  # fmt: skip
            depths = {8: "8 bits", 16: "16 bits"}
            parts.field(
                ui.select(depths, value=start.depth, label="Depth", on_change=self._set("depth"))
            )
            stores = {"png": "PNG", "pixels": "Pixels"}
            parts.field(
                ui.select(
                    stores, value=start.store, label="Stored as", on_change=self._set("store")
                )
            ).tooltip("Pixels are about twice as large, and training reads them without decoding")
            parts.field(
                ui.number("Seed of the split", value=0, precision=0, on_change=self._set("seed"))
            )
        self._problem = text("div", "").classes("note bad")
        parts.button("Import", self._start, icon="download_for_offline")

    def _preview(self) -> None:
        with parts.card(
            "What the network will see", "the four ways to fit a picture into the size"
        ):
            self._modes: dict[str, tuple[ui.element, ui.element]] = {}
            with parts.box("modes"):
                for mode, title, line in MODES:
                    with parts.box("mode") as frame_:
                        shown = parts.picture("", f"The example, {title}")
                        text("b", title)
                        text("span", line)
                    frame_.on("click", lambda mode=mode: self._resize.set_value(mode))
                    self._modes[mode] = (frame_, shown)
            parts.drop_zone(
                "Try a picture", "drop one, or click", "image/*", self._example_uploaded
            )

    # --- what happens -------------------------------------------------------------------

    def _set(self, name: str) -> Callable[[ValueChangeEventArguments[Any]], None]:
        def handler(event: ValueChangeEventArguments[Any]) -> None:
            setattr(self._values, name, event.value)
            self._changed()

        return handler

    def _source_typed(self, path: str) -> None:
        self._values.source = path
        self._changed()

    def _changed(self) -> None:
        """Show the command and the four pictures for the form's present values."""
        values = self._values
        problem = line = ""
        try:
            values.check_size()  # also while there is no folder yet
            if values.source.strip() and self._source().exists():
                line = commands.shown(self._request())
        except TessellaError as error:
            problem = str(error)
        self._problem.text = problem
        self._problem.set_visibility(bool(problem))
        self._command.show(line)
        for mode, (frame_, shown) in self._modes.items():
            frame_.classes(**({"add": "here"} if mode == values.resize else {"remove": "here"}))
            source = self._preview_address(mode)
            shown.props["src"] = source
            shown.set_visibility(bool(source))

    def _preview_address(self, mode: str) -> str:
        """The URL of the example in this mode; none without an example or a size."""
        try:
            height, width = parts.size_of(self._values.size)
        except UsageError:
            return ""
        if not self._example:
            return ""
        query: dict[str, str | int] = {
            "source": self._example,
            "height": height,
            "width": width,
            "mode": mode,
            "channels": self._values.channels,
        }
        return parts.address("/pictures/resize", **query)

    async def _find_example(self) -> None:
        folder = self._source()
        found = await asyncio.to_thread(first_image, folder)
        if found is not None:
            self._example = f"path:{found}"
        if not self._values.name and folder.is_dir():
            self._name.set_value(self._context.workspace.free_name("dataset", folder.name))
        self._changed()

    async def _example_uploaded(self, upload: str, name: str) -> None:
        self._example = f"upload:{upload}"
        self._changed()

    async def _uploaded(self, upload: str, name: str) -> None:
        with parts.errors_shown():
            folder = await asyncio.to_thread(self._context.uploads.images, upload)
            self._folder.put(self._context.workspace.ref(folder))
            if not self._values.name:
                free = self._context.workspace.free_name("dataset", name.removesuffix(".zip"))
                self._name.set_value(free)
            await self._find_example()
            ui.notify(f"{name} is here. Press Import.", type="positive")

    def _source(self) -> Path:
        """The folder in the form; a relative path starts at the workspace, where jobs run."""
        typed = self._values.source.strip()
        return self._context.workspace.root / Path(typed or "/nonexistent").expanduser()

    def _start(self) -> None:
        with parts.errors_shown():
            self._watch(self._context.store.submit(self._request()).id)

    def _request(self) -> JobSpec:
        """The import that the form describes: what is shown is what starts.

        Raises:
            UsageError: there is no such folder, or the name is taken.
        """
        source = self._source()
        if not self._values.source.strip() or not source.exists():
            raise UsageError(
                "there is no such folder on this machine",
                seen=self._values.source or "nothing",
                fix="give the folder that holds one subfolder a class, or upload a ZIP",
            )
        workspace = self._context.workspace
        out = workspace.new_path("dataset", plain_name(self._values.name or source.name))
        return self._values.spec(workspace.ref(source.resolve()), workspace.ref(out))

    def _watch(self, job_id: str) -> None:
        """Show an import's progress; open the dataset when it is there."""
        job = self._context.store.job(job_id)
        feed = Feed(job.events_path)
        self._progress.clear()
        with self._progress, parts.card(job.name) as section:
            state = parts.badge(job.status)
            track = parts.Track()
            problem = text("div", "").classes("note bad")
        problem.set_visibility(False)

        def refresh(now: Job) -> None:
            feed.read()
            parts.show_status(state, now.status)
            track.show(feed.fraction, standing(self._context.store, now, feed))
            if now.status == "done":
                ref = job.argv[job.argv.index("--out") + 1]
                ui.navigate.to(parts.address("/data", dataset=ref))
            elif now.ended:
                problem.text = feed.error or now.error or "The import was stopped."
                problem.set_visibility(True)

        with section:
            self._context.follow(job, refresh, interval_s=0.5)


def first_image(folder: Path) -> Path | None:
    """An image somewhere in the folder, without reading more of a large tree than needed."""
    seen = 0
    for here, folders, files in os.walk(folder):
        folders.sort()
        for file in sorted(files)[:MOST_ENTRIES]:
            seen += 1
            if file.lower().endswith(IMAGE_SUFFIXES):
                return Path(here) / file
        if seen > MOST_ENTRIES:
            return None
    return None


# --- a dataset -------------------------------------------------------------------------


class _Dataset:
    """A dataset's counts, notes, classes and images."""

    def __init__(
        self, context: Context, dataset: Dataset, ref: str, split: str, label: int, page: int
    ) -> None:
        self._dataset, self._ref = dataset, ref
        info = dataset.info
        self._split = split if split in info.splits else next(iter(info.splits))
        self._label = label if 0 <= label < len(info.classes) else -1
        self._page = max(1, page)
        with parts.card():
            with parts.box("row-line"):
                title = context.labels.title(ref, info.name)
                text("h2", title).style("font-size:19px").classes("cut grow")
                train = parts.address("/train", dataset=ref)
                parts.button("Train on it", lambda: ui.navigate.to(train), icon="arrow_forward")
                tools(context, "dataset", ref)
            shown_label(context, ref)
            parts.stats(_numbers(dataset))
            for line in info.notes:
                parts.note(line, "warn")
        self._task = of(info.task)
        with parts.card("Classes", self._task.charts.CLASS_COUNTS):
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
        """The import that makes this dataset once more, beside it."""
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
            again = _Settings.of(self._dataset)
            again.name = self._dataset.info.name
            if not self._dataset.info.settings:
                text("p", "As far as its description tells; the seed of its split is not in it."
                     ).classes("muted small")  # fmt: skip
            parts.Command(commands.shown(again.spec(again.source, out)))

    def _controls(self) -> None:
        info = self._dataset.info
        with parts.box("row-line wrap"):
            text("h2", "Images").classes("grow")
            splits = {n: f"{n} ({s.count:,})" for n, s in info.splits.items()}
            ui.toggle(splits, value=self._split, on_change=self._choose_split).props(
                "unelevated dense no-caps padding='4px 12px' toggle-color=teal-9"
            )
            names = {-1: "All classes"} | dict(enumerate(info.classes))
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
                text("p", "No images of this class in this split.").classes("muted small")
        self._pages.clear()
        with self._pages:
            if last > 1:
                ui.pagination(1, last, value=self._page, on_change=self._choose_page).props(
                    "max-pages=7 boundary-numbers direction-links flat color=grey-7 "
                    "active-color=teal-8"
                )
            text("span", counted(len(rows), "image")).classes("muted small num")

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
    counts = [(f"{name} images", f"{s.count:,}") for name, s in info.splits.items()]
    disk = sum(m.nbytes for s in info.splits.values() for m in s.shards.values())
    return [
        *counts,
        ("classes", f"{len(info.classes):,}"),
        (f"pixels, {record.depth} bits, {record.resize}", shape),
        ("mean", " · ".join(f"{m:.3f}" for m in record.mean[:4])),
        ("std", " · ".join(f"{s:.3f}" for s in record.std[:4])),
        ("on disk", parts.nbytes(disk)),
    ]
