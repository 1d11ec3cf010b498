"""The page on which people draw boxes: those of a dataset's image, and what a network proposes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Dataset
from tessella.core.errors import TessellaError, UsageError
from tessella.core.version import VERSION
from tessella.jobs import commands
from tessella.studio import parts, pictures
from tessella.studio.context import Context
from tessella.studio.drawn import Drawn, checked
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.studio.warm import Opened
from tessella.studio.workspace import best_checkpoint, readable

MISSING = "Choose an image of a detection on the Data page."
KEYS = (
    "Draw, move and resize with the mouse; or B adds a box, N and P choose one, arrows move it "
    "(Alt resizes, Shift goes ten pixels), 1 to 9 name its class, Enter accepts a proposal, Delete "
    "removes, Ctrl+Z undoes, Ctrl+S saves."
)


def register(context: Context) -> None:
    drawn = Drawn(context.workspace.own("annotations"))

    @ui.page("/label", response_timeout=RESPONSE_S)
    async def label(dataset: str = "", split: str = "", index: int = 0, version: int = -1) -> None:
        runs = readable(await asyncio.to_thread(context.workspace.runs))
        ui.add_head_html(f'<script src="/static/label.js?v={VERSION}"></script>')
        with frame("Label", "Boxes, drawn here.", context.workspace.root, step="Data"):
            try:
                opened = context.workspace.dataset(dataset)
                if opened.info.task.name != "detection" or split not in opened.info.splits:
                    raise UsageError(
                        "boxes are drawn on images of a detection",
                        seen=f"{opened.info.task.name}, {split[:40]}",
                    )
                pictures.stored_file(opened, split, index)
                _Editor(context, drawn, opened, (dataset, split, index), version, runs)
            except TessellaError as error:
                parts.refused(error, MISSING)


class _Editor:
    """An image with its boxes, and what can be done with them.

    Args:
        where: the dataset's ref, the split, and the image's place in it.
        version: whose boxes are shown; negative: the newest.
    """

    def __init__(
        self, context: Context, drawn: Drawn, dataset: Dataset, where: tuple[str, str, int],
        version: int, runs: dict[str, Any],
    ) -> None:  # fmt: skip
        self._context, self._drawn, self._dataset, self._where = context, drawn, dataset, where
        ref, split, index = where
        shown = None if version < 0 else version
        boxes = drawn.of(dataset, split, index, version=shown)
        with parts.box("split"):
            with parts.box("stack"):
                self._about(shown)
                self._proposer(runs)
                self._exporter()
            with parts.card().classes("first-if-narrow"):
                self._editor = parts.box("editor")
                self._editor.on("boxes", self._save, js_handler="(e) => emit(e.detail)")
                text("p", KEYS).classes("muted small")
        opened = {
            "source": pictures.example_address(dataset, ref, split, index),
            "alt": dataset.split(split)[index].path,
            "width": dataset.preprocess.width,
            "height": dataset.preprocess.height,
            "classes": list(dataset.classes),
            "boxes": boxes,
        }
        ui.context.client.on_connect(lambda: self._call("open", opened))

    def _call(self, verb: str, *values: Any) -> None:
        """Call a function of ``static/label.js``; values travel as JSON, never as code."""
        given = "".join(f",{json.dumps(v, allow_nan=False)}" for v in values)
        ui.run_javascript(f"labelling.{verb}({self._editor.id}{given})")

    def _about(self, shown: int | None) -> None:
        ref, split, index = self._where
        count = self._drawn.count(self._dataset)
        with parts.card(self._dataset.split(split)[index].path):
            told = f"version {count} of the boxes" if shown is None else f"as of version {shown}"
            self._version = text("p", told).classes("muted small")
            with parts.box("row-line wrap"):
                for name, place, icon in (
                    ("Previous", index - 1, "chevron_left"), ("Next", index + 1, "chevron_right")
                ):  # fmt: skip
                    if 0 <= place < len(self._dataset.split(split)):
                        to = parts.address("/label", dataset=ref, split=split, index=place)
                        parts.plain_button(name, lambda to=to: ui.navigate.to(to), icon)
            names = {v: "the dataset's own" if v == 0 else f"version {v}" for v in range(count + 1)}
            here: dict[str, str | int] = {"dataset": ref, "split": split, "index": index}
            parts.field(
                ui.select(
                    names, value=count if shown is None else min(shown, count), label="Look at",
                    on_change=lambda e: ui.navigate.to(
                        parts.address("/label", **here, version=e.value)
                    ),
                )
            )  # fmt: skip

    def _save(self, event: GenericEventArguments) -> None:
        _, split, index = self._where
        with parts.errors_shown():
            number = self._drawn.save(self._dataset, split, index, event.args)
            self._version.text = f"version {number} of the boxes"
            self._call("saved")
            ui.notify(f"Saved as version {number}", type="positive", timeout=1500)

    # --- what a network proposes ----------------------------------------------------------

    def _proposer(self, runs: dict[str, Any]) -> None:
        detectors = [r for r, run in runs.items() if _detects(run)]
        with parts.card("A network's proposals"):
            if not detectors:
                text("p", "No detector is trained yet.").classes("muted small")
                return
            text("p", "Shown dashed: accept or delete each.").classes("muted small")
            run = parts.field(ui.select(detectors, value=detectors[0], label="Run"))

            async def propose() -> None:
                with parts.errors_shown():
                    await self._propose(best_checkpoint(runs[run.value]))

            parts.plain_button("Propose", propose, "auto_awesome")

    async def _propose(self, chosen: Checkpoint) -> None:
        _, split, index = self._where
        content = self._dataset.split(split)[index].content
        upload = self._context.uploads.begin(f"{split} {index}", len(content))
        self._context.uploads.add(upload, 0, content)
        stamp = (chosen.path / "checkpoint.json").stat().st_mtime_ns
        asked: dict[str, object] = {"image": str(self._context.uploads.file(upload))}
        told = await self._context.answers.ask(Opened(path=chosen.path, stamp=stamp), asked)
        classes, record = self._dataset.classes, self._dataset.preprocess
        found = []
        for one in told["answer"]:
            if one["label"] not in classes:
                continue
            box = [*one["box"], classes.index(one["label"]), 0]
            try:
                checked([box], len(classes), (record.height, record.width))
            except UsageError:
                continue  # of less than a pixel
            found.append([*one["box"], classes.index(one["label"]), one["score"]])
        self._call("propose", found)
        ui.notify(f"{len(found)} proposed", timeout=1500)

    # --- what others read -------------------------------------------------------------------

    def _exporter(self) -> None:
        with parts.card("Export"):
            text("p", "COCO's JSON of each split with its pictures, of the newest version; the "
                 "dataset itself stays as it is.").classes("muted small")  # fmt: skip
            command = parts.Command()

            async def export() -> None:
                name = f"{self._dataset.path.name}-boxes-{self._drawn.count(self._dataset)}"
                out = self._context.workspace.root / "annotations" / name
                with parts.errors_shown():
                    files = await asyncio.to_thread(self._drawn.export, self._dataset, out)
                    refs = {n: self._context.workspace.ref(p) for n, p in files.items()}
                    spec = commands.import_images(
                        refs["train"], f"datasets/{name}", self._dataset.preprocess,
                        task="detection", val_folder=refs.get("val"), test_folder=refs.get("test"),
                    )  # fmt: skip
                    command.show(commands.shown(spec))

            parts.plain_button("Export", export, "download")


def _detects(run: Any) -> bool:
    try:
        return bool(best_checkpoint(run).info.task.name == "detection")
    except TessellaError:  # none yet, or damaged
        return False
