"""What a network says of a dataset's volume beside its labels there, slice by slice.

A network goes through a volume for a minute or more: a job writes its labels into a file, and the
page asks for drawn slices of it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import numpy.typing as npt
from nicegui import ui
from nicegui.events import GenericEventArguments

from tessella.artifacts.checkpoint import Checkpoint
from tessella.core.errors import TessellaError
from tessella.core.record import digest
from tessella.core.volumes import IGNORED
from tessella.jobs import commands
from tessella.jobs.job import JobSpec
from tessella.studio import parts, pictures
from tessella.studio.boxes import boxed, legend
from tessella.studio.context import Context
from tessella.studio.theme import text
from tessella.studio.watching import watch
from tessella.studio.workspace import open_dataset
from tessella.tasks import of

Labels = npt.NDArray[np.uint8]


class VolumeAnswers:
    """A volume of a split: the job that segments it, then its slices.

    Raises:
        UsageError: the split has no such volume.
    """

    def __init__(
        self, context: Context, chosen: Checkpoint, data: Path, split: str, index: int
    ) -> None:
        self._context, self._checkpoint, self._dataset = context, chosen, open_dataset(data)
        self._split, self._index = split, index
        self._ref, self._data = (context.workspace.ref(p) for p in (chosen.path, data))
        pictures.stored_file(self._dataset, split, index)  # says which volumes there are
        self._example = self._dataset.split(split)[index]
        weights = chosen.info.files["model.safetensors"].sha256
        asked = [self._ref, weights, self._dataset.info.content_hash, split, index]
        self._file = pictures.told_file(context.workspace, digest(asked)[:24])
        with parts.card("Beside its labels", "slice by slice"):
            with parts.link("/image", dataset=self._data, split=split, index=str(index)):
                text("span", self._example.path)
            self._trust = ui.switch("Run the Python code that this checkpoint brings")
            self._trust.set_visibility(".py" in chosen.info.network.name)
            self._trust.on_value_change(lambda: self._show_command())
            self._box, self._command = parts.box("stack"), parts.Command()
        self._show_command()

    def _spec(self, out: str) -> JobSpec:
        return commands.segment(
            self._ref, self._data, split=self._split, index=self._index, out=out,
            trust_code=bool(self._trust.value),
        )  # fmt: skip

    def _show_command(self) -> None:
        self._command.show(commands.shown(self._spec("labels.npy")))

    async def show(self) -> None:
        """Draw the slices, the progress of the job that makes them, or what begins one."""
        job = self._context.job_for(self._file)
        if job is not None and not job.ended:
            await watch(self._context, job, self._box, self.show)
            return
        found: tuple[Labels, Labels] | None = None
        problem = ""
        try:
            found = await asyncio.to_thread(self._both) if self._file.exists() else None
        except TessellaError as error:
            problem = str(error)
        if self._box.is_deleted:  # the page was left
            return
        self._box.clear()
        with self._box:
            if found is not None:
                self._slices(*found)
                return
            if problem:
                parts.note(f"The labels cannot be read: {problem}", "bad")
            with parts.empty("Not segmented yet", "The network goes through it window by window, "
                             "for a minute or more."):  # fmt: skip
                parts.button("Segment it", self._segment, icon="layers")

    async def _segment(self) -> None:
        with parts.errors_shown():
            out = self._context.workspace.ref(self._file)
            job = self._context.store.submit(self._spec(out))
            self._file.unlink(missing_ok=True)
            await watch(self._context, job, self._box, self.show)

    def _both(self) -> tuple[Labels, Labels]:
        """The labels of the network, and those of the dataset, uint8 [D, H, W].

        Raises:
            DataError: the file is none of this volume.
        """
        truth = pictures.truth_of(self._dataset, self._split, self._index)
        return pictures.told_of(self._file, truth, self._dataset), truth

    def _slices(self, said: Labels, truth: Labels) -> None:
        """Three pictures of a slice, and a slider; the slice with the most errors comes first."""
        wrong_DHW = pictures.differing(said, truth)
        wrong_D = wrong_DHW.reshape(len(truth), -1).mean(axis=1)
        place, size = int(wrong_D.argmax()), (truth.shape[1], truth.shape[2])
        plain = pictures.example_address(self._dataset, self._data, self._split, self._index)
        told = f"{plain}&told={self._file.stem}"
        shown = {
            "What the network says": told,
            "What is there": f"{plain}&drawn=true",
            "Where they differ": f"{told}&wrong=true",
        }
        drawn = []
        with parts.box("beside"):
            for title, source in shown.items():
                with parts.box("stack"):
                    text("b", title).classes("small")
                    picture = boxed(f"{source}&at={place}", title, (), size)
                    drawn.append((next(iter(picture)), source))
        line = text("label", "").classes("small muted num")

        def choose(at: int) -> None:
            for picture, source in drawn:
                picture.props["src"] = f"{source}&at={at}"
            line.text = f"slice {at + 1} of {len(truth)}: {100 * wrong_D[at]:.2f} % differ"

        def moved(event: GenericEventArguments) -> None:
            choose(int(event.args) - 1)

        slider = parts.slider("Slice", 1, len(truth), 1, place + 1)
        slider.on("update:model-value", moved, throttle=pictures.PAUSE_S)
        choose(place)
        there = [k for k in np.union1d(said, truth).tolist() if k != IGNORED]
        answers = of(self._checkpoint.info.task).answers
        legend(answers, {k: self._dataset.classes[k] for k in there})
