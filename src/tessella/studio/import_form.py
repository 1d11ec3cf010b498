"""The form that imports pictures or volumes of any task as a dataset."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nicegui import ui
from nicegui.elements.mixins.value_element import ValueElement
from nicegui.events import ValueChangeEventArguments

from tessella.artifacts.dataset import Dataset
from tessella.core.errors import TessellaError, UsageError
from tessella.core.preprocess import Preprocess, ResizeMode, Store, Volume
from tessella.jobs import commands
from tessella.jobs.job import Job, JobSpec
from tessella.studio import parts
from tessella.studio.context import Context
from tessella.studio.feed import Feed
from tessella.studio.path_field import PathField
from tessella.studio.standing import standing
from tessella.studio.theme import text
from tessella.studio.workspace import plain_name
from tessella.tasks import named, names

F = TypeVar("F", bound=ValueElement[Any])
MISSING = "Choose a dataset at the left, or import the images again."
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".gif")
MOST_ENTRIES = 20_000  # directory entries, in search of an example image

TO_DRAW = " Or pictures alone, to draw on: then name a file with the classes, below More."

# What an import takes for each task, in a line: docs/tasks.md says it all.
TAKEN = {
    "classification": "A folder with a subfolder a class, or a table of path and label.",
    "multilabel": "A table of path and labels (cat|dog), or annotations of boxes.",
    "regression": "A table of path and numbers, or subfolders called by their number.",
    "detection": "COCO's JSON, YOLO's data.yaml, or a folder of COCO, YOLO, Pascal VOC or KITTI."
    + TO_DRAW,
    "instances": "COCO's JSON or YOLO's data.yaml, with outlines or run lengths." + TO_DRAW,
    "segmentation": "A folder with images and masks of the same names, or COCO's JSON with masks."
    + TO_DRAW,
    "volumes": "A folder with imagesTr and labelsTr: NIfTI, .npy or stacks of TIFF.",
}
FILES = (".json", ".yaml", ".yml", ".csv", ".tsv", ".parquet", ".txt")
SIZE, SIZE_OF_VOLUMES = "224", "64"

MODES: tuple[tuple[ResizeMode, str, str], ...] = (
    ("squash", "Squash", "Fills the size; the shape changes."),
    ("crop", "Crop", "Keeps the shape; cuts what sticks out."),
    ("fill", "Fill", "Keeps all; pads with grey."),
    ("half_crop", "Half crop", "Half way between crop and fill."),
)


# of a dataset's description, which anybody may have written
_SPLIT: dict[str, tuple[type, ...]] = {
    "holdout": (int, float), "test": (int, float), "seed": (int,),
    "val_folder": (str,), "test_folder": (str,), "labels": (str,),
}  # fmt: skip


@dataclass
class Settings:
    """The form's values, written here as the user types."""

    source: str = ""
    upload: str = ""
    name: str = ""
    size: str = SIZE
    channels: int = 3
    depth: int = 8
    resize: ResizeMode = "squash"
    crop: str = ""
    holdout: float | None = 0.1
    test: float | None = 0.0
    seed: int | None = 0
    store: Store = "auto"
    task: str = "classification"
    val_folder: str | None = None  # empty: none
    test_folder: str | None = None
    labels: str | None = None
    window: tuple[float, float] | None = None  # of volumes

    @classmethod
    def of(cls, dataset: Dataset) -> Settings:
        """The settings that made a dataset; an old one's description has its shares alone."""
        info, record = dataset.info, dataset.preprocess
        total = sum(s.count for s in info.splits.values()) or 1
        sides = record.sides if record.volume else (record.height, record.width)
        share = {n: round(s.count / total, 3) for n, s in info.splits.items()}
        split: dict[str, Any] = {"holdout": share.get("val", 0.0), "test": share.get("test", 0.0)}
        if info.settings:
            known = ((name, info.settings.get(name)) for name in _SPLIT)
            split = {name: value for name, value in known if isinstance(value, _SPLIT[name])}
        return cls(
            source=info.source,
            name=f"{info.name}-2",
            window=record.volume.window if record.volume else None,
            size=commands.size_text(*sides),
            channels=record.channels,
            depth=record.depth,
            resize=record.resize,
            crop=commands.size_text(*record.crop) if record.crop else "",
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
            val_folder=(self.val_folder or "").strip() or None,
            test_folder=(self.test_folder or "").strip() or None,
            labels=(self.labels or "").strip() or None,
            store=self.store,
            task=self.task,
        )


def _usual_size(task: str) -> str:
    return SIZE_OF_VOLUMES if named(task).volumes else SIZE


def _share(label: str, value: float | None) -> ui.number:
    return ui.number(label, value=value, min=0, max=0.9, step=0.05)


