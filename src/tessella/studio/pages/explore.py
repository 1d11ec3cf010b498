"""The Explore page: a network's answer to a picture, the output of each layer, its errors."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Any, cast

from nicegui import ui

from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Run
from tessella.core.errors import ArtifactError, TessellaError
from tessella.core.record import digest, parse_json
from tessella.jobs import commands
from tessella.jobs.job import JobSpec
from tessella.studio import parts, pictures
from tessella.studio.box_errors import BoxErrors
from tessella.studio.boxes import boxed, legend, masks_of
from tessella.studio.confusion import Confusion, Report, figures, measures
from tessella.studio.context import Context
from tessella.studio.examples import examples
from tessella.studio.layers import Layers, Look
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.studio.volume_answers import VolumeAnswers
from tessella.studio.warm import Opened
from tessella.studio.watching import watch
from tessella.studio.workspace import best_checkpoint, open_dataset, readable
from tessella.tasks import counted_names, of
from tessella.tasks.thing import Thing

PROMPTS = {"classify": "Classify a picture", "detect": "Find things in a picture",
           "segment": "Segment a picture"}  # fmt: skip
MISSING = "Open another run from Monitor; a damaged checkpoint can be deleted, older ones stay."


def register(context: Context) -> None:
    @ui.page("/explore", response_timeout=RESPONSE_S)
    async def explore(
        run: str = "", checkpoint: str = "", split: str = "val", index: int = -1
    ) -> None:
        await _page(context, run, checkpoint, (split, index))


async def _page(
    context: Context, run_ref: str, checkpoint_ref: str, example: tuple[str, int]
) -> None:
    """The page; ``example`` are the split and the number of a volume to look at, -1: of none."""
    space = context.workspace
    found = readable(await asyncio.to_thread(space.runs))
    runs = {ref: run for ref, run in found.items() if _has_checkpoint(run)}
    if checkpoint_ref and not run_ref:
        run_ref = next((r for r in runs if checkpoint_ref.startswith(f"{r}/")), "")
    run_ref = run_ref or next(iter(runs), "")
    with frame("Explore", "What the network sees, and where it errs.", space.root):
        if run_ref and run_ref not in runs:  # a trial of a sweep, or a run before its first one
            try:
                run = space.run(run_ref)
                if run.checkpoints():
                    runs[run_ref] = run
            except TessellaError as error:
                parts.refused(error, MISSING)
                return
        if run_ref not in runs:
            with parts.empty("There is no checkpoint yet", "Train a network first; its first "
                             "checkpoint comes after the first epoch."):  # fmt: skip
                parts.button("Train a network", lambda: ui.navigate.to("/train"))
            return
        try:
            if checkpoint_ref:
                chosen = space.checkpoint(checkpoint_ref)
            else:
                chosen = best_checkpoint(runs[run_ref])
        except TessellaError as error:
            parts.refused(error, MISSING)
            return
        volumes = of(chosen.info.task).volumes
        with parts.box("split"):
            left, right = parts.box("stack"), parts.box("stack")
            with right:
                _about(chosen)
                answers = _beside_labels(context, chosen, example) if volumes else None
                layers = None if volumes else _layers_box()
                errors = _Errors(context, chosen)
            with left:
                _chooser(context, runs, run_ref, chosen)
                if layers is None:
                    _volumes(context, chosen, run_ref)
                else:
                    _Classify(context, chosen, layers)
            if answers is not None:
                await answers.show()
            await errors.show()


def _has_checkpoint(run: Run) -> bool:
    try:
        return bool(run.checkpoints())
    except TessellaError:  # damaged: an error where it is asked for, never a default
        return False


def _chooser(context: Context, runs: dict[str, Run], ref: str, chosen: Checkpoint) -> None:
    best = best_checkpoint(runs[ref]).path
    names = {}
    for point in runs[ref].checkpoints():
        metric = point.info.task.metric
        score = point.info.metrics.get(metric)
        label = f"epoch {point.info.position.epoch:.4g}"
        label += "" if score is None else f", {parts.score(metric, score)}"
        names[context.workspace.ref(point.path)] = label + (
            "  (best)" if point.path == best else ""
        )
    with parts.card("Checkpoint"):
        shown = context.run_names(runs)
        parts.field(
            ui.select(shown, value=ref, label="Run",
                      on_change=lambda e: ui.navigate.to(parts.address("/explore", run=e.value)))
        )  # fmt: skip
        parts.field(
            ui.select(
                names,
                value=context.workspace.ref(chosen.path),
                label="Checkpoint",
                on_change=lambda e: ui.navigate.to(
                    parts.address("/explore", run=ref, checkpoint=e.value)
                ),
            )
        )


def _about(chosen: Checkpoint) -> None:
    info = chosen.info
    shape = " × ".join(str(n) for n in info.preprocess.input_shape)
    count, names = counted_names(info.task.name, len(info.labels)).split(" ", 1)
    with parts.card():
        parts.stats(
            [
                ("network", info.network.name),
                ("input", shape),
                (names, count),
                ("epoch", f"{info.position.epoch:.4g}"),
                *(
                    (parts.metric_name(n), parts.score(n, v))
                    for n, v in sorted(info.metrics.items())
                ),
                ("preprocessing", info.preprocess_hash[:10]),
            ]
        )


def _volumes(context: Context, chosen: Checkpoint, run: str) -> None:
    """Volumes of the dataset to be looked at, and how others are asked about."""
    here = context.workspace.ref(chosen.path)

    def look(_: Dataset, split: str, index: int) -> None:
        asked = {"run": run, "checkpoint": here, "split": split, "index": str(index)}
        ui.navigate.to(parts.address("/explore", **asked))

    with parts.card("Segment a volume"):
        examples(context, chosen, look)
        text("p", "A network goes through a volume window by window, for a minute or more. Of a "
             "file its labels become a file, which any viewer of volumes lays over the volume."
             ).classes("muted small")  # fmt: skip
        told = commands.classify(here, ["volume.nii.gz"])
        argv = [*told.argv[: told.argv.index("--top")], "--out", "labels.nii.gz"]
        parts.Command(shlex.join(("tessella", *argv)))


def _beside_labels(
    context: Context, chosen: Checkpoint, example: tuple[str, int]
) -> VolumeAnswers | None:
    """The card of the volume that the address names, if it names one."""
    data = context.workspace.find_dataset(chosen.info.dataset_hash)
    if data is None or example[1] < 0:
        return None
    try:
        return VolumeAnswers(context, chosen, data, *example)
    except TessellaError as error:
        parts.refused(error, "Click another volume.")
        return None


def _layers_box() -> ui.element:
    """The card in which the layers appear once there is a picture."""
    with parts.card("Layers", "weights, and activations for this picture"):
        with parts.box("stack") as box:
            parts.empty("No picture yet", "Drop one at the left, or click an example: you will "
                        "see what every layer makes of it.")  # fmt: skip
    return box


class _Classify:
    """Classifies a picture: the five best answers here, every layer's output into ``layers``."""

    def __init__(self, context: Context, chosen: Checkpoint, layers: ui.element) -> None:
        self._context, self._checkpoint, self._layers = context, chosen, layers
        self._ref = context.workspace.ref(chosen.path)
        self._shown: Layers | None = None
        self._image: Path | None = None  # the last one that was asked about
        self._layers_command: parts.Command
        with parts.card(PROMPTS.get(of(chosen.info.task).answers.VERB, "Ask about a picture")):
            parts.drop_zone("Drop a picture", "or click to choose one", "image/*", self._uploaded)
            examples(context, chosen, self._example)
            self._trust = ui.switch("Run the Python code that this checkpoint brings")
            own_code = ".py" in chosen.info.network.name
            self._trust.set_visibility(own_code)
            self._answer = ui.element("div").classes("stack")
            self._command = parts.Command()
        if not own_code:  # once somebody looks: a script that fetches the page starts nothing
            ui.context.client.on_connect(lambda: context.answers.prepare(self._opened()))

    def _opened(self) -> Opened:
        path = self._checkpoint.path
        stamp = (path / "checkpoint.json").stat().st_mtime_ns
        return Opened(path=path, stamp=stamp, trust_code=bool(self._trust.value))

    async def _example(self, dataset: Dataset, split: str, index: int) -> None:
        content = dataset.split(split)[index].content
        with parts.errors_shown():
            upload = self._context.uploads.begin(f"{split} {index}", len(content))
            self._context.uploads.add(upload, 0, content)
            here = dataset, split, index
            await self._uploaded(upload, f"{split} {index}", example=here)

    async def _uploaded(
        self, upload: str, name: str, *, example: tuple[Dataset, str, int] | None = None
    ) -> None:
        """Ask for the answers, then for the layers.

        Args:
            example: the image of a dataset that it is, if it is one: its truth stands beside.
        """
        image = self._context.uploads.file(upload)
        self._answer.clear()
        source = f"/pictures/upload/{upload}"
        if example is not None:  # of a volume a slice, where a browser knows no volume
            dataset, split, index = example
            ref = self._context.workspace.ref(dataset.path)
            source = pictures.example_address(dataset, ref, split, index)
        with self._answer:
            with ui.element("div") as shown:
                parts.picture(source, name).style(
                    "width:128px;height:128px;object-fit:contain;image-rendering:pixelated"
                )
            waiting = text("p", "Asking the network …").classes("muted small")
        trust = bool(self._trust.value)
        here = self._context.workspace.ref(image)
        self._command.show(commands.shown(commands.classify(self._ref, [here], trust_code=trust)))
        try:
            answer = await self._context.answers.ask(self._opened(), {"image": str(image)})
        except TessellaError as error:
            if waiting.is_deleted:
                return
            waiting.text = ""
            with self._answer:
                parts.note(str(error), "bad")
            return
        if waiting.is_deleted:  # its page was left, or another picture came
            return
        waiting.delete()
        if "answer" in answer and self._is_about_places(answer["answer"], example):
            shown.clear()
            with shown:
                await self._beside_truth(source, name, answer, example)
        with self._answer:
            self._told(answer)
        await self._show_layers(image)

    def _told(self, image: dict[str, Any]) -> None:
        """The answer: bars of a classification, else the rows that a terminal shows."""
        if "top" in image:
            _answers([(t["label"], t["score"]) for t in image["top"]])
            return
        task = of(self._checkpoint.info.task).answers
        parts.table([parts.Column(title=t) for t in task.HEADER], task.lines(image["answer"]))

    def _is_about_places(self, told: Any, example: tuple[Dataset, str, int] | None) -> bool:
        task = of(self._checkpoint.info.task)
        truth = () if example is None else _marked(*example)
        return bool(task.answers.things(told) or truth or (task.examples.PLACED and told))

    async def _beside_truth(
        self,
        source: str,
        name: str,
        image: dict[str, Any],
        example: tuple[Dataset, str, int] | None,
    ) -> None:
        """What the network finds in a picture, over it; and beside it what is there."""
        height, width = image["size"]
        answers, told = of(self._checkpoint.info.task).answers, image["answer"]
        things, over = answers.things(told), ""
        if not things:  # a class for each pixel
            over = await asyncio.to_thread(masks_of, answers, told, (height, width))
        with parts.box("beside"):
            with parts.box("stack"):
                text("b", "What the network says").classes("small")
                boxed(source, name, things, (height, width), names=True, over=over)
            if example is not None:
                dataset, split, index = example
                with parts.box("stack"):
                    text("b", "What is there").classes("small")
                    ref = self._context.workspace.ref(dataset.path)
                    pictures.example_picture(dataset, ref, split, index, name, large=True)
        if over:
            legend(answers, {one["index"]: str(one["label"]) for one in told})

    async def _show_layers(self, image: Path) -> None:
        key = digest([self._ref, image.parent.name])[:24]
        folder = self._context.workspace.own("layers", key)
        if (shown := self._shown) is None:
            self._layers.clear()
            with self._layers:
                text("p", "Looking into the layers …").classes("muted small")
        self._image = image

        async def ask(index: int) -> Look:
            asked: dict[str, object] = {"image": str(image), "layers": str(folder), "layer": index}
            return cast(Look, await self._context.answers.ask(self._opened(), asked))

        try:
            look, problem = await ask(0 if shown is None else shown.here), None
        except TessellaError as error:
            look, problem = None, str(error)
        if self._layers.is_deleted or self._image != image:  # another picture came
            return
        here = self._context.workspace.ref(image)
        trust = bool(self._trust.value)
        line = commands.shown(commands.show_layers(self._ref, here, out="layers", trust_code=trust))
        pictures = f"/pictures/own/layers/{key}"
        if look is not None and self._shown is not None:
            self._layers_command.show(line)
            await self._shown.again(look, ask, pictures)
            return
        self._layers.clear()
        self._shown = None
        with self._layers:
            if look is None:
                parts.note(str(problem), "bad")
                return
            self._shown = Layers(look, ask, pictures)
            self._layers_command = parts.Command(line)


