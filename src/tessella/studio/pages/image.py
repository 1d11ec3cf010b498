"""The page of one image of a dataset: large, with its class, its file, and its neighbours."""

from __future__ import annotations

from pathlib import Path

from nicegui import ui
from nicegui.element import Element
from nicegui.events import GenericEventArguments

from tessella.artifacts.dataset import Dataset
from tessella.core.errors import TessellaError, UsageError
from tessella.core.volumes import array_in
from tessella.studio import parts, pictures
from tessella.studio.boxes import legend
from tessella.studio.context import Context
from tessella.studio.drawn import FORMS
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.tasks import of

MISSING = "Choose an image on the Data page."


def register(context: Context) -> None:
    @ui.page("/image", response_timeout=RESPONSE_S)
    def image(dataset: str = "", split: str = "", index: int = 0) -> None:
        with frame("Image", "As it is stored.", context.workspace.root, step="Data"):
            try:
                opened = context.workspace.dataset(dataset)
                if split not in opened.info.splits:
                    raise UsageError(
                        "the dataset has no such split",
                        seen=split,
                        fix=f"use {', '.join(opened.info.splits)}",
                    )
                pictures.stored_file(opened, split, index)
            except TessellaError as error:
                parts.refused(error, MISSING)
                return
            _show(context, opened, dataset, split, index)


def _show(context: Context, dataset: Dataset, ref: str, split: str, index: int) -> None:
    examples = dataset.split(split)
    example, record = examples[index], dataset.preprocess
    task = of(dataset.info.task)
    label = task.answers.truth(example.label, dataset.classes)
    with parts.box("split"):
        with parts.box("stack"):
            with parts.card():
                text("h2", label).style("overflow-wrap:anywhere")
                volume = record.volume is not None
                stored = array_in(example.content, "uint16").shape if volume else record.pixel_shape
                shape = f"{' × '.join(map(str, stored))}, {record.depth} bits"
                noun = parts.noun_of(task.name)
                rows = [
                    ("dataset", context.labels.title(ref, dataset.info.name)),
                    ("split", split),
                    (noun, f"{index + 1:,} of {len(examples):,}"),
                    ("imported from", example.path),
                    ("voxels" if volume else "pixels", shape),
                    ("bytes", parts.nbytes(len(example.content))),
                ]
                parts.table([parts.Column(title="field"), parts.Column(title="value")], rows)
                with parts.box("row-line"):
                    _step(ref, split, index - 1, len(examples), "Previous", "chevron_left")
                    _step(ref, split, index + 1, len(examples), "Next", "chevron_right")
                if (form := FORMS.get(dataset.info.task.name)) is not None:
                    to = parts.address("/label", dataset=ref, split=split, index=index)
                    parts.plain_button(f"Draw {form.NAME}", lambda: ui.navigate.to(to), "edit")
                source = Path(dataset.info.source) / example.path
                if (context.workspace.root / source).is_file():
                    text("p", f"Its file is still there: {source}").classes("muted small")
                occurring = list(task.examples.occurs(example.label))
                if task.examples.PLACED and not task.answers.marked(example.label, dataset.classes):
                    legend(task.answers, {k: dataset.classes[k] for k in occurring})
                for number in occurring:
                    query = {"dataset": ref, "split": split, "label": str(number)}
                    with parts.link("/data", **query):
                        text("span", f"All {noun}s of {dataset.classes[number]}")
        with parts.card(), parts.box("large"):
            title = f"{label}: {example.path}"
            shown = pictures.example_picture(dataset, ref, split, index, title, large=True)
            if record.volume is not None:
                _slices(shown, len(array_in(example.content, "uint16")))


def _slices(shown: Element, count: int) -> None:
    """A slider through the slices of the volume whose middle one is shown."""
    picture = next(iter(shown))
    source, middle = picture.props["src"], count // 2
    said = text("label", f"slice {middle + 1} of {count}").classes("small muted num")

    def choose(event: GenericEventArguments) -> None:
        at = int(event.args)
        picture.props["src"] = f"{source}&at={at - 1}"
        said.text = f"slice {at} of {count}"

    slider = parts.slider("Slice", 1, count, 1, middle + 1)
    slider.on("update:model-value", choose, throttle=pictures.PAUSE_S)


def _step(ref: str, split: str, index: int, count: int, label: str, icon: str) -> None:
    """A button to a neighbour, if there is one."""
    if 0 <= index < count:
        to = parts.address("/image", dataset=ref, split=split, index=index)
        parts.plain_button(label, lambda: ui.navigate.to(to), icon)