class ImportForm:
    """The import form, with the four resize modes beside it.

    Args:
        job: an import whose progress is shown from the start; empty: none.
        below: draws what stands under the form.
    """

    def __init__(
        self, context: Context, job: str, start: Settings, below: Callable[[], object]
    ) -> None:
        self._context, self._values = context, start
        self._example = ""
        with parts.box("stack"):
            with parts.card("New dataset"):
                self._form()
            below()
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
        titles = {name: named(name).title for name in names()}
        task = parts.field(ui.select(titles, value=start.task, label="What a network will tell"))
        task.on_value_change(self._task_chosen)
        self._folder = PathField(
            "Folder or file on this machine",
            root=self._context.workspace.root,
            value=start.source,
            placeholder="/data/flowers",
            suffixes=FILES,
            on_change=self._source_typed,
        )
        self._folder.input.on("blur", self._find_example)
        self._folder.input.on("keydown.enter", self._find_example)
        self._taken = text("p", "").classes("muted small")
        parts.drop_zone(
            "or drop a folder or a ZIP here", "up to 20 GB", ".zip", self._uploaded, folders=True
        )
        self._for_pictures: list[ui.element] = []  # the fields that say nothing about volumes
        with parts.box("fields"):
            self._name = self._add(ui.input("Name", value=start.name), "name", classes="wide")
            self._size = self._add(ui.input("Size", value=start.size), "size")
            self._size.tooltip("224, or 224x320; of volumes slices × height × width: 64x128x128")
            colors = {3: "Colour (3)", 1: "Grey (1)"}
            channels = ui.select(colors, value=start.channels, label="Channels")
            self._add(channels, "channels", pictures=True)
            modes = {mode: title for mode, title, _ in MODES}
            resize = ui.select(modes, value=start.resize, label="Resize")
            self._resize = self._add(resize, "resize", pictures=True)
            self._holdout = self._add(_share("Held out to validate", start.holdout), "holdout")
        with ui.expansion("More"), parts.box("fields"):
            self._more()
        self._problem = text("div", "").classes("note bad")
        parts.button("Import", self._start, icon="download_for_offline")

    def _more(self) -> None:
        """The fields that most imports leave as they are."""
        start = self._values
        own = "A folder or file of its own, such as val.json; empty: a part is held out"
        named_by = "A text file, a line each: of pictures without labels, those to draw on them"
        for name, label, told in (
            ("val_folder", "Validate on", own), ("test_folder", "Test on", own),
            ("labels", "Names of the classes", named_by),
        ):  # fmt: skip
            path = ui.input(label, value=getattr(start, name) or "")
            self._add(path, name, classes="wide").tooltip(told)
        crop = self._add(ui.input("Crop for the network", value=start.crop), "crop", pictures=True)
        crop.tooltip("The network sees this part: random while training, the centre otherwise")
        self._add(_share("Held out to test", start.test), "test")
        depths = {8: "8 bits", 16: "16 bits"}
        self._add(ui.select(depths, value=start.depth, label="Depth"), "depth", pictures=True)
        self._add(ui.number("Seed of the split", value=start.seed, precision=0), "seed")
        stores = {
            "auto": "JPEG files that fit, others as PNG",
            "png": "PNG",
            "pixels": "Pixels",
            "original": "All JPEG files, others as PNG",
        }
        store = ui.select(stores, value=start.store, label="Stored as")
        self._add(store, "store", classes="wide", pictures=True).tooltip(
            "JPEG files that fit have up to 1.3 times the pixels, nine times where a GPU here "
            "decodes them. Pixels are about twice as large as PNG, and training reads them without "
            "decoding"
        )

    def _add(self, element: F, name: str, *, classes: str = "", pictures: bool = False) -> F:
        """Bind a field to a setting.

        Args:
            pictures: whether the setting is one of pictures alone, not of volumes.
        """
        element.on_value_change(self._set(name))
        if pictures:
            self._for_pictures.append(element)
        return parts.field(element, classes)

    def _preview(self) -> None:
        with parts.card(
            "What the network will see", "the four ways to fit a picture into the size"
        ) as section:
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
        self._for_pictures.append(section)

    # --- what happens -------------------------------------------------------------------

    def _set(self, name: str) -> Callable[[ValueChangeEventArguments[Any]], None]:
        def handler(event: ValueChangeEventArguments[Any]) -> None:
            setattr(self._values, name, event.value)
            self._changed()

        return handler

    def _task_chosen(self, event: ValueChangeEventArguments[str]) -> None:
        """Change what stands for a task, where nobody has written anything else."""
        before, values = self._values.task, self._values
        values.task = event.value
        if values.size == _usual_size(before):
            self._size.set_value(_usual_size(event.value))  # which shows what changed
        self._changed()

    def _source_typed(self, path: str) -> None:
        self._values.source = path
        self._changed()

    def _changed(self) -> None:
        """Show the command and the four pictures for the form's present values."""
        values = self._values
        problem = line = ""
        self._taken.text = TAKEN.get(values.task, "")
        volumes = named(values.task).volumes
        self._size.set_label("Size (slices first)" if volumes else "Size (height × width)")
        for element in self._for_pictures:
            element.set_visibility(not volumes)
        self._holdout.set_enabled(not (values.val_folder or "").strip())
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
        found = await asyncio.to_thread(first_image, folder if folder.is_dir() else folder.parent)
        if found is not None:
            self._example = f"path:{found}"
        if not self._values.name and folder.is_dir():
            self._name.set_value(self._context.workspace.free_name("dataset", folder.name))
        elif not self._values.name and folder.is_file():  # of an annotation: what lies around it
            free = self._context.workspace.free_name("dataset", folder.resolve().parent.name)
            self._name.set_value(free)
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
                "there is no such folder or file on this machine",
                seen=self._values.source or "nothing",
                fix="give the path of what the form names above, or upload a ZIP",
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
