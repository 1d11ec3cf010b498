"""The page on which people draw boxes, outlines of things or masks: a dataset's, and what a network
proposes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from nicegui import ui

from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Dataset
from tessella.core.errors import TessellaError, UsageError
from tessella.core.version import VERSION
from tessella.jobs import commands
from tessella.studio import parts, pictures
from tessella.studio.context import Context
from tessella.studio.drawn import FORMS, Drawn, Overtaken
from tessella.studio.drawn_masks import ground_of
from tessella.studio.keeping import dialog
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.studio.warm import Opened
from tessella.studio.workspace import best_checkpoint, readable
from tessella.tasks import View

MISSING = "Choose an image of a detection, of instances or of a segmentation on the Data page."
MASKS = (
    "A draws an outline: click its points, then the first one, or press Enter. B is the brush, "
    "E the eraser, [ and ] their width; they work on the chosen thing, and without one the "
    "brush makes a new thing and the eraser takes from all (Esc chooses none). V chooses, "
    "moves, and drags points; a click half way between two adds one. With the keyboard: arrows "
    "move (Shift ten pixels), Space sets a point or a dab, N and P choose a thing, . and , a "
    "point, I adds one, Delete removes,"
)
KEYS = {
    "boxes": (
        "Draw, move and resize with the mouse; or B adds a box, N and P choose one, arrows move it "
        "(Alt resizes, Shift goes ten pixels), 1 to 9 name its class, Enter accepts a proposal, "
        "Delete removes, Ctrl+Z undoes, Ctrl+Y does again, Ctrl+S saves."
    ),
    "outlines": (
        "Each thing has an outline of its own, and things may overlap. " + MASKS + " 1 to 9 name "
        "the class, C makes the chosen thing a crowd or none, U takes what it covers from all "
        "others, Enter accepts a proposal, Ctrl+Z undoes, Ctrl+Y does again, Ctrl+S saves."
    ),
    "masks": (
        MASKS + " 1 to 9 name the class, 0 none, Enter accepts a proposal, Ctrl+Z undoes, Ctrl+Y "
        "does again, Ctrl+S saves."
    ),
}
VIEW = "+ and -, or Ctrl and the wheel, zoom; the wheel moves what is seen."
SCRIPTS = {
    "boxes": ("editor", "boxes"),
    "outlines": ("editor", "runs", "masks"),
    "masks": ("editor", "runs", "masks"),
}
TOOLS = {"boxes": "boxing", "outlines": "masking", "masks": "masking"}
EXPORTED = {
    "boxes": "COCO's JSON",
    "outlines": "COCO's JSON, with an outline or run lengths of each thing,",
    "masks": "Masks as PNG and COCO's JSON",
}


def register(context: Context) -> None:
    drawn = Drawn(context.workspace.own("annotations"))

    @ui.page("/label", response_timeout=RESPONSE_S)
    async def label(dataset: str = "", split: str = "", index: int = 0, version: int = -1) -> None:
        runs = readable(await asyncio.to_thread(context.workspace.runs))
        with frame("Label", "Drawn here, by hand or by a network.", context.workspace.root,
                   step="Data"):  # fmt: skip
            try:
                opened = context.workspace.dataset(dataset)
                if opened.info.task.name not in FORMS or split not in opened.info.splits:
                    raise UsageError(
                        "a dataset of detection, instances or segmentation can be drawn on",
                        seen=f"{opened.info.task.name}, {split[:40]}",
                    )
                pictures.stored_file(opened, split, index)
                for name in SCRIPTS[FORMS[opened.info.task.name].NAME]:
                    ui.add_head_html(f'<script src="/static/{name}.js?v={VERSION}"></script>')
                shown = None if version < 0 else version
                count = await asyncio.to_thread(drawn.count, opened)
                content = await asyncio.to_thread(drawn.of, opened, split, index, version=shown)
                editor = _Editor(context, drawn, opened, (dataset, split, index), count)
                editor.build(content, shown, runs)
            except TessellaError as error:
                parts.refused(error, MISSING)


class _Editor:
    """An image with what is drawn on it, and what can be done with that.

    Args:
        where: the dataset's ref, the split, and the image's place in it.
        count: how many versions there are.
    """

    def __init__(
        self, context: Context, drawn: Drawn, dataset: Dataset, where: tuple[str, str, int],
        count: int,
    ) -> None:  # fmt: skip
        self._context, self._drawn, self._dataset, self._where = context, drawn, dataset, where
        self._form, self._count = FORMS[dataset.info.task.name], count
        self._saving, self._last = asyncio.Lock(), (-1, -1)  # the last save's `since` and number

    def build(self, content: Sequence[Any], shown: int | None, runs: dict[str, Any]) -> None:
        """Show the picture with what is drawn on it, of a version or (None) of the newest."""
        dataset, (ref, split, index) = self._dataset, self._where
        with parts.box("split"):
            with parts.box("stack"):
                self._about(shown)
                self._proposer(runs)
                self._exporter()
            with parts.card().classes("first-if-narrow"):
                self._editor = parts.box("editor")
                self._editor.on(
                    "drawn",
                    lambda e: self._save(e.args["content"], e.args["since"], e.args["change"]),
                    js_handler="(e) => emit(e.detail)",
                )
                text("p", f"{KEYS[self._form.NAME]} {VIEW}").classes("muted small")
        opened = {
            "source": pictures.example_address(dataset, ref, split, index),
            "alt": dataset.split(split)[index].path,
            "width": dataset.preprocess.width,
            "height": dataset.preprocess.height,
            "classes": list(dataset.classes),
            "content": content,
            "ground": None if self._form.NAME == "outlines" else ground_of(dataset.classes),
            "since": self._count,
            "draft": f"tessella {dataset.info.content_hash[:24]} {split} {index}",
        }
        tool = TOOLS[self._form.NAME]
        ui.context.client.on_connect(lambda: self._call("open", opened, tool=tool))

    def _call(self, verb: str, *values: Any, tool: str = "editing") -> None:
        """Call a function of ``static/editor.js``, or of a tool; values travel as JSON, never as
        code."""
        given = "".join(f",{json.dumps(v, allow_nan=False)}" for v in values)
        ui.run_javascript(f"{tool}.{verb}({self._editor.id}{given})")

    def _about(self, shown: int | None) -> None:
        (ref, split, index), count = self._where, self._count
        with parts.card(self._dataset.split(split)[index].path):
            told = (
                f"version {count} of the {self._form.NAME}"
                if shown is None
                else f"as of version {shown}"
            )
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

    async def _save(self, content: Any, since: int, change: int) -> None:
        """Save what was drawn from so many versions on, in so many changes."""
        _, split, index = self._where
        try:
            async with self._saving:
                # a second save that was sent before the first was answered is no other window's
                known = self._last[1] if since == self._last[0] else since
                number = await asyncio.to_thread(
                    self._drawn.save, self._dataset, split, index, content, since=known
                )
                self._last = since, number
        except Overtaken as error:
            self._call("refused")
            self._ask(error, content, change)
        except TessellaError as error:
            self._call("refused")
            parts.tell(error)
        else:
            self._version.text = f"version {number} of the {self._form.NAME}"
            self._call("saved", change, number)
            ui.notify(f"Saved as version {number}", type="positive", timeout=1500)

    def _ask(self, error: Overtaken, content: Any, change: int) -> None:
        """What to do with two works on one picture: neither is lost."""
        ref, split, index = self._where
        with dialog("Saved in another window meanwhile") as asking:
            text("p", f"Version {error.version} of this picture is newer than what you began with. "
                 "Yours is not saved yet, and nothing was overwritten.")  # fmt: skip
            there: dict[str, str | int] = {
                "dataset": ref,
                "split": split,
                "index": index,
                "version": error.version,
            }
            to = parts.address("/label", **there)
            parts.plain_button(
                f"Look at version {error.version}", lambda: ui.navigate.to(to, new_tab=True),
                "open_in_new",
            )  # fmt: skip

            async def mine() -> None:
                asking.close()
                count = await asyncio.to_thread(self._drawn.count, self._dataset)
                await self._save(content, count, change)

            parts.button("Save mine as the newest", mine, icon="save")

    # --- what a network proposes ----------------------------------------------------------

    def _proposer(self, runs: dict[str, Any]) -> None:
        task = self._dataset.info.task.name
        fitting = [r for r, run in runs.items() if _answers(run, task, self._dataset.classes)]
        with parts.card("A network's proposals"):
            if not fitting:
                text("p", f"No network is trained yet for {task} of these classes.").classes(
                    "muted small"
                )
                return
            again = " A thing that is drawn already is not shown again."
            again = "" if self._form.NAME == "masks" else again
            text("p", f"Shown dashed or hatched: accept or delete each.{again}").classes(
                "muted small"
            )
            mine = self._dataset.info.content_hash
            own = [r for r in fitting if runs[r].info.dataset_hash == mine]
            run = parts.field(ui.select(fitting, value=(own or fitting)[0], label="Run"))

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
        record = self._dataset.preprocess
        view = View(height=record.height, width=record.width, record=chosen.info.preprocess)
        found = self._form.proposed(told["answer"], self._dataset.classes, view)
        self._call("propose", found)
        ui.notify(f"{len(found)} found", timeout=1500)

    # --- what others read -------------------------------------------------------------------

    def _exporter(self) -> None:
        with parts.card("Export"):
            text("p", f"{EXPORTED[self._form.NAME]} of each split with its pictures, of the newest "
                 "version; the dataset itself stays as it is.").classes("muted small")  # fmt: skip
            command = parts.Command()

            async def export() -> None:
                count = await asyncio.to_thread(self._drawn.count, self._dataset)
                name = f"{self._dataset.path.name}-{self._form.NAME}-{count}"
                out = self._context.workspace.root / "annotations" / name
                with parts.errors_shown():
                    files = await asyncio.to_thread(self._drawn.export, self._dataset, out)
                    refs = {n: self._context.workspace.ref(p) for n, p in files.items()}
                    spec = commands.import_images(
                        refs["train"], f"datasets/{name}", self._dataset.preprocess,
                        task=self._dataset.info.task.name, val_folder=refs.get("val"),
                        test_folder=refs.get("test"),
                    )  # fmt: skip
                    command.show(commands.shown(spec))

            parts.plain_button("Export", export, "download")


def _answers(run: Any, task: str, classes: Sequence[str]) -> bool:
    """Whether a run has a checkpoint for a task that knows one of the classes that are drawn."""
    try:
        info = best_checkpoint(run).info
    except TessellaError:  # none yet, or damaged
        return False
    drawn = classes[1:] if ground_of(classes) == 0 else classes
    return info.task.name == task and not set(drawn).isdisjoint(info.labels)