def _read_report(file: Path) -> Report:
    """A report, parsed beside the event loop: that of 1,000 classes has a million counts."""
    return cast(Report, parse_json(file.read_bytes(), where=str(file)))


def _marked(dataset: Dataset, split: str, index: int) -> tuple[Thing, ...]:
    """What the truth of an image has at places in it."""
    target = dataset.split(split)[index].label
    return of(dataset.info.task).answers.marked(target, dataset.classes)


def _answers(top: list[tuple[str, float]]) -> None:
    """Labels with bars, best first."""
    with parts.box("answers"):
        for label, score in top:
            with parts.box("answer"):
                text("span", label).classes("name cut")
                text("span", f"{100 * score:.2f} %")
                with parts.box("track"):
                    ui.element("div").style(f"width:{100 * score:.1f}%")


# --- where it errs ---------------------------------------------------------------------


class _Errors:
    """Confusion matrix, precision and recall on the validation split, measured once by a job."""

    def __init__(self, context: Context, chosen: Checkpoint) -> None:
        self._context, self._checkpoint = context, chosen
        self._ref = context.workspace.ref(chosen.path)
        self._data = context.workspace.find_dataset(chosen.info.dataset_hash)
        key = digest([self._ref, chosen.info.files["model.safetensors"].sha256])[:24]
        self._file = context.workspace.own("evaluations") / f"{key}.json"
        self._places = of(chosen.info.task).errors is not None  # its errors have a place
        self._rows = self._file.with_suffix(".npy")
        with parts.card("Where it errs", "on the validation split"):
            self._box = ui.element("div").classes("stack")
            run = context.workspace.ref(chosen.path.parents[1])
            with parts.link("/evaluate", "small", run=run, checkpoint=self._ref):
                text("span", "Evaluate it: intervals, calibration, curves, two models compared")

    async def show(self) -> None:
        there = self._file.exists() and (self._rows.exists() or not self._places)
        report = await asyncio.to_thread(_read_report, self._file) if there else None
        if self._box.is_deleted:  # the page was left
            return
        self._box.clear()
        with self._box:
            if report is not None:
                self._report(report)
            elif self._data is None:
                parts.note("The dataset that this network was trained on is not in the workspace.")
            elif "val" not in open_dataset(self._data).info.splits:
                parts.note("Its dataset has no validation split: nothing tells how it does on what "
                           "it has not learned. An import with a part held out gives one."
                           )  # fmt: skip
            else:
                gives = "its measures"
                if self._places:
                    gives = "what is missed, false or misplaced, precision and recall"
                elif of(self._checkpoint.info.task).charts.CONFUSION:
                    gives = "the confusion matrix, precision and recall"
                with parts.empty("Not measured yet", "One pass over the validation split gives "
                                 f"{gives}."):  # fmt: skip
                    parts.button("Measure", self._measure, icon="fact_check")
                parts.Command(commands.shown(self._spec("evaluation.json", "answers.npy")))

    def _spec(self, out: str, rows: str) -> JobSpec:
        if self._data is None:
            raise ArtifactError("the dataset of this checkpoint is not in the workspace")
        data = self._context.workspace.ref(self._data)
        return commands.evaluate(self._ref, data, out=out, rows=rows if self._places else None)

    async def _measure(self) -> None:
        where = (self._context.workspace.ref(path) for path in (self._file, self._rows))
        with parts.errors_shown():
            job = self._context.store.submit(self._spec(*where))
            await watch(self._context, job, self._box, self.show)

    def _report(self, report: Report) -> None:
        if self._places and self._data is not None:
            try:
                ref = self._context.workspace.ref(self._data)
                dataset = open_dataset(self._data)
                BoxErrors(self._checkpoint, dataset, ref, self._rows, dict(report))
            except TessellaError as error:
                parts.note(str(error), "bad")
                parts.plain_button("Measure again", self._measure, "refresh")
            return
        if not of(self._checkpoint.info.task).charts.CONFUSION:
            values = {k: v for k, v in report.items() if isinstance(v, float)}
            parts.stats([(name, parts.score(name, value)) for name, value in values.items()])
            if classes := dict(report).get("classes"):
                measures(cast(list[dict[str, Any]], classes))
            return
        parts.stats([("accuracy", f"{100 * report['accuracy']:.2f} %"),
                     ("images", f"{sum(map(sum, report['confusion'])):,}")])  # fmt: skip
        matrix = Confusion(self._context, report, self._data, "val")
        with parts.box("duo"):
            matrix.mistakes()
            figures(report["per_class"])
